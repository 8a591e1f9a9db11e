"""Images of queries, which are read and encoded in small batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.batching import concatenate
from pipeline.paths import open_file
from pipeline.search.query import Unencoded, encode

#: Number of images in memory at the same time.
IMAGES_PER_BATCH = 32
#: Maximum size of a query image, in bytes.
MAX_IMAGE_BYTES = 64 << 20


class ImageFiles(Mapping[str, bytes]):
    """Image files by query id. Each is read when it is needed.

    Args:
        uris: URIs of PNG, JPEG or WebP files by query id.
    """

    def __init__(self, uris: Mapping[str, str]):
        self._uris = uris

    def __getitem__(self, query_id: str) -> bytes:
        uri = self._uris[query_id]
        rule = f"a benchmark with all query images, each of at most {MAX_IMAGE_BYTES:,} bytes"
        try:
            with open_file(uri) as file:
                data = file.read(MAX_IMAGE_BYTES + 1)
        except (FileNotFoundError, KeyError):  # KeyError: not a member of the archive
            raise SpecError("benchmark", uri, rule, "does not exist") from None
        except OSError as error:
            raise SpecError("benchmark", uri, rule, f"cannot be read ({error})") from None
        if len(data) > MAX_IMAGE_BYTES:
            raise SpecError("benchmark", uri, rule, "is larger")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._uris)

    def __len__(self) -> int:
        return len(self._uris)


def encode_all(encoder: Encoder, queries: Iterable[Unencoded]) -> EncodedQueries:
    """Encodes queries of any kinds, in order. Consecutive texts are encoded in one batch.

    Raises:
        SpecError: A query is invalid, or the encoder does not support its kind.
    """
    parts: list[EncodedQueries] = []
    batch: list[Unencoded] = []
    for query in queries:
        is_full = len(batch) == IMAGES_PER_BATCH and not isinstance(query, str)
        if batch and (is_full or type(query) is not type(batch[0])):
            parts.append(encode(encoder, batch))
            batch = []
        batch.append(query)
    parts.append(encode(encoder, batch))
    if len(parts) == 1:
        return parts[0]
    texts = [text for part in parts for text in part.token_texts]
    return EncodedQueries(concatenate([part.tokens for part in parts]), texts)
