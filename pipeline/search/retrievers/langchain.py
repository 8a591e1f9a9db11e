"""Retriever of LangChain."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from pipeline.extras import as_missing_extra
from pipeline.search.library import Index
from pipeline.search.retrievers import retrieve

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
except ModuleNotFoundError as error:
    raise as_missing_extra(error) from error


class MaxrayRetriever(BaseRetriever):
    """Returns the items that an index finds for a text, as documents.

    The id of a document is that of the item. Its metadata are `item_id`, `parent_id`, `score`,
    `title`, `span`, `modality` and `source` of the hit, and those of the item, which take
    precedence.

    Further arguments are options of `Index.search`, such as `k`, `filter`, `representation` and
    `score`. Those of a call of `invoke` take precedence.
    """

    model_config = ConfigDict(extra="allow")

    index: Index
    """Index with an encoder, or with `encode_queries`."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        found = retrieve(self.index, query, {**(self.model_extra or {}), **options})
        return [
            Document(id=hit.item_id, page_content=hit.text or "", metadata=metadata)
            for hit, metadata in found
        ]
