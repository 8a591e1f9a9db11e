"""Models behind an endpoint: OpenAI-style embeddings, and token embeddings of vLLM.

Formats: `POST /v1/embeddings` with `input`, and vLLM's `POST /pooling` with `task: token_embed`.
Images are sent as vLLM's chat messages with a data URL, one image per request.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders import EncodedQueries, check_query_texts
from pipeline.encoders.batching import PartsEncoder, join_parts
from pipeline.encoders.endpoint import Endpoint, EndpointSpec
from pipeline.encoders.images import item_images, png_file
from pipeline.encoders.qwen_spec import CONTENT, Prompt
from pipeline.encoders.templates import Templates, fill_template
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch

#: Fields that do not affect query vectors.
NOT_IN_FINGERPRINT = (
    *("url", "documents", "document_prompt", "batch_size", "max_concurrency", "timeout_s"),
    *("max_tries", "api_key_variable"),
)


class Http(PartsEncoder["Http.Spec"]):
    """Encoder that sends texts or images to an endpoint.

    The endpoint applies the model's tokenizer. Everything else that the model expects around a
    text, such as a prefix or augmentation tokens, must be part of the prompts. Vectors are
    normalised to unit length. Items without content have no tokens.
    """

    class Spec(EndpointSpec):
        """Endpoint and model, the prompts, and the content that is sent."""

        name: Literal["http"] = "http"
        revision: str | None = None
        """Version of the weights. It identifies the model in the fingerprint if a server can change
        its weights under the same name.
        """
        documents: Literal["text", "images"] = "text"
        """Content of an item that is encoded. "images" are sent as chat messages of vLLM, one image
        or video frame per request.
        """
        query_prompt: Prompt = CONTENT
        """Prompt of queries. `{content}` is replaced with the query, and `{instruction}` with the
        instruction of the benchmark's task."""
        document_prompt: Prompt = CONTENT
        """Prompt of the texts of items. `{content}` is replaced with the text."""
        image_prompt: str = ""
        """Text after the image in a message, for example "Describe the image."."""
        batch_size: int = Field(32, ge=1)
        """Number of texts per request."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dim = spec.dim
        self.pooled_dim = spec.dim if spec.api == "embeddings" else None
        self.fingerprint = config.digest(config.dump(spec, exclude=NOT_IN_FINGERPRINT))
        self._endpoint = Endpoint(spec)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Checks that the server can be reached, accepts the API key and serves the model."""
        Endpoint(spec).check_model()

    def templates(self) -> Templates:
        """Returns the prompts. The server adds special tokens."""
        text = image = None
        if self.spec.documents == "text":
            text = self.spec.document_prompt.replace(CONTENT, "{text}")
        else:
            image = f"{{image}}{self.spec.image_prompt}"
        return Templates(self._query_prompt.replace(CONTENT, "{query}"), text, image)

    # -- items -------------------------------------------------------------------------------------

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Encodes texts or images, `batch_size` items at a time and in order."""
        batches, counts = [], []
        for start in range(0, len(items), self.spec.batch_size):
            chunk = items.slice(start, self.spec.batch_size).to_pylist()
            parts = [self._read_item(item) for item in chunk]
            batches.append(self._bodies([part for item in parts for part in item]))
            counts.append([len(item) for item in parts])
        results = self._endpoint.embed([body for bodies in batches for body in bodies])
        start = 0
        for bodies, numbers in zip(batches, counts, strict=True):
            matrices = [matrix for _ in bodies for matrix in next(results)]
            rows = np.arange(start, start + len(numbers))
            start += len(numbers)
            yield rows, self._batch(matrices, numbers)

    def _read_item(self, item: Mapping[str, Any]) -> list[str | bytes]:
        if self.spec.documents == "text":
            text = item.get("text") or ""
            return [self.spec.document_prompt.replace(CONTENT, text)] if text.strip() else []
        if item.get("image"):
            return [item["image"]]
        return [png_file(image) for image, _, _ in item_images(item)]

    def _bodies(self, parts: Sequence[str | bytes]) -> list[dict[str, Any]]:
        """Returns the bodies of requests: one for all texts, or one per image."""
        if not parts:
            return []
        if isinstance(parts[0], str):
            return [{"input": list(parts)}]
        return [{"messages": [self._message(part)]} for part in parts if isinstance(part, bytes)]

    def _message(self, image: bytes) -> dict[str, Any]:
        with Image.open(io.BytesIO(image)) as opened:
            media_type = Image.MIME[opened.format or "PNG"]
        url = f"data:{media_type};base64,{base64.b64encode(image).decode()}"
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
        if self.spec.image_prompt:
            content.append({"type": "text", "text": self.spec.image_prompt})
        return {"role": "user", "content": content}

    def _batch(self, matrices: Sequence[np.ndarray], counts: Sequence[int]) -> TokenBatch:
        parts = [torch.from_numpy(matrix.copy()) for matrix in matrices]
        pooled = [part[0] for part in parts] if self.pooled_dim else None
        return join_parts(parts, counts, self.dim, pooled)

    # -- queries -----------------------------------------------------------------------------------

    @property
    def _query_prompt(self) -> str:
        return fill_template(self.spec.query_prompt, self._instruction)

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Encodes query texts, in order. The tokens of a query have numbers instead of texts."""
        check_query_texts(texts)
        prompts = [self._query_prompt.replace(CONTENT, text) for text in texts]
        size = self.spec.batch_size
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return self._encode_queries([b for batch in batches for b in self._bodies(batch)], texts)

    def _encode_opened(self, images: Sequence[Image.Image]) -> EncodedQueries:
        """Encodes image queries, in order."""
        files = [png_file(image) for image in images]
        return self._encode_queries(self._bodies(files), ["the image"] * len(images))

    def _encode_queries(
        self, bodies: Sequence[Mapping[str, Any]], names: Sequence[str]
    ) -> EncodedQueries:
        try:
            matrices = [matrix for result in self._endpoint.embed(bodies) for matrix in result]
        except Unreadable as error:
            rule = "a query that the endpoint accepts"
            raise SpecError("query", names[0], rule, note=f" ({error.detail})") from None
        token_texts = [[f"#{number}" for number in range(len(matrix))] for matrix in matrices]
        if self.spec.api == "embeddings":
            token_texts = [[name] for name in names]
        return EncodedQueries(self._batch(matrices, [1] * len(matrices)), token_texts)
