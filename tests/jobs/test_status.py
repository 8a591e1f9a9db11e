"""Progress of a real job: on a pseudo-terminal, and watched from another process."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from jobs import status
from pipeline.index import EXECUTOR, PROGRESS
from pipeline.index.reader import IndexReader
from pipeline.index.writer import IndexWriter
from pipeline.runtime.progress import Snapshot
from tests.conftest import ROOT, start_job
from tests.terminal import Terminal
from tests.tiny import SLEEPING

#: Items, and items per unit and fragment, of a job that takes about ten seconds.
ITEMS, UNIT, FRAGMENT = 60, 2, 20


@pytest.fixture
def spec(tmp_path: Path, collection) -> str:
    documents = {f"d{i:02}": f"text {i}" for i in range(ITEMS)}
    fields = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(**documents))},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0.2,
            "batch_size": 1,
            "num_tokens": 4,
            "dim": 8,
        },
        "representations": [{"compressor": "none"}],
        "unit_items": UNIT,
        "fragment_items": FRAGMENT,
        "commit_items": FRAGMENT,
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "spec.yaml")


def on_terminal(*arguments: str, address: str) -> Terminal:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
    environment.pop(EXECUTOR, None)
    return Terminal([sys.executable, "-m", *arguments], environment, str(ROOT))


def counts(lines: list[str], unit: str = "items") -> list[tuple[int, int]]:
    """Returns the distinct states (done, total) in the lines of a display."""
    found = [re.search(rf"([\d,]+)/([\d,]+) {unit}", line) for line in lines]
    return list(dict.fromkeys((int(m[1]), int(m[2])) for m in found if m))


@pytest.mark.heavy
def test_live_display_and_watch(cluster, spec, tmp_path):
    uri = str(tmp_path / "index")
    terminal = on_terminal("jobs.index", spec, address=cluster)
    terminal.read(lambda text: "items to process" in text)  # the job holds the lease
    watcher = start_job("jobs.status", uri, "--watch", "--progress", "json")
    text = terminal.read()
    assert terminal.close() == 0, text
    output, error = watcher.communicate(timeout=60)
    assert (watcher.returncode, error) == (0, "")

    for phase in ("load modules", "start Ray"):
        assert any(phase in frame for frame in terminal.frames)
    lines = [line for frame in terminal.frames for line in frame.splitlines()]
    done = [number for number, total in counts(lines) if total == ITEMS]
    assert done == sorted(done) and done[0] == 0 and done[-1] == ITEMS
    assert len(done) > ITEMS / FRAGMENT + 2  # they advance with units, not with fragments
    busy = next(f for f in reversed(terminal.frames) if re.search(r"encode .* busy", f))
    assert re.search(r"\d+\.\d/s +\d:\d\d left +\d:\d\d elapsed", busy), busy
    share = int(re.search(r"encode +\S+ +(\d+)% busy", busy)[1])
    assert share > 50, busy
    assert "listed 60 = indexed 60" in text and "busy" not in text  # the display has been removed
    assert "(pid=" not in text and "Traceback" not in text

    lines = [json.loads(line) for line in output.splitlines()]
    watched = [line for line in lines if line["event"] == "progress" and line["phase"] == "index"]
    done = [line["done"] for line in watched]
    assert done == sorted(done) and any(number % FRAGMENT for number in done)
    assert {step["name"] for step in watched[-1]["steps"]} >= {"read", "encode"}
    assert lines[-1]["event"] == "message" and lines[-1]["text"].endswith(" done")
    (folder,) = Path(uri, "jobs").iterdir()
    assert not (folder / PROGRESS).exists()
    assert len(IndexReader(uri)) == ITEMS


@pytest.mark.heavy
def test_json_lines_and_sigterm(cluster, spec, tmp_path):
    process = start_job("jobs.index", spec, "--progress", "json", address=cluster)
    lines = []
    for line in process.stdout:
        lines.append(last := json.loads(line))
        if last["event"] == "progress" and last["phase"] == "index" and last["done"]:
            process.send_signal(signal.SIGTERM)
            break
    rest, error = process.communicate(timeout=120)
    assert process.returncode == 143 and error.startswith("stopped by SIGTERM")
    lines += map(json.loads, rest.splitlines())
    phases = list(dict.fromkeys(x["phase"] for x in lines if x["event"] == "progress"))
    assert phases[:2] == ["load modules", "start Ray"]
    assert phases.index("list") < phases.index("load encoder") < phases.index("index")
    listed = next(x for x in lines if x["event"] == "progress" and x["phase"] == "load encoder")
    assert (listed["done"], listed["total"], listed["counts"]["listed"]) == (0, ITEMS, ITEMS)


def test_watch_without_a_running_job(tmp_path, capsys):
    uri = str(tmp_path / "index")
    IndexWriter(uri, "ended").release()
    status.main([uri, "--watch"])
    assert f"no job is writing to {uri}" in capsys.readouterr().out


def test_watch_notices_a_killed_job(tmp_path):
    uri = str(tmp_path / "index")
    writer = IndexWriter(uri, "the-job", ttl=3.0)
    folder = Path(uri, "jobs/the-job")
    folder.mkdir(parents=True)
    snapshot = Snapshot("the-job", "index", uri, "index", done=3, total=10, time=time.time())
    (folder / PROGRESS).write_text(json.dumps(snapshot.to_dict()))
    process = start_job("jobs.status", uri, "--watch", "--progress", "json")
    first = json.loads(process.stdout.readline())
    while first["phase"] != "index":
        first = json.loads(process.stdout.readline())
    assert (first["done"], first["total"]) == (3, 10)
    (folder / PROGRESS).unlink()
    writer.release()  # without a summary, as after a kill
    rest, error = process.communicate(timeout=60)
    assert json.loads(rest.splitlines()[-1])["text"] == "job the-job killed", error


def test_watch_excludes_json(capsys):
    with pytest.raises(SystemExit):
        status.main(["x", "--watch", "--json"])
    assert "--json cannot be combined with --watch; use --progress json" in capsys.readouterr().err
