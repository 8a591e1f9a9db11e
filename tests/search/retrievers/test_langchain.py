"""The retriever of LangChain."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.config import SpecError

pytest.importorskip("langchain_core", reason="needs the extra langchain")

from langchain_core.runnables import RunnableLambda

from pipeline.search.retrievers.langchain import MaxrayRetriever


def test_documents(index):
    first, second = MaxrayRetriever(index=index, k=2).invoke("text 4")
    hits = index.search("text 4", k=2)
    assert (first.id, first.page_content) == ("item-4", "text 4")
    assert first.metadata == {
        "item_id": "item-4",
        "parent_id": "item-4",
        "score": hits[0].score,
        "title": "title 4",
        "modality": "vectors",
        "source": "4.pdf",  # of the item, not of the hit
        "year": 2004,
    }
    assert (second.id, second.metadata["score"]) == (hits[1].item_id, hits[1].score)


def test_item_without_text_and_metadata(index):
    (document,) = MaxrayRetriever(index=index, k=1).invoke("text 9")
    assert (document.id, document.page_content) == ("item-9", "")
    assert document.metadata["source"] == index.search("text 9", k=1)[0].source


def test_options(index):
    name = index.compress("kcenter", 2)
    options = {"representation": name, "score": "maxsim", "filter": "metadata LIKE '%2003%'"}
    retriever = MaxrayRetriever(index=index, tags=["papers"], **options)
    (document,) = retriever.invoke("text 4")
    (hit,) = index.search("text 4", **options)
    assert (document.id, document.metadata["score"]) == ("item-3", hit.score)
    assert [found.id for found in retriever.invoke("text 4", k=1, filter=None)] == ["item-4"]
    assert retriever.invoke("text 4", filter="item_id = 'unknown'") == []
    with pytest.raises(SpecError, match="unknown field 'filtre'.* did you mean 'filter'"):
        MaxrayRetriever(index=index, filtre="").invoke("text 4")


def test_chains_batches_and_asynchronous_calls(index):
    retriever = MaxrayRetriever(index=index, k=1)
    chain = retriever | RunnableLambda(lambda documents: documents[0].page_content)
    assert chain.batch(["text 4", "text 8"]) == ["text 4", "text 8"]
    assert asyncio.run(chain.ainvoke("text 7")) == "text 7"
