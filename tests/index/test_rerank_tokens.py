"""What EDJE's adapter makes of items, written by the index job and by the backfill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from jobs import backfill as backfill_job
from jobs import index as index_job
from jobs import status as status_job
from pipeline import config, open_index
from pipeline.config import SpecError
from pipeline.index import backfill, job
from pipeline.index.progress import Progress
from pipeline.index.reader import Index
from pipeline.index.rerank_tokens import tokens_column
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.writer import IndexWriter
from pipeline.registry import ENCODERS
from pipeline.rerank.edje import load_adapter
from pipeline.schema import column_metadata
from pipeline.tokens import PROMPT, VISUAL, TokenBatch
from pipeline.train.frozen import encoded
from tests.images import noise, png
from tests.media import frame_times, write_video
from tests.rerank.models import edje

pytestmark = pytest.mark.usefixtures("cluster")

NUM_PHOTOS = 7
UNIT = 2


@pytest.fixture(scope="module")
def dual(checkpoint) -> dict[str, Any]:
    """A tiny SigLIP, of which the states have lengths of their own."""
    return {"name": "dual", "model": checkpoint("siglip"), "dtype": "float32"}


@pytest.fixture(scope="module")
def model(dual, tmp_path_factory) -> str:
    """The folder of an EDJE of that encoder."""
    return edje_of(tmp_path_factory.mktemp("edje"), dual)


def edje_of(folder: Path, dual: dict[str, Any], **adapter: Any) -> str:
    spec = ENCODERS.resolve(dual)
    torch.manual_seed(len(adapter))
    made = edje(folder, width=32, **adapter)
    made.vision = {"spec": config.dump(spec), "fingerprint": ENCODERS.build(spec).fingerprint}
    made.save(folder / "model")
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


def index(a_spec: IndexSpec, **resources: Any) -> Progress:
    profile = config.parse(IndexResources, resources)
    return job.run(a_spec, profile, job="1", report=lambda line: None)


def fill(a_spec: IndexSpec, job_id: str = "2") -> backfill.Progress:
    return backfill.run(a_spec, IndexResources(), job_id=job_id, report=lambda line: None)


def tokens(uri: Path) -> dict[str, np.ndarray | None]:
    """(V, D) float16 of each item."""
    table = Index(str(uri)).dataset.to_table(columns=["item_id", "rerank_tokens"])
    return {
        row["item_id"]: row["rerank_tokens"] and np.array(row["rerank_tokens"], np.float16)
        for row in table.to_pylist()
    }


def files(uri: Path, *columns: str) -> list[list[str]]:
    """By fragment the data files that hold these columns."""
    there = Index(str(uri))
    wanted = {number for numbers in there.field_ids(columns).values() for number in numbers}
    return [
        sorted(file.path for file in fragment.data_files() if wanted & set(file.fields))
        for fragment in there.dataset.get_fragments()
    ]


def contents(uri: Path, columns: list[str]) -> str:
    return repr(Index(str(uri)).dataset.to_table(columns=columns).to_pylist())


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype == np.float16
        np.testing.assert_array_equal(actual[name], value)


@pytest.fixture(scope="module")
def cached(tmp_path_factory, photos, dual, model, cluster) -> Path:
    """An index whose job wrote the tokens."""
    uri = tmp_path_factory.mktemp("cached") / "index"
    assert index(spec(uri, photos, dual, rerank=model)).new == NUM_PHOTOS
    return uri


@pytest.fixture(scope="module")
def plain(tmp_path_factory, photos, dual, cluster) -> Path:
    """The same index without them."""
    uri = tmp_path_factory.mktemp("plain") / "index"
    index(spec(uri, photos, dual))
    return uri


@pytest.fixture
def uri(plain, tmp_path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "index"))


def test_the_index_job_the_backfill_and_the_adapter_agree_bit_for_bit(
    cached, uri, photos, dual, model
):
    encoder, adapter = ENCODERS.build(ENCODERS.resolve(dual)), load_adapter(model)
    names = sorted(path.name for path in photos.iterdir())
    own = {}
    for first in range(0, NUM_PHOTOS, UNIT):  # the units of the job
        unit = names[first : first + UNIT]
        items = pa.table({"item_id": unit, "image": [(photos / n).read_bytes() for n in unit]})
        for rows, batch in encoder.encode(items):
            kept, mask = adapter.cached(batch)
            for row, item, is_real in zip(rows, kept, mask, strict=True):
                own[unit[row]] = item[is_real].numpy()
        trained = adapter.cached(encoded(encoder, items.to_pylist()))  # what a learner feeds it
        for name, item, is_real in zip(unit, *trained, strict=True):
            np.testing.assert_array_equal(own[name], item[is_real].numpy())
    assert not encoder.normalised and own["0.png"].shape == (3, adapter.dim)
    same(tokens(cached), own)

    progress = fill(spec(uri, photos, dual, rerank=model))
    assert (progress.done, progress.rows, progress.empty) == (2, NUM_PHOTOS, 0)
    same(tokens(uri), own)
    columns = [Index(str(u)).schema.field("rerank_tokens") for u in (cached, uri)]
    assert columns[0].type == columns[1].type == pa.list_(pa.list_(pa.float16(), adapter.dim))
    about = column_metadata(columns[0])
    assert about == column_metadata(columns[1])
    assert about["role"] == "rerank" and about["fingerprint"] == encoder.fingerprint


@pytest.mark.heavy
def test_separate_compressing_actors_write_the_same(tmp_path, cached, photos, dual, model):
    apart = spec(tmp_path / "apart", photos, dual, rerank=model)
    index(apart, compress={"num_cpus": 0.5})
    same(tokens(tmp_path / "apart"), tokens(cached))


def test_the_backfill_touches_no_other_column(uri, photos, dual, model):
    others = [name for name in Index(str(uri)).schema.names if name != "rerank_tokens"]
    before, rows = files(uri, *others), contents(uri, others)
    key, size = Index(str(uri)).content_key(others), {}
    for file in (uri / "items.lance/data").iterdir():
        size[file.name] = (file.stat().st_size, file.stat().st_mtime_ns)
    fill(spec(uri, photos, dual, rerank=model))
    assert files(uri, *others) == before and Index(str(uri)).content_key(others) == key
    for name, stat in size.items():
        file = uri / "items.lance/data" / name
        assert (file.stat().st_size, file.stat().st_mtime_ns) == stat
    assert contents(uri, others) == rows
    own = files(uri, "rerank_tokens")
    assert all(len(names) == 1 for names in own)
    assert not {name for names in own for name in names} & set(size)
    # Whoever searches by another representation has the same packed vectors.
    assert open_index(str(uri)).search(np.ones((1, 32)), "hpool_4", k=3, explain=False)


@pytest.mark.heavy
def test_a_resume_does_the_rest_and_nothing_twice(uri, photos, dual, model, cached, monkeypatch):
    commit = IndexWriter.commit_columns

    def fail(writer, fragments):
        raise OSError("the network is gone")

    def commit_once(writer, fragments):
        monkeypatch.setattr(IndexWriter, "commit_columns", fail)
        return commit(writer, fragments)

    monkeypatch.setattr(IndexWriter, "commit_columns", commit_once)
    monkeypatch.setattr(backfill, "COMMIT_FRAGMENTS", 1)
    a_spec = spec(uri, photos, dual, rerank=model)
    with pytest.raises(OSError, match="the network is gone"):
        fill(a_spec)
    monkeypatch.undo()
    first = files(uri, "rerank_tokens")
    assert sorted(map(len, first)) == [0, 1]
    progress = fill(a_spec, "3")
    assert 0 < progress.rows < NUM_PHOTOS
    same(tokens(uri), tokens(cached))
    after = files(uri, "rerank_tokens")
    assert all(new == old for old, new in zip(first, after, strict=True) if old)
    assert (fill(a_spec, "4").rows, files(uri, "rerank_tokens")) == (0, after)
    monkeypatch.setattr(backfill, "filling", None)  # what is complete starts no actor
    assert fill(a_spec, "5").done_before == progress.fragments


@pytest.mark.heavy
def test_rows_that_came_later_are_filled_by_another_run(tmp_path, photos, dual, model):
    own = Path(shutil.copytree(photos, tmp_path / "photos"))
    uri = tmp_path / "index"
    index(spec(uri, own, dual, rerank=model))
    first = tokens(uri)
    (own / "1.png").write_bytes(png(noise(40, 44, 99)))
    (own / "new.png").write_bytes(png(noise(44, 40, 98)))
    index(spec(uri, own, dual))  # a spec that does not speak of the tokens
    assert {name for name, there in tokens(uri).items() if there is None} == {"1.png", "new.png"}
    Index(str(uri)).dataset.optimize.compact_files()  # now some rows of a fragment lack them
    assert len(Index(str(uri)).dataset.get_fragments()) == 1
    (own / "1.png").write_bytes(png(noise(41, 44, 97)))  # is no longer what was indexed
    assert fill(spec(uri, own, dual, rerank=model)).rows == 1
    after = tokens(uri)
    assert after.pop("1.png") is None and after.pop("new.png").shape == (3, 32)
    same(after, {name: first[name] for name in after})
    index(spec(uri, own, dual, rerank=model))
    assert all(there is not None for there in tokens(uri).values())


def test_an_item_of_which_nothing_is_made_has_null(model):
    """It has prompts alone, or a token beyond what float16 holds."""
    adapter = load_adapter(model)
    vectors, kind = torch.randn(4, 2, 32), torch.full((4, 2), VISUAL)
    kind[1] = PROMPT
    vectors[2] *= 1e38  # of which a sum is none
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    column = tokens_column(adapter, TokenBatch(vectors, mask, normalised=False, kind=kind))
    assert column.is_valid().to_pylist() == [True, False, False, True]
    assert [row and len(row) for row in column.to_pylist()] == [3, None, None, 3]


def test_what_is_refused(tmp_path, uri, photos, dual, model):
    """In one sentence, and before a column is added."""
    version = Index(str(uri)).version
    with pytest.raises(SpecError, match=r"rerank must be null, got .* has rows; .*jobs\.backfill"):
        index(spec(uri, photos, dual, rerank=model))
    with pytest.raises(
        SpecError, match="field 'rerank' is required; it must be the folder of an EDJE"
    ):
        fill(spec(uri, photos, dual))
    with pytest.raises(SpecError, match="rerank must be .*has no edje.json"):
        fill(spec(uri, photos, dual, rerank=str(tmp_path)))
    other = {**dual, "layer": 1}
    with pytest.raises(
        SpecError, match="rerank must be .*was trained on another encoder .fingerprint"
    ):
        index(spec(tmp_path / "other", photos, other, rerank=model))
    of_other = edje_of(tmp_path / "of_other", other)
    with pytest.raises(
        SpecError, match="encoder must be the encoder of .*, got 'dual', which has the fingerprint"
    ):
        fill(spec(uri, photos, other, rerank=of_other))
    assert "rerank_tokens" not in Index(str(uri)).schema.names
    fill(spec(uri, photos, dual, rerank=model), "3")
    again = edje_of(tmp_path / "again", dual, num_tokens=5)
    for run in (fill, index):
        with pytest.raises(
            SpecError, match="rerank must be .*the index's adapter .* has the adapter"
        ):
            run(spec(uri, photos, dual, rerank=again))
    with pytest.raises(SpecError, match="index must be an index with rows, got .*, which is empty"):
        (tmp_path / "nothing").mkdir()
        (tmp_path / "nothing/a.png").write_bytes(b"no picture")
        nothing = spec(tmp_path / "empty", tmp_path / "nothing", dual)
        index(nothing)
        fill(nothing.model_copy(update={"rerank": model}))
    captions = [{"compressor": "none", "of": "caption"}]
    with pytest.raises(
        SpecError, match="rerank must be null unless a representation is `of: content`"
    ):
        index(spec(uri, photos, dual, rerank=model, representations=captions))
    assert version < Index(str(uri)).version


@pytest.mark.heavy
def test_a_video_has_tokens_of_each_frame_up_to_a_bound(tmp_path, dual, model):
    """Five frames of three tokens; bound to ten tokens, those of three frames."""
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips/a.mp4", frame_times(5, 2))
    source = {"name": "video", "path": str(tmp_path / "clips"), "sampling": "uniform"}
    source |= {"num_frames": 5, "window_seconds": None}
    uri = tmp_path / "every"
    index(spec(uri, tmp_path, dual, source=source, rerank=model))
    (of_every,) = tokens(uri).values()
    assert of_every.shape == (5 * 3, 32)
    bound = spec(tmp_path / "bound", tmp_path, dual, source=source)
    index(bound)
    fill(bound.model_copy(update={"rerank": edje_of(tmp_path / "edje", dual, max_tokens=10)}))
    (of_some,) = tokens(tmp_path / "bound").values()
    assert of_some.shape == (3 * 3, 32)


def test_the_jobs_as_a_user_runs_them(uri, photos, dual, model, tmp_path, capsys):
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec(uri, photos, dual)))
    arguments = [str(tmp_path / "spec.yaml"), f"rerank={model}"]
    with pytest.raises(
        SpecError,
        match=r"rerank must be null, .*; add it with `python -m"
        r" jobs\.backfill`",
    ):
        index_job.main(arguments)
    backfill_job.main(arguments)
    assert "2/2 fragments  7 rows" in capsys.readouterr().out
    status_job.main([str(uri)])
    said = capsys.readouterr().out
    assert "rerank_tokens: 3.0 an item, 192 B/item, 100.0%, adapter " in said
    assert "backfill " in said
    index_job.main([*arguments, "--dry-run"])
    assert "rerank_tokens" in capsys.readouterr().out
