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
#: Runs a command with modules that cannot be imported.
RUN = """
import importlib, json, sys
missing, verb, arguments = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
import jobs
jobs.run(importlib.import_module(f"jobs.{verb}").main, arguments)
"""


def run(missing: list[str], verb: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([missing, verb, arguments])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def index_spec(folder: Path, source: str, path: str, **fields: object) -> str:
    spec = {
        "index": str(folder / "index"),
        "source": {"name": source, "path": path},
        "representations": [{"compressor": "none"}],
        **fields,
    }
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    return str(file)


@pytest.mark.parametrize(
    ("module", "source", "path"),
    [
        ("pypdfium2", "pages", str(DATA / "pages")),
        ("rapidocr", "images", str(DATA / "photos")),
        ("onnxruntime", "images", str(DATA / "photos")),
        ("pocketsphinx", "audio", str(DATA / "speech")),
        ("s3fs", "text", "s3://bucket/documents"),
    ],
)
def test_sources_and_recognisers_report_missing_extra(tmp_path, module, source, path):
    encoder = "minilm" if source == "text" else "transcript"
    assert_missing(
        module, run([module], "index", index_spec(tmp_path, source, path, encoder=encoder))
    )
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("module", ["matplotlib", "jinja2", "bm25s"])
def test_evaluation_reports_missing_extra(index_uri, tmp_path, module):
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
    assert_missing(module, run([module], "evaluate", str(spec)))


def test_training_reports_missing_extra(tmp_path):
    spec = str(ROOT / "jobs/specs/training/binding_lora.yaml")
    output = f"output={tmp_path / 'out'}"
    assert_missing("peft", run(["peft"], "train", spec, output, "--dry-run"))


def assert_missing(module: str, result: subprocess.CompletedProcess) -> None:
    name, extra, purpose = PACKAGES[module]
    message = f'error: {purpose} needs {name}; install it with: pip install "maxray[{extra}]"\n'
    assert (result.returncode, result.stderr) == (2, message), result.stdout[-2000:]


def test_core_requires_no_extra():
    code = """
import importlib, sys
from pipeline import extras
sys.modules.update(dict.fromkeys(extras.PACKAGES))
from pipeline.registry import *
for registry in (CODECS, COMPRESSORS, ENCODERS, OCR, SOURCES, SPEECH, TRAINING_DATA, LEARNERS):
    for name in registry.names():
        registry.load(name)
import pipeline.eval.evaluation, pipeline.index.job, pipeline.search, pipeline.serve.app
import pipeline.serve.mteb, pipeline.train.study
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
