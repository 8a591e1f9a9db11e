"""Studies: runs of a sweep, and what their table says."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from examples.papers.studies.study import (
    Row,
    Run,
    StudySpec,
    curves_of,
    evenness_points,
    report,
    rows_of,
    runs_of,
)
from examples.papers.verbs import study
from pipeline import config
from pipeline.config import SpecError
from tests.train.runs import spec_of


def study_of(folder, model, sweep, **more) -> StudySpec:
    given = config.dump(spec_of(folder, model, **more))
    return config.parse(StudySpec, {**given, "sweep": sweep})


def test_sweep_has_one_run_per_combination(model, tmp_path):
    compressors = ["none", {"name": "samer", "num_vectors": 4, "gamma": 0.0}]
    sweep = {"learner.compressor": compressors, "seed": [0, 1]}
    runs = runs_of(study_of(tmp_path, model, sweep))
    assert [run.title for run in runs] == [
        "none, seed 0",
        "none, seed 1",
        "samer num_vectors 4 gamma 0.0, seed 0",
        "samer num_vectors 4 gamma 0.0, seed 1",
    ]
    assert [run.row for run in runs] == [*["none"] * 2, *["samer num_vectors 4 gamma 0.0"] * 2]
    assert [run.spec.seed for run in runs] == [0, 1, 0, 1]
    assert runs[3].spec.learner.compressor.gamma == 0.0
    assert len({run.spec.output for run in runs}) == 4
    both = runs_of(study_of(tmp_path, model, [{"seed": [0]}, {"batch_size": [4, 6]}]))
    assert [run.title for run in both] == ["seed 0", "batch_size 4", "batch_size 6"]
    named = {"name": ["Single"], "learner.score": ["single_vector"], "seed": [0, 1]}
    called = runs_of(study_of(tmp_path, model, [named]))
    assert [run.title for run in called] == ["Single, seed 0", "Single, seed 1"]
    assert {run.row for run in called} == {"Single"}
    assert (
        called[1].spec.learner.score == "single_vector"
        and called[1].spec.name == "test_Single_seed-1"
    )


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            {"learner.temperature": [0.1, 0]},
            "sweep.learner.temperature must be greater than 0, got 0",
        ),
        (
            {"learner.temprature": [0.1]},
            "unknown field 'temprature' in sweep.learner; did you mean 'temperature'",
        ),
        ({"seed": []}, r"sweep.seed must be .*, got \[\]"),
        ({"seed": [1, 1]}, "sweep must be unique combinations, got 'seed 1', which occurs twice"),
    ],
)
def test_rejects_invalid_sweeps(model, tmp_path, sweep, message):
    with pytest.raises(SpecError, match=message):
        runs_of(study_of(tmp_path, model, sweep))


def test_table_averages_seeds_and_tests_queries(model, tmp_path):
    """On measures that are written by hand."""
    random = np.random.default_rng(0)
    base, better = random.integers(0, 2, (2, 40)).astype(float), np.ones((2, 40))
    runs = []
    for name, after in (("plain", base), ("good", better)):
        for seed in (0, 1):
            spec = spec_of(tmp_path / f"{name}-{seed}", model)
            folder = tmp_path / f"{name}-{seed}" / "validation"
            folder.mkdir(parents=True)
            np.savez(folder / "step-00000000.npz", **{"R@1": np.zeros(40)})
            np.savez(folder / "step-00000006.npz", **{"R@1": after[seed]})
            runs.append(Run(f"{name}, seed {seed}", name, spec))
    study = study_of(tmp_path, model, {"seed": [0, 1]})
    table = report(study, runs).splitlines()
    assert table[0].split() == ["run", "seeds", "R@1", "p", "(R@1)"]
    spread = base.mean(axis=1).std(ddof=1)
    assert f"0.000 > {base.mean():.3f} ± {spread:.3f}" in table[1]
    assert "0.000 > 1.000 ± 0.000" in table[2] and table[2].endswith("<0.001")
    rows = list(csv.DictReader((tmp_path / "study.csv").open()))
    assert [float(row["R@1 after"]) for row in rows] == pytest.approx([base.mean(), 1.0])
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    found = rows_of(runs)
    assert isinstance(found[0], Row) and found[0].after["R@1"].shape == (2, 40)


def test_rows_without_a_measure(model, tmp_path):
    """Methods whose vectors have no tokens have no grounding metrics."""
    runs = []
    for name, values in (("full", {"R@1": 0.5, "BoxMass": 0.25}), ("memtok", {"R@1": 0.75})):
        folder = tmp_path / name / "validation"
        folder.mkdir(parents=True)
        for step in (0, 6):
            values_Q = {measure: np.full(4, value) for measure, value in values.items()}
            np.savez(folder / f"step-{step:08d}.npz", **values_Q)
        runs.append(Run(name, name, spec_of(tmp_path / name, model)))
    table = report(study_of(tmp_path, model, {"seed": [0]}), runs).splitlines()
    assert table[1].count("0.250") == 2 and " - " in table[2]
    rows = list(csv.DictReader((tmp_path / "study.csv").open()))
    assert [row["BoxMass after"] for row in rows] == ["0.25", "nan"]


def test_plot_of_evenness_has_the_rows_with_its_metrics(model, tmp_path):
    runs = []
    measured = {"nDCG@10": 0.5, "CV": 20.0, "Gini": 0.25}
    for name, values in (
        ("full", measured | {f"{metric} (hpool num_vectors 4)": 1.0 for metric in measured}),
        ("other", {"nDCG@10": 0.75}),
    ):
        for seed, factor in ((0, 1.0), (1, 2.0)):
            output = tmp_path / f"{name}-{seed}"
            (output / "validation").mkdir(parents=True)
            values_Q = {metric: np.full(4, value * factor) for metric, value in values.items()}
            np.savez(output / "validation/step-00000006.npz", **values_Q)
            runs.append(Run(f"{name}, seed {seed}", name, spec_of(output, model)))
    method = runs[0].spec.learner.compressor.name
    points = evenness_points(rows_of(runs), runs)
    assert points == [(method, 0.75, (30.0, 0.375)), ("hpool", 1.5, (1.5, 1.5))]
    report(study_of(tmp_path, model, {"seed": [0, 1]}), runs)
    assert (tmp_path / "evenness.png").read_bytes().startswith(b"\x89PNG")


def test_curves_have_the_steps_of_all_seeds(model, tmp_path):
    runs = []
    for name, seed, steps in (
        ("long", 0, (0, 5, 10, 15)),
        ("long", 1, (0, 5, 10)),
        ("end", 0, (0, 5)),
    ):
        output = tmp_path / f"{name}-{seed}"
        (output / "validation").mkdir(parents=True)
        for step in steps:
            values = {"R@1": np.array([step, step + seed]) / 20, "R@1 (eos)": np.zeros(2)}
            np.savez(output / f"validation/step-{step:08d}.npz", **values)
        runs.append(Run(f"{name}, seed {seed}", name, spec_of(output, model)))
    curves = curves_of(runs, ["R@1", "BoxMass"])
    assert list(curves) == ["long"] and list(curves["long"]) == ["R@1"]
    steps_T, values_ST = curves["long"]["R@1"]
    assert steps_T.tolist() == [0, 5, 10]
    np.testing.assert_allclose(values_ST, [[0, 0.25, 0.5], [0.025, 0.275, 0.525]])
    spec = study_of(tmp_path, model, {"seed": [0, 1]})
    report(spec, runs[2:])
    assert not (tmp_path / "curves.png").exists()
    report(spec, runs)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_job_trains_a_study(model, tmp_path, capsys):
    spec = study_of(tmp_path / "study", model, {"seed": [0, 1]}, epochs=1, eval_every=100)
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec), "utf-8")
    path = str(tmp_path / "spec.yaml")
    study.main([path, "--dry-run"])
    assert capsys.readouterr().out.startswith("seed 0: 1 epochs of 8 documents")
    assert not (tmp_path / "study").exists()
    study.main([path, "--in-process"])
    output = capsys.readouterr().out
    assert "run 2 of 2: seed 1" in output and "± " in output
    study.main([path, "--report"])
    assert capsys.readouterr().out.strip() in output
    with pytest.raises(SpecError, match="batch_size must be greater than or equal to 2, got 1"):
        study.main([path, "batch_size=1"])
