"""Tests of the threat model: its tests exist, and no code executes data."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

#: Calls that can execute the data that they read, and the keywords that prevent it.
DANGEROUS: dict[str, dict[str, bool]] = {
    "torch.load": {"weights_only": True},
    "pickle.load": {},
    "pickle.loads": {},
    "cloudpickle.load": {},
    "cloudpickle.loads": {},
    "pd.read_pickle": {},
    "marshal.loads": {},
    "torch.hub.load": {},
    "os.system": {},
    "eval": {},
    "exec": {},
}
#: Keywords that may not have a value in any call.
FORBIDDEN = {"allow_pickle": True, "trust_remote_code": True, "shell": True, "verify": False}
#: Calls that read what the same job has written to a task of its own.
ALLOWED = {
    ("pipeline/index/ray_data.py", "pickle.loads"),
    ("examples/papers/tables/encoder_pool.py", "cloudpickle.loads"),
}


def calls(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the name and the constant keywords of each call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            constants = {
                keyword.arg: keyword.value.value
                for keyword in node.keywords
                if keyword.arg and isinstance(keyword.value, ast.Constant)
            }
            yield ast.unparse(node.func), constants


def problems(path: Path) -> list[str]:
    """Returns the calls of a file that can execute data."""
    found = []
    for name, keywords in calls(path):
        required = DANGEROUS.get(name)
        if required is not None and not (required and required.items() <= keywords.items()):
            found.append(name)
        found += [f"{name}({k}={v})" for k, v in FORBIDDEN.items() if keywords.get(k) is v]
    return found


def test_no_code_executes_data():
    for folder in ("pipeline", "jobs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            assert {p for p in problems(path) if (name, p) not in ALLOWED} == set(), name


def test_dangerous_calls_are_found(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "torch.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)"
    )
    assert problems(file) == ["torch.load", "np.load(allow_pickle=True)"]


def test_threat_model_names_existing_tests():
    text = (ROOT / "docs/reference/threat-model.md").read_text()
    rows = text.partition("## Threats")[2].partition("##")[0].strip().split("\n")[2:]
    for row in rows:
        path, name = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)[-1]
        assert f"def {name}(" in (ROOT / path).read_text(), row


def test_lock_file_has_the_requirements_of_the_package():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    packages = {package["name"]: package for package in lock["package"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = packages["maxray"]["metadata"]
    locked = {(r["name"], r.get("specifier", "")) for r in metadata["requires-dist"]}
    for requirement in project["dependencies"]:
        name, specifier = re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", requirement).groups()
        specifiers = {frozenset(s.split(",")) for n, s in locked if n == name.lower()}
        assert frozenset(specifier.split(",")) in specifiers, requirement
    assert set(metadata["provides-extras"]) == project["optional-dependencies"].keys()
    sources = {p["source"].get("registry") for p in lock["package"] if p["name"] != "maxray"}
    assert sources == {"https://pypi.org/simple"}
    urls = re.findall(r'url = "(https?://[^/]+)', (ROOT / "uv.lock").read_text())
    assert set(urls) == {"https://files.pythonhosted.org"}


def test_secrets_are_not_tracked():
    """Keys and tokens of a server or a cluster have names that are easy to find."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = re.compile(r"(^|/)(keys\.yaml|auth_token|\.env|.*\.pem)$")
    assert not [path for path in tracked if names.search(path)]
