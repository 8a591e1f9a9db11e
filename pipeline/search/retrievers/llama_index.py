"""Retriever of LlamaIndex."""

from __future__ import annotations

from typing import Any

from pipeline.extras import as_missing_extra
from pipeline.search.library import Index
from pipeline.search.retrievers import retrieve

try:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ModuleNotFoundError as error:
    raise as_missing_extra(error) from error


class MaxrayRetriever(BaseRetriever):
    """Returns the items that an index finds for a text, as nodes.

    The id of a node is that of the item. Its metadata are `item_id`, `parent_id`, `score`, `title`,
    `span`, `modality` and `source` of the hit, and those of the item, which take precedence.

    Args:
        index: Index with an encoder, or with `encode_queries`.
        options: Options of `Index.search`, such as `k`, `filter`, `representation` and `score`.
    """

    def __init__(
        self, index: Index, *, callback_manager: CallbackManager | None = None, **options: Any
    ):
        super().__init__(callback_manager)
        self._index, self._options = index, options

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(id_=hit.item_id, text=hit.text or "", metadata=metadata),
                score=hit.score,
            )
            for hit, metadata in retrieve(self._index, query_bundle.query_str, self._options)
        ]
