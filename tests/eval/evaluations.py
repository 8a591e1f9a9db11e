"""Evaluations for tests, built from given values."""

from dataclasses import replace

from pipeline.eval.diagnostics import Diagnosis
from pipeline.eval.results import Evaluation, Result, merge_seeds

#: Two pairs of one query and one of another; the OSR is (0.5 + 1 + 0.75) / 3.
DIAGNOSIS = Diagnosis(
    full="full",
    pairs={"q0": [[1.0, 2.0], [2.0, 2.0]], "q1": [[3.0, 4.0]]},
    num_missing=0,
    used=0.5,
    used_relevant=0.25,
    cv=120.0,
    gini=0.4,
    num_positions=3,
    strengths=[0.5, 0.1, 0.3],
    similarity=[[1.0, 0.2, 0.1], [0.2, 1.0, 0.4], [0.1, 0.4, 1.0]],
    similarity_mean=0.23,
    num_sampled=1000,
)


def result(representation="hpool_32", method="hpool", num_vectors=32, score="maxsim", **fields):
    """Returns a row; `quality` is the headline metric of each query."""
    quality = fields.pop("quality", [0.4, 0.42])
    values = {f"q{i}": {"nDCG@10": value, "AP": value / 2} for i, value in enumerate(quality)}
    defaults = {
        "encoder": "e1",
        "values": values,
        "vectors_per_item": 31.5,
        "vector_bytes": 24192.0,
        "all_bytes": 26000.0,
        "queries_per_second": 1234.5,
        "median_ms": 1.5,
        "p95_ms": 2.25,
    }
    return Result(representation, method, num_vectors, score, **{**defaults, **fields})


def evaluation_of(results, **fields):
    spec = {
        "index": "out/index",
        "benchmark": {"name": "beir", "path": "data/some"},
        "judged": "parent",
    }
    defaults = {
        "spec": spec,
        "headline": "nDCG@10",
        "judgments": "j1",
        "num_items": 1400,
        "notes": ["2 judged queries"],
        "created": "2026-01-02 03:04 UTC",
        "versions": {"maxray": "0.1.0"},
    }
    return Evaluation(**{**defaults, **fields}, results=results)


def six_rows():
    """Returns BM25, a single vector, an uncompressed row, and a method with several settings."""
    no_vectors = {"encoder": "", "vectors_per_item": 0.0, "vector_bytes": 0.0, "all_bytes": 0.0}
    single = {"vectors_per_item": 1.0, "vector_bytes": 768.0, "all_bytes": 768.0}
    return [
        result("bm25", "bm25", None, "bm25", quality=[0.3, 0.4], **no_vectors),
        result("minilm_pooled", "single_vector", 1, "single_vector", quality=[0.2, 0.2], **single),
        result("full", "full", None, quality=[0.5, 0.5], vector_bytes=150e3, all_bytes=151e3),
        result(quality=[0.4, 0.42]),
        result(quality=[0.5, 0.48], score="hybrid", vector_bytes=25e3, all_bytes=27e3),
        result("hpool_16", num_vectors=16, quality=[0.1, 0.12], vector_bytes=12e3, all_bytes=14e3),
    ]


def diagnosed(name, method, quality, osr, share=0.1, gini=0.5, **compressor):
    """Returns a MaxSim row whose diagnosis has this OSR."""
    diagnosis = replace(DIAGNOSIS, pairs={"q0": [[osr, 1.0]]}, gini=gini, cv=200 * gini)
    return result(
        name,
        method,
        compressor.get("num_vectors"),
        quality=[quality] * 2,
        vectors_per_item=100 * share,
        vector_bytes=1e4 * share,
        compressor={"name": method.split()[0], **compressor},
        diagnosis=diagnosis,
    )


def diagnosed_rows():
    """Returns an uncompressed row, seeds, layer scans, and methods at several budgets."""
    full = diagnosed("full", "full", 0.8, 1.0, share=1.0)
    full = replace(full, compressor={"name": "none"})
    seeds = [
        diagnosed(
            f"random_{seed}", "random", 0.2 + 0.1 * seed, 0.5 + 0.1 * seed, ratio=0.1, seed=seed
        )
        for seed in range(3)
    ]
    scans = [
        diagnosed(
            f"{name}_{layer}", f"{name} layers=[{layer}]", 0.4, osr, ratio=0.1, layers=[layer]
        )
        for name, osrs in (("sap", [0.6, 0.8, 0.9, 0.7]), ("eos", [0.5, 0.6]))
        for layer, osr in enumerate(osrs)
    ]
    return [
        full,
        *merge_seeds(seeds),
        *scans,
        diagnosed("hpool_10", "hpool", 0.7, 0.9, ratio=0.1, gini=0.25),
        diagnosed("hpool_20", "hpool", 0.8, 0.95, share=0.2, ratio=0.2),
        diagnosed("adaptive_10", "adaptive_eos", 0.4, 0.6, share=0.13, ratio=0.1, gini=1 / 3),
        diagnosed("hpool_k8", "hpool", 0.5, 0.7, num_vectors=8),
    ]


def reranked(depth: int, first: str, added: bool, quality: float):
    """Returns the row of a reranker behind the row `first`."""
    spec = {"name": "edje", "model": "m", "top": depth, "add_first_stage": added, "label": ""}
    cost = {"queries": 2.0, "pairs": 2.0 * depth, "unread": 0.0, "requests": 0.0, "seconds": 0.5}
    settings = {"rerankers": [spec], "parameters": 10, **cost}
    row = result(f"edje_{first}_{depth}_{added}", "edje", None, quality=[quality] * 2, score="edje")
    return replace(row, first_stage=first, rerank=settings, compressor={})
