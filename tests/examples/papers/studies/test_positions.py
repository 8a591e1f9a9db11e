"""Use of the vectors of trained models by position, compared with loops."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.papers.studies.positions import Positions, positions, positions_of
from examples.papers.studies.study import runs_of
from examples.papers.verbs import positions as positions_job
from pipeline import config
from pipeline.config import SpecError
from pipeline.tokens import normalise
from pipeline.train.loop import check
from tests.examples.papers.studies.test_study import study_of
from tests.train.runs import trained


@pytest.fixture(scope="module")
def study(model, tmp_path_factory):
    """A trained study with a row that is evaluated with another compressor too."""
    folder = tmp_path_factory.mktemp("study")
    pooled = [{"name": "hpool", "num_vectors": 3}]
    sweep = [
        {"name": ["full"], "learner.validation_compressors": [pooled]},
        {
            "name": ["memtok"],
            "learner.compressor": [{"name": "memtok"}],
            "learner.num_appended_tokens": [4],
            "seed": [0, 1],
        },
    ]
    spec = study_of(folder / "out", model, sweep, max_steps=1)
    (folder / "spec.yaml").write_text(config.dump_yaml(spec), "utf-8")
    for run in runs_of(spec)[:2]:
        trained(run.spec)
    return spec, str(folder / "spec.yaml")


def test_positions_equal_loops(model, tmp_path):
    """Ragged documents, a query without tokens, and documents that are not relevant."""
    data = check(runs_of(study_of(tmp_path, model, {"seed": [0]}))[0].spec)
    batch = data.validation()
    num_queries, num_documents = len(batch.queries), len(batch.documents)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return normalise(torch.randn(*size, generator=generator))

    lengths_Q = torch.randint(0, 4, (num_queries,), generator=generator)
    lengths_B = torch.randint(0, 6, (num_documents,), generator=generator)
    embedded = {
        "query_vectors": random(num_queries, 3, 8),
        "query_mask": torch.arange(3) < lengths_Q[:, None],
        "document_vectors": random(num_documents, 5, 8),
        "document_mask": torch.arange(5) < lengths_B[:, None],
    }
    found = positions(embedded, batch, data)

    queries, documents = (
        embedded[f"{name}_vectors"].double().tolist() for name in ("query", "document")
    )
    relevant_QB = data.relevant(batch.query_labels, batch.document_labels)
    sums, counts = [[0.0] * 3 for _ in range(5)], [0] * 3
    for q in range(num_queries):
        for d in range(num_documents):
            if not relevant_QB[q, d] or not lengths_B[d]:
                continue
            for i in range(int(lengths_Q[q])):
                similarities = [
                    sum(a * b for a, b in zip(queries[q][i], documents[d][p], strict=True))
                    for p in range(int(lengths_B[d]))
                ]
                best = max(range(len(similarities)), key=similarities.__getitem__)
                sums[best][i] += similarities[best]
                counts[i] += 1
    expected = [sum(row[i] / counts[i] for i in range(3)) / 3 for row in sums]
    assert found.strengths == pytest.approx(expected, abs=1e-6)

    cosines, total = [], [[[] for _ in range(5)] for _ in range(5)]
    for d in range(num_documents):
        pairs = []
        for p in range(int(lengths_B[d])):
            for r in range(int(lengths_B[d])):
                cosine = sum(a * b for a, b in zip(documents[d][p], documents[d][r], strict=True))
                total[p][r].append(cosine)
                if p != r:
                    pairs.append(cosine)
        if pairs:
            cosines.append(sum(pairs) / len(pairs))
    means = [[sum(values) / max(1, len(values)) for values in row] for row in total]
    np.testing.assert_allclose(found.similarity, means, atol=1e-6)
    assert found.mean_similarity == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)


def test_share_of_the_strongest_tenth():
    flat = Positions(np.ones(20), np.ones((1, 1)), None)
    assert flat.largest_share == pytest.approx(0.1)
    assert Positions(np.array([3.0, 1.0, -1.0]), np.ones((1, 1)), None).largest_share == 0.75
    assert Positions(np.zeros(3), np.ones((1, 1)), None).largest_share == 0.0


def test_job_draws_the_rows_of_trained_runs(study, capsys):
    spec, path = study
    positions_job.main([path])  # the second seed of memtok need not be trained
    output = capsys.readouterr().out
    assert output.splitlines()[0].split()[:2] == ["run", "positions"]
    with open(f"{spec.output}/positions.csv", encoding="utf-8") as file:
        rows = {row["run"]: int(row["positions"]) for row in csv.DictReader(file)}
    full = rows.pop("full")
    assert full > 4 and rows == {"full > hpool num_vectors 3": 3, "memtok": 4}
    assert Path(spec.output, "positions.png").read_bytes().startswith(b"\x89PNG")
    assert list(positions_of(runs_of(spec), ["memtok"])) == ["memtok"]


def test_trained_weights_are_read(study, model, tmp_path):
    """The vectors are those of the last checkpoint, not those of the initial model."""
    spec, _ = study
    row = positions_of(runs_of(spec), ["memtok"])["memtok"]
    initial = runs_of(spec)[1].spec
    assert initial.output.endswith("memtok_seed-0")
    other = study_of(tmp_path, model, {"seed": [0]}, max_steps=1)
    with pytest.raises(SpecError, match="which has no checkpoint"):
        positions_of(runs_of(other))
    assert row.similarity.shape == (4, 4)


def test_bad_rows(study):
    spec, path = study
    with pytest.raises(
        SpecError,
        match="--row must be one of .*, got 'memtoc', which is not a row.*did you mean 'memtok'",
    ):
        positions_of(runs_of(spec), ["memtoc"])
    with pytest.raises(SystemExit) as error:
        positions_job.main([path, "--row"])
    assert error.value.code == 2
