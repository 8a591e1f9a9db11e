"""The class `Index`: an index that Python code fills, searches and compresses, without Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.compression import Compressor
from pipeline.config import SpecError, first_line, location, parse, within
from pipeline.defaults import CODEC
from pipeline.encoders.shared import Encoders
from pipeline.index import delete, find_index, job_id
from pipeline.index.add import AddedColumns
from pipeline.index.add import run as add_columns
from pipeline.index.columns import Representation, check_representations
from pipeline.index.in_process import InProcess
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader, check_contents, contains_index, exists
from pipeline.index.recompress import Recompression, RecompressResources, RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.upsert import Given, upsert
from pipeline.paths import is_uri
from pipeline.registry import COMPRESSORS
from pipeline.search.candidates_job import Candidates, CandidatesJobSpec, CandidatesResources
from pipeline.search.maps import SimilarityMap, similarity_map
from pipeline.search.query import AnyQueries, AnyQuery
from pipeline.search.results import Hit
from pipeline.search.searcher import Searcher

if TYPE_CHECKING:
    from pipeline.index.folder import Account

#: Representations of a new index: all vectors.
REPRESENTATIONS = ({"id": "full", "compressor": "none", "codec": CODEC},)

#: One item or query: vectors (N, D), or a single vector (D,).
Vectors = np.ndarray | torch.Tensor
#: Returns the vectors (M, D) of each of several texts.
EncodeQueries = Callable[[list[str]], Sequence[Vectors]]


class Index:
    """An index in a folder or in object storage, which is created when items are added.

    It is the index that `maxray index` writes, evaluations read and `maxray serve` serves. Several
    processes can read it while one of them writes.

    >>> import tempfile
    >>> random = np.random.default_rng(0)
    >>> vectors = [random.standard_normal((20, 16)) for _ in range(3)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index = Index(folder + "/library")
    ...     _ = index.add(["a", "b", "c"], vectors)
    ...     [hit.item_id for hit in index.search(vectors[1][:4], k=2)][0]
    'b'

    Args:
        uri: Path or URI of the index, or path of the folder beside which it is.
        encode_queries: Encodes text queries for an index of vectors that another library computed,
            such as `model.encode_query` of sentence-transformers. An index whose items Maxray has
            encoded loads its encoder itself.
        version: Version to read. The default is the newest.
        cache: Whether to pack vectors into memory-mapped local files, see `pipeline.search.cache`.
        device: "cpu", or a CUDA device that holds the vectors and computes the scores.

    Raises:
        SpecError: The folder has other contents, or the index is of another format.
    """

    def __init__(
        self,
        uri: str,
        *,
        encode_queries: EncodeQueries | None = None,
        version: int | None = None,
        cache: bool = True,
        device: str = "cpu",
    ):
        self.uri = location(uri, "index")
        if is_uri(self.uri) or Path(self.uri).exists():  # else, a new index
            self.uri = find_index(self.uri)
        self._encode_queries, self._version = encode_queries, version
        self._cache, self._device = cache, device
        self._encoders: Encoders = {}
        self._searcher: Searcher | None = None
        check_contents(self.uri)
        if version is not None or self._is_created:
            self._open()

    def __len__(self) -> int:
        return len(self.reader) if self._is_created else 0

    def __repr__(self) -> str:
        return f"Index({self.uri!r}, items={len(self)})"

    @property
    def _is_created(self) -> bool:
        return exists(self.uri) and contains_index(self.uri)

    def _open(self) -> Searcher:
        if self._searcher is None:
            self._searcher = Searcher(
                IndexReader(self.uri, self._version),
                cache=self._cache,
                device=self._device,
                encoders=self._encoders,
            )
        return self._searcher

    @property
    def searcher(self) -> Searcher:
        """Search over the version that is open, with all its options."""
        return self._open()

    @property
    def reader(self) -> IndexReader:
        """Rows and columns of the version that is open."""
        return self._open().index

    @property
    def representations(self) -> dict[str, RepresentationInfo]:
        """Stored representations by name."""
        return self.reader.representations() if self._is_created else {}

    def add(
        self,
        ids: Sequence[str],
        vectors: Iterable[Vectors],
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        titles: Sequence[str | None] | None = None,
        representations: Sequence[Mapping[str, Any]] = REPRESENTATIONS,
        label: str = "given",
    ) -> int:
        """Adds items with vectors that are given, or replaces those of the same ids.

        All items become visible in one commit, or none if the call fails. Vectors are normalised to
        unit length, so that scores are sums of cosines.

        Args:
            ids: Distinct strings of 1 to 512 characters.
            vectors: Vectors (N, D) of each item, as encoders return them, or a padded array
                (B, N, D), whose rows of zeros are omitted.
            texts: Texts, which hits show and which BM25 and `fused` search.
            metadata: JSON objects, which filters can use.
            titles: Titles of the items.
            representations: Columns of a new index. Those of an existing index remain.
            label: Name of the model that computed the vectors, for a new index.

        Returns:
            Version of the index.

        Raises:
            SpecError: The items are invalid, or differ from those of the index.
            LeaseHeld: Another process is writing to the index.
        """
        lists = {"texts": texts, "titles": titles, "metadata": metadata}
        more = {name: _list(name, values) for name, values in lists.items() if values is not None}
        given = Given(_list("ids", ids), _arrays("vectors", vectors), **more)
        columns = []
        for number, fields in enumerate(_list("representations", representations)):
            with within(f"representations[{number}]"):
                columns.append(parse(Representation, fields))
        check_representations(columns)
        with self._changes():
            upsert(self.uri, given, columns, label, self._executor, job=job_id())
        return self.reader.version

    def add_files(
        self,
        *paths: str,
        encoder: str | Mapping[str, Any] = "minilm",
        see: str | None = None,
    ) -> Account:
        """Indexes folders and files, as `maxray index` does, and returns what became of each file.

        Calling it again replaces changed files and removes deleted ones. `print` shows the result
        as a table.

        Args:
            paths: Folders, files and glob patterns. All types of files are detected.
            encoder: Name or settings of the encoder. The default, `minilm`, also encodes the text
                that OCR and speech recognition find, if they are installed.
            see: Checkpoint of CLIP or SigLIP, a folder or a name on the hub, such as
                `google/siglip2-base-patch16-224`. Images and video frames are then also found by
                what they show. Later calls need not repeat it.

        Raises:
            SpecError: A path does not exist, or the index has another encoder.
            LeaseHeld: Another process is writing to the index.
        """
        from pipeline.index.folder import folder_spec, index_files  # imports all readers

        spec = parse(IndexSpec, folder_spec(paths, self.uri, encoder, see))
        with self._changes():
            return index_files(
                spec, IndexResources(), job_id=job_id(), report=_ignore, executor=self._executor
            )

    def search(
        self,
        query: AnyQuery | AnyQueries | torch.Tensor,
        representation: str | None = None,
        *,
        k: int = 10,
        **options: Any,
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the k best items for a query, or for each of several. See `Searcher.search`.

        Notebooks show the hits as a table.

        Args:
            query: A text, an image as the bytes of its file, a `Composed` query with audio, a video
                or several parts, vectors (M, D), or a list of these.
            representation: Representation to search. Defaults to `full` if it exists, otherwise to
                the first.
            options: Other options, such as `filter`, `score`, `negative`, `candidates` or
                `explain`.

        Raises:
            SpecError: An argument is invalid, or a text is given and the index has neither an
                encoder nor `encode_queries`.
        """
        if options.get("negative") is not None:
            options["negative"] = self._encoded(options["negative"])
        return self._open().search(self._encoded(query), representation, k=k, **options)

    def similarity_map(
        self, query: AnyQuery | torch.Tensor, item_id: str, representation: str | None = None
    ) -> SimilarityMap:
        """Computes the similarities of the words of an item to a query.

        Notebooks show the words in the colours of their contributions. See
        `pipeline.search.maps.similarity_map`.
        """
        return similarity_map(self._open(), self._encoded(query), item_id, representation)

    def _encoded(self, query: Any) -> Any:
        """Returns a query with arrays in place of tensors, and of texts if there is an encoder."""
        if isinstance(query, torch.Tensor):
            query = _array("query", query)
        if isinstance(query, list):
            query = [_array("query", q) if isinstance(q, torch.Tensor) else q for q in query]
        if self._encode_queries is not None and (texts := _texts(query)):
            encoded = _arrays("encode_queries", self._encode_queries(texts))
            if len(encoded) != len(texts):
                rule = f"a function that returns {len(texts)} arrays, one per text"
                raise SpecError("encode_queries", len(encoded), rule)
            query = encoded[0] if isinstance(query, str) else encoded
        return query

    def delete(self, ids: Sequence[str] | None = None, *, filter: str | None = None) -> int:
        """Deletes items by their ids or by an SQL condition, and returns their number."""
        spec = parse(delete.DeleteSpec, {"index": self.uri, "ids": ids, "filter": filter})
        with self._changes():
            return delete.run(spec, job=job_id(), report=_ignore).removed

    def compress(
        self,
        method: str | Mapping[str, Any] | Compressor[Any] | type[Compressor[Any]],
        num_vectors: int | None = None,
        *,
        codec: str | Mapping[str, Any] = "int8",
        source: str = "full",
        id: str = "",
    ) -> str:
        """Adds a representation with fewer vectors per item, and returns its name.

        Items that are added later get it as well. Call it again with the same arguments to fill
        rows that an interrupted call has left.

        Args:
            method: Name or settings of a compressor, such as `kcenter`; or a compressor of your
                own, as a class of a module or as an instance of it.
            num_vectors: Maximum number of vectors per item.
            codec: Name or settings of the codec.
            source: Uncompressed representation to read.
            id: Name of the representation. By default it consists of method, budget and codec.
        """
        with within("compressor"):
            compressor = COMPRESSORS.fields(method)
        if num_vectors is not None:
            compressor["num_vectors"] = num_vectors
        fields = {"compressor": compressor, "codec": codec, "id": id}
        representation = parse(Representation, fields)
        spec = RecompressSpec(index=self.uri, source=source, representations=[representation])
        self._run(Recompression(spec, RecompressResources()))
        return representation.id

    def add_candidates(
        self, generator: str | Mapping[str, Any], representation: str | None = None
    ) -> None:
        """Builds a candidate generator, such as `ivf`, or codes rows that were added since.

        Searches use it with `candidates="ivf"`.

        Args:
            generator: Name or settings of the generator.
            representation: Representation whose scores it approximates, as in `search`.
        """
        fields = {"index": self.uri, "generator": generator, "representation": representation}
        spec = parse(CandidatesJobSpec, fields)
        self._run(Candidates(spec, CandidatesResources()))

    def _run(self, columns: AddedColumns) -> None:
        with self._changes():
            add_columns(columns, job=job_id(), report=_ignore, executor=self._executor)

    @property
    def _executor(self) -> InProcess:
        return InProcess(self._encoders)

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Checks that the index can be changed, and opens its newest version afterwards."""
        if self._version is not None:
            rule = "null for an index that is changed"
            raise SpecError("version", self._version, rule)
        yield
        self._searcher = None


def _list(field: str, values: Any) -> list[Any]:
    others = str | bytes | Mapping | set | frozenset
    if not isinstance(values, Iterable) or isinstance(values, others):
        raise SpecError(field, values, "a list")
    return list(values)


def _array(field: str, vectors: Any) -> np.ndarray:
    """Returns vectors as float32, also those of a GPU or in bfloat16."""
    try:
        if isinstance(vectors, torch.Tensor):
            vectors = vectors.detach()
            vectors = (vectors if vectors.is_complex() else vectors.float()).cpu().numpy()
        array = np.asarray(vectors)
        if array.dtype.kind in "cSUOMm":
            raise TypeError(f"of the type {array.dtype}")
        with np.errstate(over="ignore"):  # infinity is reported later
            return array.astype(np.float32, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor without data
        problem = f"cannot be converted ({first_line(error)})"
        raise SpecError(field, type(vectors).__name__, "an array of numbers", problem) from None


def _arrays(field: str, vectors: Any) -> list[np.ndarray]:
    """Returns the vectors (N, D) of each item. Rows of zeros in a padded array are omitted."""
    is_padded = isinstance(vectors, np.ndarray | torch.Tensor) and vectors.ndim == 3
    if isinstance(vectors, np.ndarray | torch.Tensor) and not vectors.ndim:
        raise SpecError(field, vectors, "a list")
    items = vectors.unbind() if isinstance(vectors, torch.Tensor) else _list(field, vectors)
    arrays = [_array(f"{field}[{n}]", item) for n, item in enumerate(items)]
    if is_padded:
        arrays = [array[np.any(array != 0, axis=1)] for array in arrays]
    return [array[None] if array.ndim == 1 else array for array in arrays]


def _texts(query: Any) -> list[str]:
    """Returns the texts of a query that consists of one or several texts, otherwise none."""
    texts = [query] if isinstance(query, str) else query
    is_text = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_text else []


def _ignore(line: str) -> None:
    """Shows nothing: calls return what jobs report."""
