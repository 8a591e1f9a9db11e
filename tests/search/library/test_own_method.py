"""A compressor that is neither registered nor packaged: the class of the tutorial."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from jobs import evaluate
from pipeline import Index
from pipeline.compression import Budgeted
from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch
from tests.documentation import ROOT, blocks

DIM, NUM_ITEMS = 16, 30


def vectors(number: int, seed: int = 0) -> list[np.ndarray]:
    """Returns items of a few runs of similar tokens."""
    random = np.random.default_rng(seed)
    runs = [np.repeat(random.standard_normal((4, DIM)), 3 + i % 3, axis=0) for i in range(number)]
    return [run + 0.1 * random.standard_normal(run.shape) for run in runs]


@pytest.fixture
def merging(tmp_path, monkeypatch):
    """The module of the tutorial."""
    page = blocks(ROOT / "docs/tutorials/own-method.md")
    (text,) = (block.text for block in page if block.file_name == "merging.py")
    (tmp_path / "merging.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("merging")
    del sys.modules["merging"]


@pytest.fixture
def index(tmp_path) -> Index:
    index = Index(tmp_path / "index")
    columns = [
        {"id": "full", "compressor": "none", "codec": "int8"},
        {"compressor": {"name": "random", "num_vectors": 4}, "codec": "int8"},
    ]
    ids = [f"item-{i}" for i in range(NUM_ITEMS)]
    index.add(ids, vectors(NUM_ITEMS), representations=columns)
    return index


def test_method_of_the_tutorial(merging):
    items = [torch.tensor(item, dtype=torch.float32) for item in vectors(4)]
    lengths = [len(item) for item in items]
    padded = torch.full((len(items), max(lengths), DIM), 7.0)
    for row, item in zip(padded, items, strict=True):
        row[: len(item)] = item
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    method = COMPRESSORS.build(COMPRESSORS.resolve({"class": merging.Segments, "num_vectors": 4}))
    result = method.compress(TokenBatch(padded, mask, normalised=False))
    assert result.mask.all() and result.vectors.shape == (4, 4, DIM)
    for i, item in enumerate(items):
        runs = torch.repeat_interleave(torch.arange(4), lengths[i] // 4)
        assert result.assignment[i, : lengths[i]].tolist() == runs.tolist()
        ones = torch.ones(1, lengths[i], dtype=torch.bool)
        alone = method.compress(TokenBatch(item[None], ones, normalised=False))
        torch.testing.assert_close(alone.vectors[0], result.vectors[i])


def test_class_instance_and_import_path(index, merging):
    assert index.compress(merging.Segments, 4) == "segments_4_int8"
    instance = merging.Segments(merging.Segments.Spec(name="any", num_vectors=4))
    index.compress(instance, id="instance")
    index.compress({"class": "merging:Segments", "ratio": 0.5}, id="path")
    table = IndexReader(index.uri).dataset.to_table()
    assert table["segments_4_int8"].equals(table["instance"])
    info = index.representations["path"]
    assert (info.compressor["name"], info.ratio) == ("merging:Segments", 0.5)
    query = vectors(NUM_ITEMS)[7][:5]
    assert index.search(query, "instance", k=1)[0].item_id == "item-7"
    index.add(["new"], vectors(1, seed=1))
    assert IndexReader(index.uri).dataset.to_table()["path"].null_count == 0


def test_changed_code_does_not_mix_columns(index, merging):
    index.compress(merging.Segments, 4)
    file = Path(merging.__file__)
    file.write_text(file.read_text() + "# a comment\n")
    index.compress(importlib.reload(merging).Segments, 4)
    file.write_text(file.read_text().replace("value=3.0", "value=4.0"))
    index.compress(merging.Segments, 4)  # the module in memory is still the former one
    importlib.reload(merging)
    with pytest.raises(SpecError, match=r"segments_4_int8\.code must be .* set `id` to store"):
        index.compress(merging.Segments, 4)
    with pytest.raises(SpecError, match=r"segments_4_int8\.code must be .* restore it, or use"):
        index.add(["new"], vectors(1, seed=1))
    index.compress(merging.Segments, 4, id="changed")


def test_classes_that_other_processes_cannot_import(index):
    for module in ("__main__", __name__):
        local = type("Local", (Budgeted,), {"__module__": module, "__qualname__": "f.<locals>.L"})
        with pytest.raises(SpecError, match="which other processes cannot import; move it to a"):
            index.compress(local, 4)


def test_table_of_a_paper(index, merging, tmp_path, capsys):
    index.compress(merging.Segments, 4)
    queries = [item[::3] for item in vectors(NUM_ITEMS)]
    np.save(tmp_path / "queries.npy", np.concatenate(queries))
    np.save(tmp_path / "querylens.npy", np.array([len(query) for query in queries]))
    lines = [f"{i}\titem-{i}\t1\n" for i in range(NUM_ITEMS)]
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    output = tmp_path / "out"
    spec = {
        "index": index.uri,
        "benchmark": {"name": "npy", "path": str(tmp_path)},
        "output": str(output),
        "representations": ["full", "segments_4_int8", "random_4_int8"],
        "measures": ["RR@10", "MdR"],
        "comparisons": [["segments_4_int8.maxsim", "random_4_int8.maxsim"]],
        "labels": {"Segments int8": "Ours"},
        "plots": "pdf",
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    evaluate.main([str(tmp_path / "spec.yaml")])
    assert "against" in capsys.readouterr().out
    table = (output / "table.tex").read_text()
    (row,) = (line for line in table.splitlines() if "Ours" in line)
    assert row.startswith("$a$ & Ours & 4 & 4.0 & 80 & ") and r"{\scriptsize [" in row
    assert r"segments\_4\_int8.maxsim & random" in (output / "comparisons.tex").read_text()
    assert (output / "quality_bytes.pdf").read_bytes().startswith(b"%PDF")
    with (output / "table.csv").open() as file:
        for values in csv.DictReader(file):
            assert float(values["RR@10 low"]) <= float(values["RR@10"])
            assert float(values["RR@10 high"]) >= float(values["RR@10"])
    pair = ["--rows", "segments_4_int8.maxsim", "full.maxsim"]
    evaluate.main(["compare", str(output), *pair])
    header, line = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == pair[1:] and header.split()[2] == "RR@10"
    with pytest.raises(SpecError, match=r"--rows must be one of .*, got 'nothing'"):
        evaluate.main(["compare", str(output), "--rows", "nothing", "full.maxsim"])
    with pytest.raises(SpecError, match="labels must be one of .*, got 'segments'"):
        evaluate.main([str(tmp_path / "spec.yaml"), "labels={segments: Ours}"])
