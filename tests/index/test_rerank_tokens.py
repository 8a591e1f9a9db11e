"""Tests of the column `rerank_tokens`, written by the index job or the backfill job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from jobs import add as add_job
from jobs import index as index_job
from jobs import status as status_job
from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders.edje.model import load_adapter
from pipeline.index import add, backfill, job
from pipeline.index.counts import Counts
from pipeline.index.in_process import InProcess
from pipeline.index.reader import IndexReader
from pipeline.index.rerank_tokens import tokens_column
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.writer import IndexWriter
from pipeline.registry import ENCODERS
from pipeline.schema import column_metadata
from pipeline.search.searcher import open_index
from pipeline.tokens import PROMPT, VISUAL, TokenBatch
from pipeline.train.frozen import encoded
from tests.conftest import actor_pools
from tests.encoders.edje.models import edje
from tests.images import noise, png
from tests.media import frame_times, write_video

pytestmark = pytest.mark.usefixtures("cluster")

NUM_PHOTOS = 7
UNIT = 2


@pytest.fixture(scope="module")
def dual(checkpoint) -> dict[str, Any]:
    """Tiny SigLIP encoder, whose hidden states are not normalised."""
    return {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}


@pytest.fixture(scope="module")
def model(dual, tmp_path_factory) -> str:
    """Folder of an EDJE trained on the encoder."""
    return save_edje(tmp_path_factory.mktemp("edje"), dual)


def save_edje(folder: Path, dual: dict[str, Any], **adapter: Any) -> str:
    spec = ENCODERS.resolve(dual)
    torch.manual_seed(len(adapter))
    joint = edje(folder, width=32, **adapter)
    joint.vision = {"spec": config.dump(spec), "fingerprint": ENCODERS.build(spec).fingerprint}
    joint.save(folder / "model")
    return str(folder / "model")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "photos"
    folder.mkdir()
    for seed in range(NUM_PHOTOS):
        (folder / f"{seed}.png").write_bytes(png(noise(60 + seed, 50, seed)))
    return folder


def spec(uri: Path, photos: Path, dual: dict[str, Any], **fields: Any) -> IndexSpec:
    given = {
        "index": str(uri),
        "source": {"name": "images", "path": str(photos)},
        "encoder": dual,
        "representations": [{"compressor": {"name": "hpool", "num_vectors": 4}}],
        "unit_items": UNIT,
        "fragment_items": 2 * UNIT,
        **fields,
    }
    return config.parse(IndexSpec, given)


def index(job_spec: IndexSpec, **resources: Any) -> Counts:
    profile = config.parse(IndexResources, resources)
    return job.run(job_spec, profile, job="1", report=lambda line: None)


def fill(job_spec: IndexSpec, job_id: str = "2") -> add.Progress:
    return add.run(
        backfill.Backfill(job_spec, IndexResources()), job=job_id, report=lambda line: None
    )


def tokens(uri: Path) -> dict[str, np.ndarray | None]:
    """Returns the tokens of each item, (V, D) float16, or None."""
    table = IndexReader(str(uri)).dataset.to_table(columns=["item_id", "rerank_tokens"])
    return {
        row["item_id"]: row["rerank_tokens"] and np.array(row["rerank_tokens"], np.float16)
        for row in table.to_pylist()
    }


def files(uri: Path, *columns: str) -> list[list[str]]:
    """Returns the data files with any of the columns, by fragment."""
    index = IndexReader(str(uri))
    field_ids = {number for numbers in index.field_ids(columns).values() for number in numbers}
    return [
        sorted(file.path for file in fragment.data_files() if field_ids & set(file.fields))
        for fragment in index.dataset.get_fragments()
    ]


def contents(uri: Path, columns: list[str]) -> str:
    return repr(IndexReader(str(uri)).dataset.to_table(columns=columns).to_pylist())


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype == np.float16
        np.testing.assert_array_equal(actual[name], value)


@pytest.fixture(scope="module")
def cached(tmp_path_factory, photos, dual, model, cluster) -> Path:
    """Index whose job wrote the tokens."""
    uri = tmp_path_factory.mktemp("cached") / "index"
    assert index(spec(uri, photos, dual, rerank=model)).new == NUM_PHOTOS
    return uri


@pytest.fixture(scope="module")
def plain(tmp_path_factory, photos, dual, cluster) -> Path:
    """Index without the tokens."""
    uri = tmp_path_factory.mktemp("plain") / "index"
    index(spec(uri, photos, dual))
    return uri


@pytest.fixture
def uri(plain, tmp_path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "index"))


def test_index_job_backfill_and_adapter_agree_exactly(cached, uri, photos, dual, model):
    encoder, adapter = ENCODERS.build(ENCODERS.resolve(dual)), load_adapter(model)
    names = sorted(path.name for path in photos.iterdir())
    expected = {}
    for first in range(0, NUM_PHOTOS, UNIT):  # the units of the job
        unit = names[first : first + UNIT]
        items = pa.table({"item_id": unit, "image": [(photos / n).read_bytes() for n in unit]})
        for rows, batch in encoder.encode(items):
            adapted, mask = adapter.cache_tokens(batch)
            for row, item, is_valid in zip(rows, adapted, mask, strict=True):
                expected[unit[row]] = item[is_valid].numpy()
        trained = adapter.cache_tokens(encoded(encoder, items.to_pylist()))  # as in training
        for name, item, is_valid in zip(unit, *trained, strict=True):
            np.testing.assert_array_equal(expected[name], item[is_valid].numpy())
    assert not encoder.normalised and expected["0.png"].shape == (3, adapter.dim)
    assert_equal(tokens(cached), expected)

    progress = fill(spec(uri, photos, dual, rerank=model))
    assert (progress.done, progress.rows, progress.empty) == (2, NUM_PHOTOS, 0)
    assert_equal(tokens(uri), expected)
    columns = [IndexReader(str(u)).schema.field("rerank_tokens") for u in (cached, uri)]
    assert columns[0].type == columns[1].type == pa.list_(pa.list_(pa.float16(), adapter.dim))
    metadata = column_metadata(columns[0])
    assert metadata == column_metadata(columns[1])
    assert metadata["role"] == "rerank" and metadata["fingerprint"] == encoder.fingerprint


@pytest.mark.heavy
def test_separate_compression_actors_write_the_same_tokens(tmp_path, cached, photos, dual, model):
    apart = spec(tmp_path / "apart", photos, dual, rerank=model)
    with actor_pools():
        index(apart, compress={"num_cpus": 0.5})
    assert_equal(tokens(tmp_path / "apart"), tokens(cached))


def test_backfill_modifies_no_other_column(uri, photos, dual, model):
    others = [name for name in IndexReader(str(uri)).schema.names if name != "rerank_tokens"]
    before, rows = files(uri, *others), contents(uri, others)
    key, size = IndexReader(str(uri)).content_key(others), {}
    for file in (uri / "items.lance/data").iterdir():
        size[file.name] = (file.stat().st_size, file.stat().st_mtime_ns)
    fill(spec(uri, photos, dual, rerank=model))
    assert files(uri, *others) == before and IndexReader(str(uri)).content_key(others) == key
    for name, stat in size.items():
        file = uri / "items.lance/data" / name
        assert (file.stat().st_size, file.stat().st_mtime_ns) == stat
    assert contents(uri, others) == rows
    token_files = files(uri, "rerank_tokens")
    assert all(len(names) == 1 for names in token_files)
    assert not {name for names in token_files for name in names} & set(size)
    # Other representations remain searchable.
    assert open_index(str(uri)).search(np.ones((1, 32)), "hpool_4", k=3, explain=False)


@pytest.mark.heavy
def test_resumes_with_incomplete_fragments(uri, photos, dual, model, cached, monkeypatch):
    commit = IndexWriter.commit_columns

    def fail(writer, fragments):
        raise OSError("the network is gone")

    def commit_once(writer, fragments):
        monkeypatch.setattr(IndexWriter, "commit_columns", fail)
        return commit(writer, fragments)

    monkeypatch.setattr(IndexWriter, "commit_columns", commit_once)
    monkeypatch.setattr(backfill, "COMMIT_FRAGMENTS", 1)
    job_spec = spec(uri, photos, dual, rerank=model)
    with pytest.raises(OSError, match="the network is gone"):
        fill(job_spec)
    monkeypatch.undo()
    first = files(uri, "rerank_tokens")
    assert sorted(map(len, first)) == [0, 1]
    progress = fill(job_spec, "3")
    assert 0 < progress.rows < NUM_PHOTOS
    assert_equal(tokens(uri), tokens(cached))
    after = files(uri, "rerank_tokens")
    assert all(new == old for old, new in zip(first, after, strict=True) if old)
    assert (fill(job_spec, "4").rows, files(uri, "rerank_tokens")) == (0, after)
    monkeypatch.setattr(InProcess, "filled", None)  # complete fragments start no actor
    assert fill(job_spec, "5").done_before == progress.fragments


@pytest.mark.heavy
def test_later_rows_are_filled_by_another_run(tmp_path, photos, dual, model):
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    uri = tmp_path / "index"
    index(spec(uri, folder, dual, rerank=model))
    first = tokens(uri)
    (folder / "1.png").write_bytes(png(noise(40, 44, 99)))
    (folder / "new.png").write_bytes(png(noise(44, 40, 98)))
    index(spec(uri, folder, dual))  # the spec does not set `rerank`
    assert {name for name, value in tokens(uri).items() if value is None} == {"1.png", "new.png"}
    IndexReader(
        str(uri)
    ).dataset.optimize.compact_files()  # one fragment now has rows with and without tokens
    assert len(IndexReader(str(uri)).dataset.get_fragments()) == 1
    (folder / "1.png").write_bytes(png(noise(41, 44, 97)))  # differs from the indexed revision
    assert fill(spec(uri, folder, dual, rerank=model)).rows == 1
    after = tokens(uri)
    assert after.pop("1.png") is None and after.pop("new.png").shape == (3, 32)
    assert_equal(after, {name: first[name] for name in after})
    index(spec(uri, folder, dual, rerank=model))
    assert all(value is not None for value in tokens(uri).values())


def test_items_without_valid_tokens_are_null(model):
    """They have only prompt tokens, or a token that exceeds float16."""
    adapter = load_adapter(model)
    vectors, kind = torch.randn(4, 2, 32), torch.full((4, 2), VISUAL)
    kind[1] = PROMPT
    vectors[2] *= 1e38  # sums overflow
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    column = tokens_column(adapter, TokenBatch(vectors, mask, normalised=False, kind=kind))
    assert column.is_valid().to_pylist() == [True, False, False, True]
    assert [row and len(row) for row in column.to_pylist()] == [3, None, None, 3]


def test_rejects_invalid_specs_before_adding_a_column(tmp_path, uri, photos, dual, model):
    version = IndexReader(str(uri)).version
    with pytest.raises(
        SpecError,
        match=r"rerank must be null for this index, got .*, which requires the column rerank_tokens"
        r".*; add it with `maxray add tokens`",
    ):
        index(spec(uri, photos, dual, rerank=model))
    with pytest.raises(
        SpecError, match="field 'rerank' is required; it must be the folder of an EDJE"
    ):
        fill(spec(uri, photos, dual))
    with pytest.raises(SpecError, match="rerank must be .*, got .*has no edje.json"):
        fill(spec(uri, photos, dual, rerank=str(tmp_path)))
    other = {**dual, "layer": 1}
    with pytest.raises(
        SpecError,
        match="rerank must be an EDJE trained on the encoder dual .fingerprint .*, got .*, which"
        " was trained on another encoder .fingerprint",
    ):
        index(spec(tmp_path / "other", photos, other, rerank=model))
    of_other = save_edje(tmp_path / "of_other", other)
    with pytest.raises(
        SpecError,
        match="encoder must be the encoder that filled .* .fingerprint .*, got 'dual', which has"
        " the fingerprint",
    ):
        fill(spec(uri, photos, other, rerank=of_other))
    assert "rerank_tokens" not in IndexReader(str(uri)).schema.names
    fill(spec(uri, photos, dual, rerank=model), "3")
    retrained = save_edje(tmp_path / "retrained", dual, num_tokens=5)
    for run in (fill, index):
        with pytest.raises(
            SpecError,
            match="^rerank must be an EDJE model with the adapter of the index, .* has the adapter",
        ):
            run(spec(uri, photos, dual, rerank=retrained))
    with pytest.raises(
        SpecError, match="index must be an index with items, got .*, which is empty"
    ):
        (tmp_path / "corrupted").mkdir()
        (tmp_path / "corrupted/a.png").write_bytes(b"not an image")
        empty = spec(tmp_path / "empty", tmp_path / "corrupted", dual)
        index(empty)
        fill(empty.model_copy(update={"rerank": model}))
    captions = [{"compressor": "none", "field": "caption"}]
    with pytest.raises(
        SpecError, match="rerank must be null unless a representation has `field: content`, got"
    ):
        index(spec(uri, photos, dual, rerank=model, representations=captions))
    assert version < IndexReader(str(uri)).version


@pytest.mark.heavy
def test_max_tokens_limits_the_frames_of_a_video(tmp_path, dual, model):
    """Five frames have three tokens each; at most ten tokens are those of three frames."""
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips/a.mp4", frame_times(5, 2))
    source = {"name": "video", "path": str(tmp_path / "clips"), "sampling": "uniform"}
    source |= {"num_frames": 5, "window_seconds": None}
    uri = tmp_path / "every"
    index(spec(uri, tmp_path, dual, source=source, rerank=model))
    (all_frames,) = tokens(uri).values()
    assert all_frames.shape == (5 * 3, 32)
    limited = spec(tmp_path / "limited", tmp_path, dual, source=source)
    index(limited)
    fill(limited.model_copy(update={"rerank": save_edje(tmp_path / "edje", dual, max_tokens=10)}))
    (three_frames,) = tokens(tmp_path / "limited").values()
    assert three_frames.shape == (3 * 3, 32)


def test_jobs_from_the_command_line(uri, photos, dual, model, tmp_path, capsys):
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec(uri, photos, dual)))
    arguments = [str(tmp_path / "spec.yaml"), f"rerank={model}"]
    with pytest.raises(
        SpecError,
        match=r"rerank must be null for this index, .*; add it with `maxray add tokens`",
    ):
        index_job.main(arguments)
    add_job.main(["tokens", *arguments])
    assert "2/2 fragments  7 rows" in capsys.readouterr().out
    status_job.main([str(uri)])
    output = capsys.readouterr().out
    assert "rerank_tokens: 3.0 per item, 192 B/item, 100.0% filled, adapter " in output
    assert "backfill " in output
    index_job.main([*arguments, "--dry-run"])
    assert "rerank_tokens" in capsys.readouterr().out
