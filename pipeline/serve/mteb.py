"""An endpoint as a search model of mteb: its tasks are evaluated against what is served.

    import mteb
    from pipeline.serve.client import Client
    from pipeline.serve.mteb import Endpoint

    with Client("http://127.0.0.1:8000") as client:
        mteb.evaluate(Endpoint(client, index="cranfield", representation="hpool_32"), task)

The index must hold the task's corpus, with its ids; it is not made here. Needs the extra `mteb`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipeline import extras
from pipeline.serve.client import Client, ServerError

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

#: Documents of a corpus that are looked for in the index before a task is run.
LOOKED_FOR = 8
#: Hits, and queries, of a request at most.
BATCH_HITS, BATCH = 10_000, 32


class Endpoint:
    """What mteb calls a search model: `index` checks the corpus, `search` asks the server.

    Args:
        client: of the server.
        index, representation: what is searched; default: as the server chooses.
        judged: whether the task's documents are items, or parents of items.
        max_k: hits of a query that the server gives at most; mteb asks for 1,000.
        options: of each search, such as score or rerank.
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
        named = {"index": index, "representation": representation}
        self._options = {name: value for name, value in named.items() if value} | options
        if judged == "parent":
            self._options["group_by"] = "parent"

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What mteb writes beside the results."""
        extras.require("mteb")
        from mteb.models.model_meta import ModelMeta

        index = self._options.get("index", "index")
        name = f"maxray/{index}-{self._options.get('representation', 'full')}"
        return ModelMeta.create_empty(overwrites={"name": name, "revision": "served"})

    def index(self, corpus: Iterable[Mapping[str, Any]], **about: Any) -> None:
        """Checks that the index contains the first documents of the corpus.

        Raises:
            ValueError: The index lacks a document.
        """
        for number, document in enumerate(corpus):
            if number == LOOKED_FOR:
                return
            found: Sequence[Any] = ()
            if self._judged == "parent":
                query = document.get("title") or document.get("text") or "a"
                asked = {**self._options, "parents": [document["id"]], "k": 1}
                found = self._client.search(str(query)[:200], **asked).hits
            else:
                try:
                    found = [self._client.item(document["id"], self._index)]
                except ServerError as error:
                    if error.problem.code != "not_found":
                        raise
            if not found:
                raise ValueError(f"the index lacks {document['id']!r}, a document of the corpus")

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **about: Any,
    ) -> dict[str, dict[str, float]]:
        """Returns the scores of the best documents of each query, by query id and document id.

        Args:
            queries: Rows with `id` and `text`.
            top_k: Maximum number of documents per query.
            top_ranked: Ids of the documents to rank, by query id; default: the whole index.
            about: Further arguments of mteb, which are ignored.
        """
        top_k = min(top_k, self._max_k)
        texts = {query["id"]: query["text"] for query in queries}
        if top_ranked is not None:
            only = "parents" if self._judged == "parent" else "ids"
            return {
                query_id: self._scores(
                    self._client.search(
                        text, k=top_k, **{**self._options, only: list(top_ranked[query_id])}
                    ).hits
                )
                for query_id, text in texts.items()
            }
        found: dict[str, dict[str, float]] = {}
        ids, size = list(texts), max(min(BATCH_HITS // top_k, BATCH), 1)
        for first in range(0, len(ids), size):
            some = ids[first : first + size]
            asked = [texts[query_id] for query_id in some]
            results = self._client.search_batch(asked, k=top_k, **self._options).results
            found |= {i: self._scores(hits) for i, hits in zip(some, results, strict=True)}
        return found

    def _scores(self, hits: Sequence[Any]) -> dict[str, float]:
        parent = self._judged == "parent"
        # Scores of EDJE and of its first stage are not to be compared: numbers that say the order.
        return {
            (hit.parent_id if parent else hit.item_id): -float(hit.rank) if hit.edje else hit.score
            for hit in hits
        }
