"""Both executors run the same stages: indexes that they write have equal columns."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline.config import SpecError, parse
from pipeline.encoders.shared import load_encoder, shared_encoders
from pipeline.index import EXECUTOR, add, job
from pipeline.index.columns import Representation
from pipeline.index.executor import Stream
from pipeline.index.in_process import EXECUTORS, InProcess, current
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import IndexReader
from pipeline.index.recompress import Recompression, RecompressResources, RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Resources
from pipeline.index.stages import Compress
from pipeline.registry import ENCODERS
from pipeline.runtime.waiting import polled
from pipeline.search.candidates_job import (
    Candidates,
    CandidatesJobSpec,
    CandidatesResources,
)

REPRESENTATIONS = [
    {"compressor": "none"},
    {
        "compressor": {"name": "kcenter", "num_vectors": 4},
        "codec": {"name": "residual", "num_centroids": 16},
    },
]


def build(uri: str, folder: str, resources: IndexResources) -> None:
    """Indexes a folder."""
    fields = {"source": {"name": "text", "path": folder}, "representations": REPRESENTATIONS}
    fields |= {"index": uri, "unit_items": 4, "fragment_items": 8, "fit": {"num_items": 20}}
    job.run(parse(IndexSpec, fields), resources, job="index")


def extend(uri: str) -> None:
    """Recompresses an index and adds a generator."""
    hpool = {"compressor": {"name": "hpool", "num_vectors": 4}, "codec": "int8"}
    more = parse(RecompressSpec, {"index": uri, "representations": [hpool]})
    threads = Resources(num_cpus=0.5, num_threads=1)
    add.run(Recompression(more, RecompressResources(compress=threads)), job="recompress")
    spec = parse(CandidatesJobSpec, {"index": uri, "generator": {"name": "ivf"}})
    profile = CandidatesResources(fit=threads, encode=threads)
    add.run(Candidates(spec, profile, [], refit=False), job="candidates")


def columns(uri: str) -> dict[str, pa.ChunkedArray]:
    table = IndexReader(uri).dataset.to_table().sort_by("item_id")
    return {name: table[name].combine_chunks() for name in table.column_names}


def assert_equal_indexes(first: str, second: str) -> None:
    before, after = columns(first), columns(second)
    assert list(before) == list(after)
    for name, column in before.items():
        assert column.equals(after[name]), name
    assert IndexReader(first).schema.equals(IndexReader(second).schema, check_metadata=True)


def build_both(tmp_path: Path, monkeypatch, num_items: int) -> dict[str, str]:
    """Returns the indexes of a folder with a broken file, by the executor that made them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(num_items):
        words = " ".join(f"word{(number * 7 + i) % 31} of text {number}" for i in range(5 + number))
        (folder / f"{number:02}.txt").write_text(words)
    (folder / "broken.txt").write_bytes(b"\xff\xfe\x00")
    pool = Resources(num_cpus=0.5, num_threads=torch.get_num_threads())
    resources = IndexResources(encode=pool, compress=pool)
    uris = {name: str(tmp_path / name) for name in EXECUTORS}
    for name, uri in uris.items():
        monkeypatch.setenv(EXECUTOR, name)
        build(uri, str(folder), resources)
        rejects = IndexReader(uri).rejects().to_pylist()
        assert [(row["item_id"], row["stage"]) for row in rejects] == [("broken.txt", "list")]
    assert len(IndexReader(uris["process"])) == num_items
    assert_equal_indexes(*uris.values())
    return uris


def test_indexes_of_both_executors_have_equal_columns(tmp_path, cluster, monkeypatch):
    build_both(tmp_path, monkeypatch, 12)


@pytest.mark.heavy
def test_additions_of_both_executors_have_equal_columns(tmp_path, cluster, monkeypatch):
    uris = build_both(tmp_path, monkeypatch, 24)
    # Fits depend on the order of the rows, and units on Ray end in any order.
    shutil.rmtree(uris["process"])
    shutil.copytree(uris["ray"], uris["process"])
    for name, uri in uris.items():
        monkeypatch.setenv(EXECUTOR, name)
        extend(uri)
    assert_equal_indexes(*uris.values())


def test_the_variable_names_the_executor(monkeypatch):
    monkeypatch.setenv(EXECUTOR, "process")
    assert isinstance(current(), InProcess)
    monkeypatch.setenv(EXECUTOR, "dask")
    with pytest.raises(SpecError, match="^MAXRAY_EXECUTOR must be ray or process, got 'dask'$"):
        current()


def test_encoders_of_a_context_are_loaded_once():
    spec = ENCODERS.resolve({"name": "precomputed", "dim": 4, "label": "test"})
    assert load_encoder(spec) is not load_encoder(spec)
    encoders: dict = {}
    with shared_encoders(encoders):
        first = load_encoder(spec)
        assert load_encoder(ENCODERS.resolve({"name": "precomputed", "dim": 4, "label": "test"}))
        other = load_encoder(ENCODERS.resolve({"name": "precomputed", "dim": 5, "label": "test"}))
    assert list(encoders.values()) == [first, other]
    executor = InProcess(encoders)
    assert executor.submit(Resources(), load_encoder, spec).result() is first


def test_a_function_keeps_the_error_of_its_thread():
    with pytest.raises(ZeroDivisionError):
        InProcess().submit(Resources(), divmod, 1, 0).result()


def test_a_stage_needs_the_columns_of_earlier_ones():
    spec = ENCODERS.resolve({"name": "precomputed", "dim": 4, "label": "test"})
    info = EncoderInfo.from_encoder(ENCODERS.build(spec), spec)
    hpool = parse(Representation, {"compressor": {"name": "hpool", "num_vectors": 4}})
    stage = Compress(info, [hpool], {}, ())
    with pytest.raises(ValueError, match="stage 'compress' needs the columns"):
        Stream("index", iter, [], [([stage], Resources())], ["item_id"], 1, 1).check()


def test_a_closed_generator_ends_its_thread():
    produced = []

    def numbers():
        for number in range(1000):
            produced.append(number)
            yield number

    values = polled(numbers())
    assert next(values) == 0
    values.close()
    time.sleep(1.2)
    assert len(produced) < 20


def test_waiting_yields_none():
    def slow():
        time.sleep(0.8)
        yield 1

    assert list(polled(slow())) == [None, 1]
