"""The retriever of LlamaIndex."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.config import SpecError

pytest.importorskip("llama_index.core", reason="needs the extra llama-index")

from llama_index.core import QueryBundle, get_response_synthesizer
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from pipeline.search.retrievers.llama_index import MaxrayRetriever


def test_nodes(index):
    first, second = MaxrayRetriever(index, k=2).retrieve("text 4")
    hits = index.search("text 4", k=2)
    assert (first.node_id, first.text, first.score) == ("item-4", "text 4", hits[0].score)
    assert first.metadata == {
        "item_id": "item-4",
        "parent_id": "item-4",
        "score": hits[0].score,
        "title": "title 4",
        "modality": "vectors",
        "source": "4.pdf",  # of the item, not of the hit
        "year": 2004,
    }
    assert (second.node_id, second.score) == (hits[1].item_id, hits[1].score)


def test_item_without_text_and_metadata(index):
    (node,) = MaxrayRetriever(index, k=1).retrieve(QueryBundle("text 9"))
    assert (node.node_id, node.text) == ("item-9", "")
    assert node.metadata["source"] == index.search("text 9", k=1)[0].source


def test_options(index):
    name = index.compress("kcenter", 2)
    options = {"representation": name, "score": "maxsim", "filter": "metadata LIKE '%2003%'"}
    (node,) = MaxrayRetriever(index, **options).retrieve("text 4")
    (hit,) = index.search("text 4", **options)
    assert (node.node_id, node.score) == ("item-3", hit.score)
    assert MaxrayRetriever(index, filter="item_id = 'unknown'").retrieve("text 4") == []
    with pytest.raises(SpecError, match="unknown field 'filtre'.* did you mean 'filter'"):
        MaxrayRetriever(index, filtre="").retrieve("text 4")


def test_asynchronous_calls_and_query_engines(index):
    retriever = MaxrayRetriever(index, k=1)
    assert asyncio.run(retriever.aretrieve("text 7"))[0].node_id == "item-7"
    synthesizer = get_response_synthesizer(llm=MockLLM())  # repeats its prompt
    response = RetrieverQueryEngine(retriever, synthesizer).query("text 4")
    assert response.source_nodes[0].node_id == "item-4"
    assert "title 4" in str(response)
