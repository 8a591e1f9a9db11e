"""Comparisons of rows, and the results file."""

from dataclasses import replace

import pytest

from pipeline.config import SpecError
from pipeline.eval.cache import Cache
from pipeline.eval.results import (
    merge_seeds,
    method_name,
    pareto_front,
    read_results,
    row_comparisons,
    sort_results,
)
from tests.eval.evaluations import DIAGNOSIS, evaluation_of, reranked, result


def comparisons(results, measure="nDCG@10"):
    rows = row_comparisons(results, measure)
    return {r.name: comparison for r, comparison in zip(results, rows, strict=True)}


def test_reference_is_uncompressed_row_of_same_score(results):
    rows = comparisons([*results, result("full", "full", None, "hybrid", quality=[0.7, 0.7])])
    assert rows["full.maxsim"].retention == 1
    assert rows["full.maxsim"].p_reference is None
    assert rows["hpool_32.maxsim"].reference == "full.maxsim"
    assert rows["hpool_32.maxsim"].retention == pytest.approx(0.82)
    assert rows["hpool_32.hybrid"].reference == "full.hybrid"
    assert rows["hpool_32.hybrid"].retention == pytest.approx(0.7)
    assert rows["bm25"].reference == rows["minilm_pooled"].reference == "full.maxsim"


def test_fallback_references(results):
    rows = comparisons(results)  # no uncompressed row under the hybrid score
    assert rows["hpool_32.hybrid"].reference == "full.maxsim"
    rows = comparisons([r for r in results if r.method != "full"])
    assert rows["hpool_16.maxsim"].reference == "hpool_32.maxsim"
    assert rows["hpool_16.maxsim"].retention is None
    assert rows["hpool_32.hybrid"].reference == "hpool_32.hybrid"
    other = result("other_full", "full", None, encoder="e2", quality=[0.1, 0.1])
    assert comparisons([*results, other])["other_full.maxsim"].reference == "other_full.maxsim"
    assert comparisons([other])["other_full.maxsim"].p_bm25 is None


def test_reference_without_hits():
    rows = [result("full", "full", None, quality=[0.0, 0.0]), result(quality=[0.0, 0.1])]
    assert [comparison.retention for comparison in row_comparisons(rows, "nDCG@10")] == [None, None]


def test_pareto_front(results):
    names = [r.name for r in pareto_front(results, "nDCG@10")]
    assert names == ["minilm_pooled", "hpool_32.maxsim", "hpool_32.hybrid", "full.maxsim"]
    assert [name for name, row in comparisons(results).items() if row.pareto] == [
        "minilm_pooled",
        "full.maxsim",
        "hpool_32.maxsim",
        "hpool_32.hybrid",
    ]
    # Equal quality with more bytes, or lower quality with equal bytes, is dominated.
    equal = result("samer_32", "samer", vector_bytes=24193.0)
    worse = result("random_32", "random", quality=[0.39, 0.4])
    assert pareto_front([result(), equal, worse], "nDCG@10") == [result()]


def test_loses_to_bm25():
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    rows = comparisons([bm25, result(quality=[0.5] * 12), result("b", quality=[0.8] * 11 + [1.0])])
    assert rows["hpool_32.maxsim"].loses_to_bm25
    assert rows["b.maxsim"].p_bm25 > rows["hpool_32.maxsim"].p_bm25
    assert not rows["bm25"].below_bm25


def test_best_and_cheapest(evaluation, results):
    assert evaluation.best(results).name == "full.maxsim"
    assert evaluation.cheapest(results).name == "hpool_32.hybrid"
    assert evaluation.cheapest(results[5:]) is None


def test_sort_results(results):
    assert sort_results(results[::-1]) == results


def test_method_name_contains_non_default_settings():
    spec = {"name": "random", "num_vectors": 8, "ratio": None, "seed": 0}
    assert method_name(spec) == method_name({**spec, "seed": 3}) == "random"
    assert method_name({**spec, "rounding": "half_even"}) == "random rounding=half_even"
    assert method_name(spec, {"name": "int8"}, "caption") == "random int8 of caption"
    assert method_name({"name": "none"}, {"name": "int8"}) == "full int8"
    assert method_name({"name": "hpool", "num_vectors": 4, "layers": [3]}) == "hpool layers=[3]"


def seeds(*qualities, **fields):
    return [
        result(
            f"random_seed{seed}_32" if seed else "random_32",
            "random",
            quality=quality,
            median_ms=1.0 + seed,
            compressor={"name": "random", "num_vectors": 32, "seed": seed},
            **fields,
        )
        for seed, quality in enumerate(qualities)
    ]


def test_merge_seeds():
    hpool = result(compressor={"name": "hpool", "num_vectors": 32})
    rows = [*seeds([0.1, 0.5], [0.3, 0.5], [0.2, 0.2])[::-1], hpool]
    merged = merge_seeds([*rows, *seeds([0.7, 0.7], score="hybrid")])
    assert [r.name for r in merged] == ["random_32.maxsim", "hpool_32.maxsim", "random_32.hybrid"]
    row = merged[0]
    assert row.values["q0"] == pytest.approx({"nDCG@10": 0.2, "AP": 0.1})
    assert row.means["nDCG@10"] == pytest.approx(0.3)
    assert {name: means["nDCG@10"] for name, means in row.seeds.items()} == pytest.approx(
        {"random_32": 0.3, "random_seed1_32": 0.4, "random_seed2_32": 0.2}
    )
    assert row.spread("nDCG@10") == pytest.approx(0.1)
    assert row.median_ms == 2.0
    assert merged[1] is hpool and hpool.spread("nDCG@10") is None
    assert merged[2].spread("nDCG@10") is None and len(merged[2].seeds) == 1


def test_merge_seeds_keeps_duplicate_seeds_apart():
    first, copy = seeds([0.1, 0.1])[0], seeds([0.3, 0.3])[0]
    assert [len(row.seeds) for row in merge_seeds([first, copy])] == [1, 1]
    other_budget = replace(copy, compressor={**copy.compressor, "num_vectors": 16}, num_vectors=16)
    assert len(merge_seeds([first, other_budget])) == 2


def test_p_random_compares_same_budget():
    hpool = {"name": "hpool", "num_vectors": 32}
    (random,) = merge_seeds(seeds([0.1] * 12, [0.3] * 12))
    rows = [
        random,
        result(quality=[0.2] * 12, compressor=hpool),
        result("b", quality=[0.9] * 12, compressor=hpool),
        result("c", quality=[0.9] * 12, compressor=hpool, score="hybrid"),
        result("d", quality=[0.9] * 12, num_vectors=16, compressor={**hpool, "num_vectors": 16}),
        result("e", quality=[0.9] * 12, num_vectors=None, compressor={"name": "hpool", "ratio": 1}),
        result("full", "full", None, quality=[0.9] * 12, compressor={"name": "none"}),
        result("g", quality=[0.9] * 12, compressor=hpool, codec={"name": "int8"}),
    ]
    p_values = [row.p_random for row in row_comparisons(rows, "nDCG@10")]
    assert p_values[1] == 1 and p_values[2] < 0.01  # equal to the mean over seeds, and better
    assert [p_values[i] for i in (0, 3, 4, 5, 6, 7)] == [None] * 6


def test_results_round_trip(evaluation, tmp_path):
    diagnosed = replace(evaluation.results[3], diagnosis=DIAGNOSIS, seeds={"a": {"OSR": 0.5}})
    evaluation = evaluation_of(
        [*evaluation.results, diagnosed], document_categories={"pages": ["q0"]}
    )
    (tmp_path / "results.json").write_text(evaluation.to_json(), encoding="utf-8")
    assert read_results(str(tmp_path), "OUT") == evaluation


def test_reads_results_with_former_names(evaluation, tmp_path):
    rows = evaluation.results
    fit_sample = {"num_items": 5, "num_evaluated": 2, "origin": {}}
    rows = [*rows, reranked(10, "full.maxsim", False, 0.5), replace(rows[2], fit_sample=fit_sample)]
    evaluation = evaluation_of(rows, document_categories={"pages": ["q0"]})
    text = evaluation.to_json()
    for former, present in {
        "late": "maxsim",
        "single": "single_vector",
        "full.late": "full.maxsim",
        "pool": "rerank_depth",
        "fitted": "fit_sample",
        "evaluated": "num_evaluated",
        "kinds": "document_categories",
        "categories": "query_categories",
        "made": "created",
    }.items():
        assert f'"{present}"' in text
        text = text.replace(f'"{present}"', f'"{former}"')
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    assert read_results(str(tmp_path), "OUT") == evaluation


def test_renames_the_cache_folder_of_earlier_versions(tmp_path):
    entry = {"coverage": 0.5}
    Cache(str(tmp_path)).write("key", entry)
    (tmp_path / "entries").rename(tmp_path / "cells")
    assert Cache(str(tmp_path)).read("key", dict[str, float]) == entry
    assert [path.name for path in tmp_path.iterdir()] == ["entries"]


@pytest.mark.parametrize(
    "text", [None, "", "[]", "[" * 99_999, '{"results": [{"method": "hpool"}]}', "{}"]
)
def test_missing_and_corrupted_results(tmp_path, text):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(
        SpecError,
        match=r"^OUT must be the output folder of jobs.evaluate,"
        r" got .* results\.json",
    ):
        read_results(str(tmp_path), "OUT")
