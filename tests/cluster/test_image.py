"""Tests of the image: its Dockerfile, build context and wheel."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

from pipeline.serve.environment import PROXY_ENV
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile with their arguments."""
    text = (ROOT / "cluster/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines()]


def values(name: str) -> list[str]:
    """Returns the arguments of all instructions of a name."""
    return [arguments for instruction, arguments in instructions() if instruction == name]


def is_in_context(path: str) -> bool:
    """Applies the patterns of `.dockerignore`. The last pattern that matches a path decides."""
    included = True
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#"):
            name = pattern.removeprefix("!").removeprefix("**/")
            parents = [path, *map("/".join, _parents(path.split("/")))]
            candidates = [p.rpartition("/")[2] for p in parents] if "**/" in pattern else parents
            if any(fnmatch.fnmatchcase(candidate, name) for candidate in candidates):
                included = pattern.startswith("!")
    return included


def _parents(parts: list[str]) -> list[list[str]]:
    return [parts[:size] for size in range(1, len(parts))]


def copied() -> list[str]:
    """Returns the sources of the files that are copied from the build context."""
    words = [a.split() for a in values("COPY") if "--from" not in a]
    return [source for line in words for source in line[:-1] if not source.startswith("--")]


def test_versions_are_those_of_the_package():
    arguments = dict(a.partition("=")[::2] for a in values("ARG") if "=" in a)
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (ray,) = (package["version"] for package in lock["package"] if package["name"] == "ray")
    assert ray == arguments["RAY_VERSION"]
    assert f"torch=={arguments['TORCH']}\n" in MAKEFILE
    python = re.fullmatch(r"py3(\d+)", arguments["PYTHON"])[1]
    assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.13" and python in ("11", "12")
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(arguments["EXTRAS"].split(",")) <= extras.keys()
    platform = "rayproject/ray:${RAY_VERSION}-${PYTHON}-${PLATFORM}"
    assert values("FROM") == [f"{platform} AS build", platform]


def test_torch_is_installed_before_its_dependents():
    installs = [run for run in values("RUN") if "pip install" in run]
    assert ["torch" in run for run in installs] == [True, False]


def test_runs_without_root_and_with_the_models_in_a_volume():
    assert values("USER")[-1] == "ray"
    assert values("VOLUME") == ["/models"]
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(values("ENV"))))
    assert environment["HF_HOME"] == "/models"
    assert environment.items() >= PROXY_ENV.items()
    mounts = (ROOT / "cluster/kuberay/rayservice.yaml").read_text()
    assert "mountPath: /models" in mounts


def test_build_context_has_the_files_of_the_package_and_no_others():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    context = {path for path in files if path and is_in_context(path)}
    for source in copied():
        assert any(f"{path}/".startswith(f"{source.rstrip('/')}/") for path in context), source
    project = PYPROJECT["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= context
    assert {path for path in files if path.startswith("pipeline/")} <= context
    assert not any(path.startswith(("tests/", "docs/", ".git")) for path in context)
    assert not is_in_context("out/index/items") and not is_in_context(".venv/bin/python")
    assert not is_in_context("pipeline/search/native/_maxsim.cpython-311-x86_64-linux-gnu.so")


@pytest.mark.heavy
def test_wheel_of_the_build_context_has_the_kernel(tmp_path):
    """The steps of the build stage, without a container."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for path in filter(None, files):
        if is_in_context(path) and any(f"{path}/".startswith(f"{s}/") for s in copied()):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", "wheels", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = (tmp_path / "wheels").glob("maxray-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.fullmatch(r"pipeline/search/native/_maxsim.*\.so", name) for name in names)
    assert "jobs/specs/cranfield.yaml" in names and "pipeline/serve/page/index.html" in names


def test_runtime_environment_is_valid():
    from ray.runtime_env import RuntimeEnv

    fields = yaml.safe_load((ROOT / "cluster/runtime-env.yaml").read_text())
    assert RuntimeEnv(**{**fields, "working_dir": str(ROOT)}).to_dict().keys() == fields.keys()
    for name in set(fields["excludes"]) - {".git", ".venv", "build", "out"}:
        assert (ROOT / name).exists()
