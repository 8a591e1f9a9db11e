"""Help and wrong paths are answered before anything slow is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import get_args

import pytest

from jobs.__main__ import verbs
from jobs.search import PRECISIONS
from pipeline.schema import POOL, Precision
from tests.conftest import ROOT

SLOW = ("lance", "pandas", "pyarrow", "ray", "torch", "transformers")
RUN = """
import contextlib, importlib, io, json, sys
import jobs
slow, commands = json.loads(sys.argv[1])
results = []
for verb, *arguments in commands:
    said, code = io.StringIO(), 0
    module = importlib.import_module("jobs.bench.__main__" if verb == "bench" else f"jobs.{verb}")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            jobs.run(module.main, arguments)
        except SystemExit as error:
            code = error.code
    results.append([code, said.getvalue(), sorted(set(slow) & set(sys.modules))])
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


def test_help_imports_nothing_slow():
    commands = [[verb, "--help"] for verb in verbs()]
    for command, (code, said, slow) in zip(commands, run(*commands), strict=True):
        assert (code, slow) == (0, []), command
        assert said.startswith("usage:"), command


def test_the_help_of_search_states_the_values_of_the_schema():
    assert get_args(Precision) == PRECISIONS
    (_, said, _) = run(["search", "--help"])[0]
    assert f"default: {POOL}\n" in said


NOWHERE = "/nowhere/at/all"
SPEC, INDEX = f"{NOWHERE}.yaml", f"{NOWHERE}/index"
SPECS = "jobs/specs/cranfield"
#: Commands with a wrong path, and the field that the message names.
WRONG = [
    (["backfill", SPEC], "spec"),
    (["backfill", f"{SPECS}.yaml", f"index={INDEX}"], "index"),
    (["binding", "--encoder", SPEC], "--encoder"),
    (["binding", "--table", SPEC], "--table"),
    (["compare", NOWHERE, NOWHERE], "OUT_A"),
    (["evaluate", SPEC], "spec"),
    (["evaluate", f"{SPECS}_evaluate.yaml", f"index={INDEX}"], "index"),
    (["evaluate", f"{SPECS}_evaluate.yaml", f"benchmark.path={NOWHERE}"], "benchmark.path"),
    (["export", INDEX, "out.parquet", "--representation", "full"], "index"),
    (["index", SPEC], "spec"),
    (["index", f"{SPECS}.yaml", "--resources", SPEC], "resources"),
    (["index", f"{SPECS}.yaml", f"source.path={NOWHERE}"], "source.path"),
    (["index", f"{SPECS}.yaml", f"source=[{{name: text, path: {NOWHERE}}}]"], "source.0.path"),
    (["maps", f"{NOWHERE}.jsonl", "out.png", "--index", INDEX], "grounding"),
    (["maps", "README.md", "out.png", "--index", INDEX], "index"),
    (["mine", INDEX, "README.md", "out.jsonl"], "index"),
    (["pool", NOWHERE, NOWHERE, "--output", "out"], "OUT"),
    (["recompress", SPEC], "spec"),
    (["recompress", f"{SPECS}_more.yaml", f"index={INDEX}"], "index"),
    (["search", INDEX, "a query"], "index"),
    (["serve", INDEX], "index"),
    (["serve", "--spec", SPEC], "spec"),
    (["status", INDEX], "index"),
    (["train", SPEC], "spec"),
]


def test_wrong_paths_are_reported_before_anything_slow_is_imported():
    results = run(*(command for command, _ in WRONG))
    for (command, field), (code, said, slow) in zip(WRONG, results, strict=True):
        assert (code, slow) == (2, []), (command, said)
        assert said.startswith(f"error: {field}: '{NOWHERE}"), said
        assert said.count("\n") == 1, said


@pytest.mark.parametrize("option", ["queries", "query-vectors", "image", "ids", "parents"])
def test_wrong_files_of_a_search_are_reported_as_quickly(index_uri, option):
    query = [] if option in ("queries", "query-vectors") else ["a query"]
    command = ["search", index_uri, *query, f"--{option}", NOWHERE]
    code, said, slow = run(command)[0]
    assert (code, slow) == (2, []), said
    assert said.startswith(f"error: {option}: '{NOWHERE}'"), said


@pytest.mark.parametrize(("given", "mode"), [({}, "1"), ({"RAY_AUTH_MODE": "disabled"}, "0")])
def test_ray_authenticates_by_token_unless_told_otherwise(given, mode):
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
