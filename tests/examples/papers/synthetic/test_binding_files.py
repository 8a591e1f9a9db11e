"""Collection of the local-evidence benchmark."""

from __future__ import annotations

import pytest

from examples.papers.synthetic.binding import MIN_SIDE, PANELS
from examples.papers.synthetic.binding_accuracy import measure
from examples.papers.synthetic.binding_data import evaluation_pairs
from examples.papers.verbs import binding
from pipeline.eval import evaluation
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import job
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import BENCHMARKS, ENCODERS
from tests.conftest import ROOT

ENCODER = {
    "name": "colpali",
    "model": str(ROOT / "jobs/data/models/shapes_colpali"),
    "dtype": "float32",
}


def test_success_at_1_is_the_pairwise_accuracy(cluster, tmp_path):
    data = str(tmp_path / "binding")
    binding.main(["--write", data, "--pairs", "2", "--side", str(MIN_SIDE)])
    files = {"name": "mmeb", "path": f"{data}/test.parquet"}
    judged = BENCHMARKS.build(BENCHMARKS.resolve(files)).load()
    assert len(judged.queries) == 2 * PANELS
    for query_id, pool in judged.pools.items():
        assert judged.qrels[query_id] == {pool[0]: 1}
        assert sorted(pool) == [pool[1], pool[0]]  # the hard negative is first among equal scores
    index, source = str(tmp_path / "index"), {**files, "images": f"{data}/images"}
    representations = [{"compressor": "none", "codec": "float32"}]
    spec = IndexSpec(index=index, source=source, encoder=ENCODER, representations=representations)
    job.run(spec, IndexResources(), job="binding")
    output = str(tmp_path / "results")
    fields = {"measures": ["Success@1"], "scores": ["maxsim"], "bm25": False}
    evaluated = EvaluateSpec(index=index, benchmark=files, output=output, **fields)
    found = evaluation.run(evaluated, lambda line: None)
    (row,) = found.results
    encoder = ENCODERS.build(ENCODERS.resolve(ENCODER))
    (accuracy,) = measure(encoder, evaluation_pairs(2), "rendered", MIN_SIDE)
    assert row.means["Success@1"] == pytest.approx(accuracy.accuracy, abs=1e-9)
