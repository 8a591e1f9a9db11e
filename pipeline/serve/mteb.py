"""Adapter that evaluates a served index on the tasks of mteb.

    import mteb
    from pipeline.serve.client import Client
    from pipeline.serve.mteb import Endpoint

    with Client("http://127.0.0.1:8000") as client:
        mteb.evaluate(Endpoint(client, index="cranfield", representation="hpool_32"), task)

The index must already contain the corpus of the task, with the same ids. Requires the extra `mteb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipeline import extras
from pipeline.serve.client import Client, ServerError

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

#: Number of documents of the corpus that `Endpoint.index` looks up in the index.
NUM_CHECKED_DOCUMENTS = 8
#: Maximum number of hits and of queries per request.
MAX_BATCH_HITS, MAX_BATCH_QUERIES = 10_000, 32


class Endpoint:
    """Search model of mteb that searches a served index.

    Args:
        client: Client of the server.
        index: Name of the index. Optional if there is only one.
        representation: Name of the representation. Default: the default of the server.
        judged: Whether the documents of the task are items or parents of items.
        max_k: Maximum number of hits per query; limits the 1,000 hits that mteb requests.
        options: Further search options, such as `score` or `rerank`.
    """

    def __init__(
        self,
        client: Client,
        *,
        index: str | None = None,
        representation: str | None = None,
        judged: Literal["item", "parent"] = "item",
        max_k: int = 1_000,
        **options: Any,
    ):
        self._client, self._judged, self._max_k = client, judged, max_k
        self._index = index
        names = {"index": index, "representation": representation}
        self._options = {field: name for field, name in names.items() if name} | options
        if judged == "parent":
            self._options["group_by"] = "parent"

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """Metadata that mteb stores with the results."""
        extras.require("mteb")
        from pipeline.datasets.mteb_results import model_meta

        index = self._options.get("index", "index")
        return model_meta(f"{index}-{self._options.get('representation', 'full')}", "served")

    def index(self, corpus: Iterable[Mapping[str, Any]], **metadata: Any) -> None:
        """Checks that the index contains the first documents of the corpus.

        Args:
            corpus: Rows with `id` and, optionally, `title` and `text`.
            metadata: Further arguments of mteb, which are ignored.

        Raises:
            ValueError: The index lacks a document.
        """
        for number, document in enumerate(corpus):
            if number == NUM_CHECKED_DOCUMENTS:
                return
            results: Sequence[Any] = ()
            if self._judged == "parent":
                query = document.get("title") or document.get("text") or "a"
                options = {**self._options, "parents": [document["id"]], "k": 1}
                results = self._client.search(str(query)[:200], **options).hits
            else:
                try:
                    results = [self._client.item(document["id"], self._index)]
                except ServerError as error:
                    if error.problem.code != "not_found":
                        raise
            if not results:
                raise ValueError(f"the index lacks the document {document['id']!r} of the corpus")

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **metadata: Any,
    ) -> dict[str, dict[str, float]]:
        """Returns the scores of the best documents of each query, by query id and document id.

        Args:
            queries: Rows with `id` and `text`.
            top_k: Maximum number of documents per query.
            top_ranked: Ids of the documents to rank, by query id. Defaults to the whole index.
            metadata: Further arguments of mteb, which are ignored.
        """
        top_k = min(top_k, self._max_k)
        texts = {query["id"]: query["text"] for query in queries}
        if top_ranked is not None:
            selection = "parents" if self._judged == "parent" else "ids"
            return {
                query_id: self._scores(
                    self._client.search(
                        text, k=top_k, **{**self._options, selection: list(top_ranked[query_id])}
                    ).hits
                )
                for query_id, text in texts.items()
            }
        scores: dict[str, dict[str, float]] = {}
        ids, size = list(texts), max(min(MAX_BATCH_HITS // top_k, MAX_BATCH_QUERIES), 1)
        for first in range(0, len(ids), size):
            batch_ids = ids[first : first + size]
            batch = [texts[query_id] for query_id in batch_ids]
            results = self._client.search_batch(batch, k=top_k, **self._options).results
            scores |= {i: self._scores(hits) for i, hits in zip(batch_ids, results, strict=True)}
        return scores

    def _scores(self, hits: Sequence[Any]) -> dict[str, float]:
        is_parent = self._judged == "parent"
        # Scores of rerankers and of the first stage are not comparable. Negative ranks are.
        return {
            (hit.parent_id if is_parent else hit.item_id): -float(hit.rank)
            if hit.rerank
            else hit.score
            for hit in hits
        }
