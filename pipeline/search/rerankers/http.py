"""Reranking with a model behind an endpoint: the interfaces of Cohere, Jina and vLLM.

Formats: `/v1/rerank`, `/v2/rerank` and `/rerank` with `query` and `documents`, and vLLM's
`/v1/score` and `/score` with `text_1` and `text_2`.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PositiveFloat

from pipeline import config
from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders.endpoint import (
    Endpoint,
    EndpointError,
    EndpointFields,
    ResponseError,
    parse_json,
)
from pipeline.encoders.images import png_file
from pipeline.index.listing import chunks
from pipeline.search.rerankers import OPTIONS, Reranker, RerankerSpec, Source
from pipeline.search.rerankers.contents import NO_IMAGE, NO_TEXT, ItemImages, item_texts
from pipeline.search.results import RerankScore

#: Fields that do not affect the score of a pair.
NOT_IN_FINGERPRINT = (
    *("url", "batch_size", "max_concurrency", "timeout_s", "max_tries", "api_key_variable"),
    *OPTIONS,
)


class HttpReranker(Reranker["HttpReranker.Spec"]):
    """Reranker that sends a text query with texts or images of items to an endpoint.

    The score is that of the response. The score of a video is the highest score of its frames.
    Items without the content that is sent keep their ranks.
    """

    class Spec(EndpointFields, RerankerSpec):
        """Endpoint and model, and the content that is sent."""

        name: Literal["http"] = "http"
        path: Literal["/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"] = "/v1/rerank"
        """Path of the interface. `rerank` is that of Cohere (`/v2/rerank`), Jina and vLLM, `score`
        that of vLLM."""
        revision: str | None = None
        """Version of the weights, which identifies the model in caches of evaluations if a server
        can change its weights under the same name."""
        documents: Literal["text", "images"] = "text"
        """Content of an item that is sent: its text, or its image or frames."""
        image_format: Literal["content", "image"] = "content"
        """Format of images: the `content` parts of vLLM's messages, or an object with an `image`,
        as for Jina's API."""
        max_frames: int = Field(8, ge=1)
        """Maximum number of frames per video."""
        batch_size: int = Field(32, ge=1)
        """Number of texts or images per request."""
        timeout_s: PositiveFloat = 30.0
        """Timeout of connecting, and of waiting for the response, in seconds."""
        max_tries: int = Field(3, ge=1)
        """Maximum number of attempts per request."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.fingerprint = config.digest(config.dump(spec, exclude=NOT_IN_FINGERPRINT))
        self._endpoint = Endpoint(spec)

    def missing(self, query: str | bytes) -> str:
        """Returns the reason why an item cannot be sent."""
        return NO_TEXT if self.spec.documents == "text" else NO_IMAGE

    def score(
        self,
        source: Source,
        queries: Sequence[str | bytes],
        candidates: Sequence[list[str]],
    ) -> list[dict[str, RerankScore]]:
        """Returns scores by item id per query, omitting items without content."""
        numbers = range(len(queries))
        if self.spec.documents == "text":
            texts = item_texts(source.index, (i for ids in candidates for i in ids))
            parts = [(q, i, texts[i]) for q in numbers for i in candidates[q] if i in texts]
            return self._best(queries, parts)
        images = ItemImages(source.index, self.spec.max_frames)
        found: list[dict[str, RerankScore]] = []
        for query, item_ids in zip(queries, candidates, strict=True):  # which bounds the memory
            parts = [
                (0, item_id, self._image(png_file(image)))
                for item_id in item_ids
                for image, _, _ in images.read(item_id)
            ]
            found += self._best([query], parts)
        return found

    def _best(
        self, queries: Sequence[str | bytes], parts: Sequence[tuple[int, str, Any]]
    ) -> list[dict[str, RerankScore]]:
        """Returns the highest score per query and item. Parts are (query, item id, content)."""
        batches = [
            batch
            for _, group in itertools.groupby(parts, key=lambda part: part[0])
            for batch in chunks(group, self.spec.batch_size)
        ]
        best: list[dict[str, float]] = [{} for _ in queries]
        for batch, scores in zip(batches, self._request(queries, batches), strict=True):
            for (q, item_id, _), score in zip(batch, scores, strict=True):
                best[q][item_id] = max(score, best[q].get(item_id, score))
        return [{i: RerankScore(score=s) for i, s in scores.items()} for scores in best]

    def _image(self, image: bytes) -> Any:
        data = base64.b64encode(image).decode()
        if self.spec.image_format == "image":
            return {"image": data}
        url = {"url": f"data:image/png;base64,{data}"}
        return {"content": [{"type": "image_url", "image_url": url}]}

    def _request(
        self, queries: Sequence[str | bytes], batches: Sequence[Sequence[tuple[int, str, Any]]]
    ) -> list[list[float]]:
        """Returns the scores of batches of parts, each of one query."""
        spec = self.spec
        names = ("text_1", "text_2") if spec.path.endswith("score") else ("query", "documents")
        bodies = []
        for batch in batches:
            body: dict[str, Any] = {names[0]: queries[batch[0][0]]}
            body[names[1]] = [content for _, _, content in batch]
            bodies.append(body if spec.path.endswith("score") else {**body, "top_n": len(batch)})
        self.usage.requests += len(bodies)
        try:
            return [
                _read_scores(content, len(batch), spec)
                for content, batch in zip(
                    self._endpoint.post(spec.path, bodies), batches, strict=True
                )
            ]
        except (EndpointError, ResponseError) as error:
            rule = f"the URL of a server that answers {spec.path}"
            raise SpecError("rerank.url", spec.url, rule, note=f" ({error})") from None
        except Unreadable as error:
            rule = "a query that the endpoint accepts with the items"
            raise SpecError("query", str(queries[0]), rule, note=f" ({error.detail})") from None
        except SpecError as error:
            raise error.below("rerank") from None


def _read_scores(content: bytes, number: int, spec: HttpReranker.Spec) -> list[float]:
    """Reads the scores of a response, in the order of the documents.

    Raises:
        ResponseError: The model, the number of results or the values are not valid.
    """
    response = parse_json(content)
    list_name, score_name = "results", "relevance_score"
    if spec.path.endswith("score"):
        list_name, score_name = "data", "score"
    try:
        model = response.get("model", spec.model)
        results = response[list_name]
        scores = {result["index"]: float(result[score_name]) for result in results}
    except (KeyError, TypeError, AttributeError, ValueError):
        problem = f"must contain {list_name}, a list of objects with index and {score_name}"
        raise ResponseError(f"the response of the endpoint {problem}") from None
    if model != spec.model:
        raise ResponseError(f"the endpoint must answer with the model {spec.model}, got {model}")
    if len(results) != number or scores.keys() != set(range(number)):
        expected = f"one result for each of {number} documents"
        raise ResponseError(f"the endpoint must return {expected}, got {len(results)}")
    if not all(map(math.isfinite, scores.values())):
        raise ResponseError("the endpoint must return finite scores, got NaN or infinity")
    return [scores[index] for index in range(number)]
