"""BM25 against its formula in float64 and against bm25s, on the shipped collections."""

import json
import math
from collections import Counter

import bm25s
import numpy as np
import pyarrow as pa
import pytest
import Stemmer
from bm25s.tokenization import Tokenizer

from pipeline.config import SpecError, parse
from pipeline.search.generators.bm25 import (
    COUNT_BITS,
    MAX_COUNT,
    Bm25,
    Postings,
    encode,
    query_terms,
    term_hash,
)
from tests.conftest import CRANFIELD, ROOT


def tokenizer() -> Tokenizer:
    """Returns the tokenizer of bm25s with the same stop words and stemmer."""
    return Tokenizer(stemmer=Stemmer.Stemmer("english").stemWord, stopwords="english")


def words(texts: list[str]) -> list[list[str]]:
    return tokenizer().tokenize(texts, return_as="string", update_vocab=True, show_progress=False)


def read(path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return read(CRANFIELD / "corpus.jsonl")


@pytest.fixture(scope="module")
def queries() -> list[str]:
    return read(CRANFIELD / "queries.jsonl") + read(ROOT / "jobs/data/pages/queries.jsonl")


def build(texts: list[str | None], **options: float) -> Bm25:
    spec = Bm25.Spec(**options)
    return Bm25(spec, Bm25.fit(spec, [texts[:5], texts[5:]]))


def reference(texts: list[str | None], query: str, k1: float = 1.2, b: float = 0.75) -> np.ndarray:
    """Returns the scores of Lucene's variant of BM25 in float64."""
    present = [text for text in texts if text]
    documents = iter(words(present))
    counts = [Counter(next(documents)) if text else Counter() for text in texts]
    lengths = [counted.total() for counted in counts]
    mean = sum(lengths) / len(present)
    scores = np.zeros(len(texts))
    for word in words([query])[0]:
        matching = sum(word in counted for counted in counts)
        if not word or not matching:
            continue
        idf = math.log(1 + (len(present) - matching + 0.5) / (matching + 0.5))
        for i, counted in enumerate(counts):
            norm = k1 * (1 - b + b * lengths[i] / mean)
            scores[i] += idf * counted[word] / (counted[word] + norm)
    return scores


@pytest.mark.parametrize("options", [{}, {"k1": 0.5, "b": 0.2}, {"b": 0}])
def test_equals_formula(texts, queries, options):
    sample = [*texts[:150], None, "", "of the and", "a b"]
    generator = build(sample, **options)
    postings = Postings(generator, [encode(sample[:40]), encode(sample[40:])])
    for query in queries[::15]:
        expected = reference(sample, query, **options)
        np.testing.assert_allclose(postings.scores(query), expected, rtol=2e-6, atol=1e-6)


def test_equals_bm25s(texts, queries):
    present = [text for text in texts if text]
    tokens = tokenizer()
    ids = tokens.tokenize(present, return_as="ids", update_vocab=True, show_progress=False)
    library = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    library.index((ids, tokens.get_vocab_dict()), show_progress=False)
    postings = Postings(build(present), [encode(present)])
    for query in queries[::5]:
        (found,) = tokens.tokenize(
            [query], return_as="ids", update_vocab=False, show_progress=False
        )
        expected = library.get_scores(found)
        np.testing.assert_allclose(postings.scores(query), expected, rtol=2e-5, atol=2e-5)


def test_codes_are_the_counts_of_terms():
    codes = encode(["Wings and the wing lift", None, "", "of the", "x"])
    assert codes.type == pa.list_(pa.int64())
    wing, *others = codes.to_pylist()
    decoded = {entry >> COUNT_BITS: entry & MAX_COUNT for entry in wing}
    assert decoded == {term_hash("wing"): 2, term_hash("lift"): 1}
    assert wing == sorted(wing)
    assert others == [[], [], *[[(term_hash("") << COUNT_BITS) | 1]] * 2]


def test_counts_are_limited():
    ((entry,),) = encode(["wing " * (MAX_COUNT + 5)]).to_pylist()
    assert (entry & MAX_COUNT, entry >> COUNT_BITS) == (MAX_COUNT, term_hash("wing"))


def test_hashes_of_the_shipped_collection_are_different(texts):
    terms = {word for document in words([t for t in texts if t]) for word in document}
    assert len({term_hash(term) for term in terms}) == len(terms) > 4000


def test_terms_after_the_fit_have_the_idf_of_unseen_terms():
    generator = build(["wing lift", "bread oven"])
    added = ["wing lift", "bread oven", "zebra stripes"]
    scores = Postings(generator, [encode(added)]).scores("a zebra")
    idf = math.log(1 + 2.5 / 0.5)
    assert scores.tolist() == pytest.approx([0, 0, idf / (1 + 1.2)])
    assert Postings(generator, [encode(added[:2])]).scores("wing").tolist()[1] == 0


def test_repeated_words_of_a_query_count_repeatedly():
    generator = build(["wing lift", "bread oven", "wing oven"])
    postings = Postings(generator, [encode(["wing lift", "bread"])])
    assert query_terms("wings, a wing!") == {term_hash("wing"): 2}
    assert postings.scores("wings, a wing!") == pytest.approx(2 * postings.scores("wing"))
    assert not postings.scores("of the").any()
    assert not postings.scores("").any()


def test_empty_index():
    generator = build([None, ""])
    assert Postings(generator, []).scores("wing").tolist() == []
    codes = pa.array([None, []], pa.list_(pa.int64()))
    assert Postings(generator, [codes]).scores("wing").tolist() == [0, 0]


def test_invalid_options():
    for options in ({"k1": -1}, {"b": 1.5}):
        with pytest.raises(SpecError, match=f"^{next(iter(options))} must be"):
            parse(Bm25.Spec, {"name": "bm25", **options})


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("re\u0301sume\u0301 of Zoe\u0308", "r\xe9sum\xe9 Zo\xeb"),
        ("\ufb01ling o\ufb03ces", "filing offices"),  # ligatures
        (
            "\uff34\uff4f\uff4b\uff59\uff4f \uff76\uff9e\uff72\uff84\uff9e",
            "Tokyo \u30ac\u30a4\u30c9",
        ),
        ("\u1112\u1161\u11ab\u1100\u1173\u11af", "\ud55c\uae00"),  # Hangul jamo
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940",
            "\u0939\u093f\u0928\u094d\u0926\u0940",
        ),
        ("\u0643\u0650\u062a\u064e\u0627\u0628\u064c", "\u0643\u062a\u0627\u0628"),  # vowel signs
        ("\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("hy\xadphen\xadation", "hyphenation"),
        ("a\u0323\u0302n", "a\u0302\u0323n"),  # order of marks
    ],
)
def test_forms_of_a_word_are_the_same_term(text, query):
    for first, second in ((text, query), (query, text)):
        terms = encode([first])[0].as_py()
        assert query_terms(second).keys() <= {entry >> COUNT_BITS for entry in terms}
        assert query_terms(second)


def test_indic_words_are_not_divided():
    hindi, ki = "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0915\u0940"
    assert len(query_terms(f"{hindi} {ki}")) == 2
