"""Behaviour common to all jobs: help, wrong paths, stops, and submission to a cluster."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
import yaml

import jobs
from jobs import _queries
from jobs.__main__ import forms, verbs
from pipeline.index import EXECUTOR
from pipeline.index.lease import Lease
from pipeline.index.reader import IndexReader
from pipeline.index.status import status
from pipeline.schema import DEFAULT_RERANK_DEPTH, QUERY_FILES
from tests.conftest import ROOT, start_job
from tests.serve.conftest import free_port
from tests.tiny import SLEEPING

SLOW = ("lance", "pandas", "pyarrow", "ray", "torch", "transformers")
RUN = """
import contextlib, importlib, io, json, sys
import jobs
slow, commands = json.loads(sys.argv[1])
results = []
for verb, *arguments in commands:
    output, code = io.StringIO(), 0
    module = importlib.import_module(f"{verb}.__main__" if "." in verb else f"jobs.{verb}")
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            jobs.run(module.main, arguments)
        except SystemExit as error:
            code = error.code
    results.append([code, output.getvalue(), sorted(set(slow) & set(sys.modules))])
print(json.dumps(results))
"""


def run(*commands: list[str]) -> list[tuple[int, str, list[str]]]:
    """The exit code and output of each command, and the slow modules imported up to its end."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([SLOW, commands])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_help_does_not_import_slow_modules():
    names = [(verb, *form) for verb in verbs() for form in ((), *zip(forms(verb)))]
    commands = [[*name, "--help"] for name in names]
    for command, (code, output, slow) in zip(commands, run(*commands), strict=True):
        assert (code, slow) == (0, []), command
        assert output.startswith("usage:"), command


def test_search_equals_schema():
    assert _queries.FILES == QUERY_FILES
    (_, output, _) = run(["search", "--help"])[0]
    assert f"`top` hits ({DEFAULT_RERANK_DEPTH})" in output


NOWHERE = "/nowhere/at/all"
SPEC, INDEX = f"{NOWHERE}.yaml", f"{NOWHERE}/index"
SPECS = "jobs/specs/cranfield"
#: Commands with a wrong path, and the field that the message names.
WRONG = [
    (["draw", "attention", "out.png", f"{NOWHERE}.png", "--model", SPEC], "items"),
    (["draw", "attention", "out.png", "README.md", "--model", SPEC], "model"),
    (["add", "candidates", INDEX, "ivf"], "index"),
    (["add", "representations", SPEC], "spec"),
    (["add", "representations", f"{SPECS}_more.yaml", f"index={INDEX}"], "index"),
    (["add", "tokens", SPEC], "spec"),
    (["add", "tokens", f"{SPECS}.yaml", f"index={INDEX}"], "index"),
    (["examples.papers", "binding", "--encoder", SPEC], "--encoder"),
    (["examples.papers", "binding", "--table", SPEC], "--table"),
    (["examples.papers", "positions", SPEC], "spec"),
    (["examples.papers", "study", SPEC], "spec"),
    (["draw", "sheets", NOWHERE], "EVALUATION"),
    (["evaluate", SPEC], "spec"),
    (["evaluate", f"{SPECS}_evaluate.yaml", f"index={INDEX}"], "index"),
    (["evaluate", f"{SPECS}_evaluate.yaml", f"benchmark.path={NOWHERE}"], "benchmark.path"),
    (["evaluate", "compare", NOWHERE, NOWHERE], "OUT_A"),
    (["evaluate", "pool", NOWHERE, NOWHERE, "--output", "out"], "OUT"),
    (["export", INDEX, "out.parquet", "--representation", "full"], "index"),
    (["index", SPEC], "spec"),
    (["index", f"{SPECS}.yaml", "--resources", SPEC], "resources"),
    (["index", f"{SPECS}.yaml", f"source.path={NOWHERE}"], "source.path"),
    (["index", f"{SPECS}.yaml", f"source=[{{name: text, path: {NOWHERE}}}]"], "source[0].path"),
    (["maintain", INDEX], "index"),
    (["maintain", "delete", INDEX], "index"),
    (["draw", "maps", f"{NOWHERE}.jsonl", "out.png", "--index", INDEX], "grounding"),
    (["draw", "maps", "README.md", "out.png", "--index", INDEX], "index"),
    (["plan", SPEC], "spec"),
    (["plan", "recommend", INDEX], "index"),
    (["index", f"{SPECS}.yaml", f"rerank={NOWHERE}"], "rerank"),
    (["index", f"{SPECS}.yaml", f"fit_index={NOWHERE}"], "fit_index"),
    (["search", INDEX, "a query"], "index"),
    (["serve", INDEX], "index"),
    (["serve", "--spec", SPEC], "spec"),
    (["status", INDEX], "index"),
    (["train", SPEC], "spec"),
    (["train", "mine", INDEX, "README.md", "out.jsonl"], "index"),
]


def test_reports_wrong_paths_before_slow_imports():
    results = run(*(command for command, _ in WRONG))
    for (command, field), (code, output, slow) in zip(WRONG, results, strict=True):
        assert (code, slow) == (2, []), (command, output)
        assert output.startswith(f"error: {field} must be ") and f"got '{NOWHERE}" in output, output
        assert output.count("\n") == 1, output


def test_reports_misspelt_forms(tmp_path, monkeypatch):
    commands = [["train", "mien", "i", "q", "o"], ["evaluate", "compre", "a", "--output", "b"]]
    rules = ("'mine', got 'mien'", "one of compare, pool, got 'compre'")
    for (code, output, slow), rule in zip(run(*commands), rules, strict=True):
        assert (code, slow) == (2, []), output
        assert output.startswith(f"error: form must be {rule}, which does not exist; did you mean")
        assert output.count("\n") == 1, output
    (tmp_path / "compre").touch()
    monkeypatch.chdir(tmp_path)
    assert not jobs.run_form({"compare": print}, ["compre"])
    assert not jobs.run_form({"key": print}, ["--keys", "keys.yaml"])


@pytest.mark.parametrize("option", ["queries", "query-vectors", "image", "ids", "parents"])
def test_search_reports_wrong_files_before_slow_imports(index_uri, option):
    query = [] if option in ("queries", "query-vectors") else ["a query"]
    command = ["search", index_uri, *query, f"--{option}", NOWHERE]
    code, output, slow = run(command)[0]
    assert (code, slow) == (2, []), output
    assert output.startswith(f"error: {option} must be ") and f"got '{NOWHERE}'" in output, output


def test_reports_equal_collections_before_slow_imports(tmp_path):
    for folder in ("a/docs", "b/docs"):
        (tmp_path / folder).mkdir(parents=True)
    sources = [{"name": "text", "path": str(tmp_path / f"{name}/docs")} for name in "ab"]
    (tmp_path / "spec.yaml").write_text(json.dumps({"index": "x", "source": sources}))
    command = ["index", str(tmp_path / "spec.yaml")]
    (code, output, slow), (_, other, _) = run(command, [*command, "source.1.collection=b", "n=1"])
    assert (code, slow) == (2, [])
    assert output.startswith(
        "error: source[1].collection must be unique for each source, got 'docs'"
    )
    assert "unknown field 'n'" in other


def test_reports_a_folder_around_an_index(tmp_path):
    (tmp_path / "mine/index/items.lance").mkdir(parents=True)
    code, output, slow = run(["status", str(tmp_path / "mine")])[0]
    assert (code, slow) == (2, [])
    assert f"which contains no index (no items.lance in {tmp_path}/mine)" in output
    assert output.endswith(f"; did you mean '{tmp_path}/mine/index'?\n")


PRINTS = """
import logging, sys
import jobs
from pipeline.config import SpecError
from pipeline.runtime.progress import open_display

def main(arguments):
    with open_display() as display:
        display.say("the astronaut \\U0001f680 \\u4e2d lands")
    logging.getLogger("maxray").info("logged \\U0001f680")
    print("printed \\udcff caf\\xe9")
    raise SpecError("query", "\\U0001f680", "valid")

jobs.run(main, [])
"""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8", "cp1252:strict"])
def test_prints_characters_that_the_encoding_lacks(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], env=environment, cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    text = done.stdout.decode(encoding.partition(":")[0])
    rocket = "\U0001f680" if encoding == "utf-8" else "\\U0001f680"
    accent = "\\xe9" if encoding == "ascii" else "\xe9"
    assert f"the astronaut {rocket}" in text and f"logged {rocket}" in text
    assert f"printed \\udcff caf{accent}" in text
    assert done.stderr.startswith(b"error: query must be valid") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("closed", [[1], [2], [1, 2], [0, 1, 2]])
def test_runs_with_closed_output(closed, tmp_path):
    code = f"""
import os
for fd in {closed}:
    os.close(fd)
os.execv({sys.executable!r}, [{sys.executable!r}, "-c", {PRINTS!r}])
"""
    file = tmp_path / "output"
    with file.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=output, stderr=output, timeout=60
        )
    assert done.returncode == 2
    assert b"Traceback" not in file.read_bytes()
    assert (b"lands" in file.read_bytes()) == (1 not in closed)


@pytest.mark.parametrize("verb", ["--help", "search"])
def test_command_with_closed_output(verb):
    command = ["sh", "-c", f"{sys.executable} -m jobs {verb} --help >&-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("given", "mode"), [({}, "1"), ({"RAY_AUTH_MODE": "disabled"}, "0")])
def test_ray_uses_token_authentication_by_default(given, mode):
    """The mode that Ray itself has read, which it does when it is imported."""
    code = (
        "import jobs\n"
        "def main(arguments):\n"
        "    from ray._raylet import get_authentication_mode\n"
        "    print(get_authentication_mode())\n"
        "jobs.run(main)"
    )
    unset = ("RAY_AUTH_MODE", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, **given}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == mode, done.stderr


def children(process: Popen, name: str) -> list[int]:
    """The child processes of a job whose executable is called `name`."""
    # /proc/PID/task/PID/children may omit processes while others start and end.
    return [child.pid for child in psutil.Process(process.pid).children() if child.name() == name]


def wait_for(process: Popen, condition) -> None:
    """Waits for a condition while a job runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def spec(tmp_path: Path, collection) -> str:
    """A spec whose job takes 20 s at least and commits after each item."""
    fields = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(**{f"d{i}": "x" for i in range(20)}))},
        "encoder": {
            "class": SLEEPING,
            "seconds": 1,
            "num_tokens": 4,
            "dim": 8,
        },
        "representations": [{"compressor": "none"}],
        "unit_items": 1,
        "fragment_items": 1,
        "commit_items": 1,
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "spec.yaml")


@pytest.mark.parametrize("verb", ["index", pytest.param("serve", marks=pytest.mark.heavy)])
def test_sigterm_while_ray_starts(spec, index_uri, verb):
    arguments = {"index": [spec], "serve": [index_uri, "--port", str(free_port())]}[verb]
    process = start_job(f"jobs.{verb}", *arguments, **{EXECUTOR: "ray"})
    wait_for(process, lambda: children(process, "gcs_server"))
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, "stopped by SIGTERM\n"), output


def test_interrupt_while_encoding_in_process(tmp_path):
    """PyTorch aborts a process that exits while a daemon thread encodes."""
    (tmp_path / "texts").mkdir()
    for number in range(1000):
        text = f"The keeper of lighthouse {number} sleeps. " * 20
        (tmp_path / f"texts/{number}.txt").write_text(text)
    process = start_job("jobs.index", str(tmp_path / "texts"))
    assert any("/1,000 items (" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "error: interrupted\n"), output


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "error: interrupted")],
)
def test_signal_during_a_fit(cluster, spec, tmp_path, number, code, message):
    fitted = '{"name": "adaptive", "num_vectors": 2}'
    arguments = [spec, f"representations.0.compressor={fitted}", "--progress", "json"]
    process = start_job("jobs.index", *arguments, address=cluster)
    assert any('"phase": "fit' in line for line in process.stdout)  # takes 20 s
    process.send_signal(number)
    start = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and error.startswith(message), error
    assert time.monotonic() - start < 10
    lease = Lease.from_dataset(IndexReader(str(tmp_path / "index")).dataset)
    assert lease is not None and lease.owner == ""


@pytest.mark.heavy
def test_index_deleted_during_the_job(cluster, spec, tmp_path):
    process = start_job("jobs.index", spec, address=cluster)
    data = tmp_path / "index/items.lance/data"
    wait_for(process, lambda: data.exists() and len(list(data.iterdir())) > 1)
    shutil.rmtree(tmp_path / "index")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert error.startswith(f"error: the index {tmp_path}/index was deleted"), error
    assert error.count("\n") == 1, error


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_ray_process_dies(spec, name):
    process = start_job("jobs.index", spec, **{EXECUTOR: "ray"})
    wait_for(process, lambda: len(children(process, "raylet")) == 1)
    assert any(line.split(" ")[1:2] == ["listed"] for line in process.stdout)  # Ray has started
    os.kill(children(process, name)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.startswith(f"error: Ray's {name} died") and error.count("\n") == 1, error


@pytest.mark.parametrize("scheme", ["", pytest.param("ray://", marks=pytest.mark.heavy)])
def test_rejects_unreachable_address(spec, scheme):
    start = time.monotonic()
    address = f"{scheme}127.0.0.1:{free_port()}"
    _, error = start_job("jobs.index", spec, address=address).communicate(timeout=60)
    assert error.startswith(
        f"error: RAY_ADDRESS must be the address of a running Ray cluster, got '{address}'"
    ), error
    assert error.count("\n") == 1 and time.monotonic() - start < 40


@pytest.mark.heavy
def test_starts_its_own_cluster_after_another_has_died():
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, because socket paths are limited
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    environment.pop("RAY_ADDRESS", None)
    script = "import jobs, ray\nwith jobs.cluster(): print(len(ray.nodes()))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    shutil.rmtree(folder, ignore_errors=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.heavy
def test_workers_of_its_own_cluster_have_the_priority_of_the_job():
    environment = {name: os.environ[name] for name in os.environ if name != "RAY_ADDRESS"}
    script = (
        "import jobs, os, ray\n"
        "with jobs.cluster(): print(ray.get(ray.remote(lambda: os.nice(0)).remote()))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, f"{os.nice(0)}\n"), done.stderr


RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """Separate head node: address of its job server and environment of its clients."""
    folder = tempfile.mkdtemp(prefix="ray")  # short, because socket paths are limited
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PYTHONPATH": "",  # the job has the code from its working directory
    }
    environment.pop("RAY_ADDRESS", None)
    port, dashboard_port, agent_port, agent_grpc_port = free_ports(4)
    options = {
        "num-cpus": 3,
        "port": port,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard_port,
        # Their defaults are fixed: the agent of another cluster on this machine may have them.
        "dashboard-agent-listen-port": agent_port,
        "dashboard-agent-grpc-port": agent_grpc_port,
        "temp-dir": folder,
        "object-store-memory": 1 << 28,
    }
    command = [RAY, "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with open(f"{folder}/head.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        deadline = time.time() + 90
        while not answers(f"{address}/api/version"):
            assert process.poll() is None, Path(folder, "head.log").read_text()
            assert time.time() < deadline, "the head does not answer"
            time.sleep(0.2)
        yield address, environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def answers(url: str) -> bool:
    """Returns whether a server responds, possibly by requesting a token."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.mark.heavy
def test_submits_the_index_job(head, tmp_path, collection):
    address, environment = head
    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(collection(a="one", b="two"))},
        "encoder": {
            "class": SLEEPING,
            "seconds": 0.0,
            "num_tokens": 6,
            "dim": 8,
        },
        "representations": [{"compressor": "none"}],
    }
    (tmp_path / "code").mkdir()
    for package in ("pipeline", "jobs", "tests/tiny"):  # the code that a user submits
        ignored = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=ignored)
    (tmp_path / "code/spec.yaml").write_text(yaml.safe_dump(spec))

    def submit(*arguments: str, **changes: str) -> subprocess.CompletedProcess:
        command = [RAY, "job", "submit", "--address", address, "--working-dir", tmp_path / "code"]
        return subprocess.run(
            [*command, "--", sys.executable, "-m", "jobs.index", "spec.yaml", *arguments],
            cwd=tmp_path,
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    refused = submit(RAY_AUTH_TOKEN="not the token")
    assert refused.returncode != 0 and not (tmp_path / "index").exists()

    deadline = time.time() + 60
    done = submit("representations.0.id=uncompressed")
    while "No available agent" in done.stderr and time.time() < deadline:  # it is starting still
        time.sleep(0.5)
        done = submit("representations.0.id=uncompressed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "listed 2 = indexed 2 (2 new, 0 replaced, 0 unchanged) + rejected 0" in done.stdout
    table = IndexReader(str(tmp_path / "index")).dataset.to_table()
    assert sorted(table["item_id"].to_pylist()) == ["a", "b"]
    assert [len(vectors) for vectors in table["uncompressed"].to_pylist()] == [6, 6]
    (job,) = status(str(tmp_path / "index"))["jobs"]
    assert job["state"] == "done"
    assert json.loads((tmp_path / f"index/jobs/{job['job']}/summary.json").read_text()) == job


@pytest.mark.parametrize("more", [[], pytest.param(["--actors", "1"], marks=pytest.mark.heavy)])
def test_folders_of_the_same_names_in_the_working_directory(index_uri, tmp_path, more):
    """Neither a job of `maxray` nor its workers import modules of another project."""
    for name in ("jobs", "pipeline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('another project')")
    command = [sys.executable, "-P", "-m", "jobs", "search", index_uri, "lift", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "wing/1" in done.stdout, done.stderr
