"""The specs of the AGC paper's experiments, on small files in the form of the data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.papers.data import make_page_pairs, make_text_pairs
from examples.papers.studies.study import StudySpec, runs_of
from examples.papers.verbs import study
from pipeline import config
from pipeline.eval.planning.trial import dry_run
from pipeline.eval.spec import EvaluateSpec
from pipeline.index.spec import IndexResources, IndexSpec
from tests.conftest import ROOT
from tests.train.data.files import IMAGE_TYPE, IMAGES, NAMES, write_lines, write_pages
from tests.train.data.media import write_clip, write_msrvtt, write_multivent

SPECS = ROOT / "examples/papers/agc/specs"


def ms_marco(folder: Path) -> None:
    """Writes lists of 16 scored documents for MS MARCO, and a data set of BEIR."""
    (folder / "ms_marco").mkdir(parents=True)
    documents = [{"document_id": str(i), "text": f"text {i}"} for i in range(40)]
    write_lines(folder / "ms_marco/documents.jsonl", documents)
    rows = [
        {
            "query": f"query {row}",
            "document_id": str(row),
            "negatives": [str((row + step) % 40) for step in range(1, 16)],
            "scores": [1 / (1 + step) for step in range(16)],
        }
        for row in range(12)
    ]
    write_lines(folder / "ms_marco/train.jsonl", rows)
    beir(folder / "beir/nfcorpus")
    corpus = [{"_id": str(i), "title": "", "text": f"text {i}"} for i in range(3)]
    write_lines(folder / "beir/nfcorpus/corpus.jsonl", corpus)


def beir(folder: Path, document: str = "0") -> None:
    """Writes a judged query."""
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "queries.jsonl", [{"_id": "q", "text": "a text"}])
    (folder / "qrels/test.tsv").write_text(f"q\t{document}\t1\n")


def pages(folder: Path) -> None:
    """Writes ColPali's training set, and a data set of ViDoRe v2."""
    (folder / "colpali_train_set").mkdir(parents=True)
    write_pages(folder / "colpali_train_set/data")
    (folder / "vidore_v2/biomedical/corpus").mkdir(parents=True)
    images = [{"bytes": (IMAGES / name).read_bytes(), "path": name} for name in NAMES[:3]]
    table = pa.table({"corpus-id": range(3), "image": pa.array(images, IMAGE_TYPE)})
    pq.write_table(table, folder / "vidore_v2/biomedical/corpus/test-0.parquet")
    beir(folder / "vidore_v2/biomedical")


def videos(folder: Path) -> None:
    """Writes videos of MSR-VTT for training and for the test."""
    write_msrvtt(folder / "msrvtt", trained=8)


def events(folder: Path) -> None:
    """Writes videos of MultiVENT 2.0 for training and for the test."""
    write_multivent(folder / "multivent", 8)
    write_clip(folder / "multivent/test/event.mp4")
    queries = folder / "multivent/multivent_2_test_queries.csv"
    queries.write_text("Query_id,query\r\nq,a text\r\n")
    judgment = {"query_id": "q", "doc_id": "event", "relevance": 1}
    write_lines(folder / "multivent/multivent_2_test_judgments.jsonl", [judgment])


#: By training spec: its data, the tiny checkpoint in the place of the real one, the index spec, and
#: what the tiny checkpoint needs: a short window, and a template other than the one it declares.
CASES = {
    "msmarco": (
        ms_marco,
        "colbert_modernbert",
        "beir",
        ["document_length=60", "custom_template=true"],
    ),
    "vidore": (pages, "qwen2_5_vl", "vidore", ["max_pixels=4096", "min_pixels=64"]),
    "msrvtt": (videos, "qwen2_5_vl", "msrvtt", ["max_pixels=1024", "min_pixels=64"]),
    "multivent": (events, "qwen2_5_omni", "multivent", ["max_pixels=1024", "min_pixels=64"]),
}
METHODS = ["full", "seqresize", "memtok", "agc"]
#: Number of runs of each spec on generated data.
SMALL = {
    "shapes": 30,
    "shapes_ablation": 15,
    "shapes_curves": 2,
    "shapes_long": 21,
    "shapes_tokens": 12,
}


@pytest.fixture
def command_of(checkpoint, tmp_path, monkeypatch):
    """The command of a training spec, beside its data."""

    def of(name: str) -> list[str]:
        write, family, _, small = CASES[name]
        write(tmp_path / "data")
        monkeypatch.chdir(tmp_path)
        short = ["batch_size=4", "gradient_accumulation_steps=1", "max_steps=1", "eval_every=1"]
        short += ["data.validation=0.2", f"learner.encoder.model={checkpoint(family)}"]
        return [
            str(SPECS / f"{name}.yaml"),
            *short,
            *(f"learner.encoder.{field}" for field in small),
        ]

    return of


def test_every_spec_is_tried():
    indexes = {index for _, _, index, _ in CASES.values()}
    names = {
        *CASES,
        *SMALL,
        "cranfield",
        "pages",
        *(f"{name}_{job}" for name in indexes for job in ("index", "evaluate")),
    }
    assert {path.stem for path in SPECS.glob("*.yaml")} == names


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.heavy] * (runs > 20)) for name, runs in SMALL.items()],
)
def test_a_dry_run_on_generated_data(name, capsys):
    study.main([str(SPECS / f"{name}.yaml"), "data.num_scenes=64", "--dry-run"])
    assert len(capsys.readouterr().out.splitlines()) == SMALL[name]


def test_a_dry_run_on_titles_of_abstracts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_text_pairs.main([])
    assert capsys.readouterr().out.startswith("1398 pairs and 857 judgments of 113 queries")
    make_text_pairs.main(["--words", "56", "--queries", "40"])
    assert capsys.readouterr().out.startswith("1398 pairs and 329 judgments of 40 queries")
    with (tmp_path / "out/agc/cranfield/documents.jsonl").open(encoding="utf-8") as file:
        lengths = [len(json.loads(line)["text"].split()) for line in file]
    assert max(lengths) == 56 > min(lengths)
    study.main([str(SPECS / "cranfield.yaml"), "--dry-run"])
    assert len(capsys.readouterr().out.splitlines()) == 21


@pytest.mark.heavy
def test_a_dry_run_on_sentences_of_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_page_pairs.main([])
    assert capsys.readouterr().out.startswith("219 pairs and 109 judgments of 54 queries")
    folder = tmp_path / "out/agc/pages"
    documents, pairs = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]
        for name in ("documents", "train")
    )
    text_by_id = {document["document_id"]: document["text"] for document in documents}
    assert not any(pair["query"] in text_by_id[pair["document_id"]] for pair in pairs)
    make_page_pairs.main(["--words", "120"])
    assert capsys.readouterr().out.startswith("219 pairs and 109 judgments of 54 queries")
    lengths = [
        len(json.loads(line)["text"].split()) for line in (folder / "documents.jsonl").open()
    ]
    assert max(lengths) == 120 > min(lengths)
    study.main([str(SPECS / "pages.yaml"), "--dry-run"])
    assert len(capsys.readouterr().out.splitlines()) == 21


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run(name, command_of, capsys):
    study.main([*command_of(name), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    expected = METHODS[name == "multivent" :]
    assert [line.split(":")[0] for line in lines[-len(expected) :]] == expected


@pytest.mark.parametrize("name", CASES)
def test_index_has_the_settings_of_training(name):
    """Encoders are repeated in the index specs, with the trained weights."""
    (run,) = [
        run
        for run in runs_of(config.load(StudySpec, str(SPECS / f"{name}.yaml"), []))
        if run.title == "agc"
    ]
    index = CASES[name][2]
    encoder = config.load(IndexSpec, str(SPECS / f"{index}_index.yaml"), []).encoder
    trained = config.dump(run.spec.learner.encoder)
    found = config.dump(encoder)
    assert Path(found["model"]).absolute() == Path(run.spec.output, "model").absolute()
    assert Path(found["appended_tokens"]) == Path(found["model"]).absolute()
    usage = ("query_prefix", "document_prefix", "query_length", "document_length", "skiplist")
    differing = {field for field in trained if trained[field] != found[field]}
    assert differing <= {"model", "appended_tokens", *usage}
    evaluation = config.load(EvaluateSpec, str(SPECS / f"{index}_evaluate.yaml"), [])
    index_spec = config.load(IndexSpec, str(SPECS / f"{index}_index.yaml"), [])
    assert Path(evaluation.index).absolute() == Path(index_spec.index).absolute()


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_trained_encoders_can_be_indexed(name, command_of, cluster, tmp_path):
    study.main([*command_of(name), "--in-process"])
    for method in METHODS[name == "multivent" :]:
        folder = tmp_path / "out/agc" / name / method / "model"
        assert json.loads((folder / "training.json").read_text("utf-8"))["sha256"]
    _, _, index, small = CASES[name]
    small = [f"encoder.{field}" for field in small]
    spec = config.load(IndexSpec, str(SPECS / f"{index}_index.yaml"), small)
    lines: list[str] = []
    dry_run(spec, IndexResources(), None, lines.append)
    assert any(line.startswith("encoded ") for line in lines)
    assert not any("rejected" in line for line in lines)
