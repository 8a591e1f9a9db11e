"""Tests of missing extras: error message with the install command, and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.extras import PACKAGES
from tests.conftest import ROOT

DATA = ROOT / "jobs/data"
#: Runs commands, each with a module that cannot be imported.
RUN = """
import contextlib, importlib, io, json, sys
import jobs
results = []
for module, verb, arguments in json.loads(sys.argv[1]):
    error, code = io.StringIO(), 0
    sys.modules[module] = None
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(error):
        try:
            jobs.run(importlib.import_module(f"jobs.{verb}").main, arguments)
        except SystemExit as exit:
            code = exit.code
    del sys.modules[module]
    results.append([code, error.getvalue()])
print(json.dumps(results))
"""


def assert_missing(*commands: tuple[str, str, list[str]]) -> None:
    """Runs commands without a module and checks the error messages.

    Args:
        *commands: Missing module, verb and arguments of each command.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for (module, *_), result in zip(commands, json.loads(done.stdout), strict=True):
        name, extra, purpose = PACKAGES[module]
        message = f'error: {purpose} needs {name}; install it with: pip install "maxray[{extra}]"\n'
        assert result == [2, message], (module, done.stderr[-2000:])


def index_spec(folder: Path, source: str, path: str, /, **fields: object) -> str:
    spec = {
        "index": str(folder / "index"),
        "source": {"name": source, "path": path},
        "representations": [{"compressor": "none"}],
        **fields,
    }
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return str(file)


def test_sources_and_recognisers_report_missing_extra(tmp_path):
    commands = []
    for module, source, path in (
        ("pypdfium2", "pages", str(DATA / "pages")),
        ("rapidocr", "images", str(DATA / "photos")),
        ("onnxruntime", "images", str(DATA / "photos")),
        ("pocketsphinx", "audio", str(DATA / "speech")),
        ("s3fs", "text", "s3://bucket/documents"),
    ):
        encoder = "minilm" if source == "text" else "transcript"
        folder = tmp_path / module
        folder.mkdir()
        commands.append((module, "index", [index_spec(folder, source, path, encoder=encoder)]))
    for module, source in (
        ("mteb", {"name": "mteb", "task": "SciFact", "data": str(DATA)}),
        ("ir_datasets", {"name": "ir_datasets", "dataset": "beir/scifact", "data": str(DATA)}),
    ):
        folder = tmp_path / module
        folder.mkdir()
        commands.append((module, "index", [index_spec(folder, "", "", source=source)]))
    assert_missing(*commands)
    assert not list(tmp_path.glob("*/index"))


@pytest.mark.heavy
def test_evaluation_and_training_report_missing_extra(index_uri, tmp_path):
    spec = tmp_path / "evaluate.yaml"
    spec.write_text(
        yaml.safe_dump(
            {
                "index": index_uri,
                "benchmark": {"name": "beir", "path": str(DATA / "cranfield")},
                "output": str(tmp_path / "out"),
            }
        )
    )
    training = str(ROOT / "examples/papers/specs/training/binding_lora.yaml")
    assert_missing(
        *((module, "evaluate", [str(spec)]) for module in ("matplotlib", "jinja2", "bm25s")),
        ("peft", "train", [training, f"output={tmp_path / 'out'}", "--dry-run"]),
    )


def test_core_requires_no_extra():
    code = """
import importlib, sys
from pipeline import extras
sys.modules.update(dict.fromkeys(extras.PACKAGES))
from pipeline.registry import *
for registry in (
    BENCHMARKS, CODECS, COMPRESSORS, ENCODERS, LEARNERS, OCR, SOURCES, SPEECH, TRAINING_DATA
):
    for name in registry.names():
        registry.load(name)
import pipeline.eval.evaluation, pipeline.index.job, pipeline.search, pipeline.serve.app
import pipeline.serve.mteb
for verb in sys.argv[1:]:
    try:
        importlib.import_module(f"jobs.{verb}").main(["--help"])
    except SystemExit as error:
        assert error.code == 0, verb
"""
    verbs = sorted(path.stem for path in (ROOT / "jobs").glob("[a-z]*.py"))
    subprocess.run(
        [sys.executable, "-c", code, *verbs],
        cwd=ROOT,
        check=True,
        timeout=240,
        stdout=subprocess.DEVNULL,
    )


def test_packages_are_in_their_extras():
    text = (ROOT / "pyproject.toml").read_text()
    for package in PACKAGES.values():
        (requirements,) = re.findall(rf"(?m)^{package.extra} = \[(.*)\]", text)
        assert f'"{package.name}' in requirements
