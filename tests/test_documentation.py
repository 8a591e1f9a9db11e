"""The commands, specs, Python blocks and links of the documentation are valid."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml

from docs.extensions.parsers import PROFILES, SPECS, forms, parser
from jobs import is_spec
from pipeline import config
from pipeline.config import Spec
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS
from pipeline.serve import wire
from tests.documentation import (
    REQUIREMENTS,
    ROOT,
    Block,
    blocks,
    commands,
    inline_commands,
    pages,
)

PAGES = pages()
#: Programs that are not checked further.
PROGRAMS = {
    "cat",
    "cd",
    "cp",
    "docker",
    "echo",
    "export",
    "git",
    "helm",
    "install.sh",
    "kubectl",
    "mkdir",
    "pack.sh",
    "pip",
    "pre-commit",
    "sbatch",
    "sed",
    ".",
}
#: Packages that are run by `python -m` and whose arguments are checked.
PACKAGES = ("examples.papers", "tests.bench", "tests.chaos")
#: Languages of blocks that are not executed.
SHOWN = {"console", "http", "json", "mermaid", "text", "toml", "yaml"}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_placeholder(path: str) -> bool:
    """Tells `SPEC.yaml` and `FOLDER` from paths."""
    return Path(path).stem.isupper()


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def load(spec_class: type[Spec], path: str, overrides: list[str], files: Mapping[str, str]) -> None:
    """Loads a spec that the repository or an earlier block of the page has."""
    if is_placeholder(path):
        return
    if path in files:
        data = config.override(yaml.safe_load(files[path]), overrides)
        config.parse(spec_class, data)
    else:
        config.load(spec_class, path, overrides)


def check_job(words: list[str], files: Mapping[str, str]) -> None:
    """Checks the arguments of `maxray VERB`, or of a package."""
    size = 2 if {*words[1:2]} & {*forms(words[0])} else 1
    command, arguments = tuple(words[:size]), words[size:]
    parsed = vars(parser(command).parse_intermixed_args(arguments))
    name = " ".join(command)
    if parsed.get("resources") and name in PROFILES:
        load(PROFILES[name], parsed["resources"], [], files)
    if command == ("serve",):
        overrides = [word for word in parsed["indexes"] if "=" in word]
        data = {"indexes": {"photos": {"uri": "out/photos/index"}}, "keys": parsed["keys"] or ""}
        config.parse(SPECS["serve"], config.override(data, overrides))
    spec = parsed.get("table") if command[-1] == "binding" else parsed.get("spec")
    if spec and name in SPECS and (name != "index" or is_spec(spec)):
        overrides = [value for value in parsed.get("overrides", ()) if not is_placeholder(value)]
        load(SPECS[name], spec, overrides, files)


def check_request(words: list[str]) -> None:
    """Checks the body of a request to a server's search, which can also be a form."""
    if any(word.endswith("/v1/search") for word in words) and "-F" not in words:
        wire.SearchRequest.model_validate_json(words[words.index("-d") + 1])


def check_command(words: list[str], files: Mapping[str, str]) -> None:
    """Checks one command: its program exists, and its arguments are valid."""
    program, arguments = words[0], words[1:]
    if "--" in arguments and program == "ray":
        check_command(arguments[arguments.index("--") + 1 :], files)
    elif Path(program).name in ("python", "python3"):
        if arguments[:1] == ["-m"] and (found := re.match(r"jobs\.(\w+)$", arguments[1])):
            check_job([found[1], *arguments[2:]], files)
        elif arguments[:1] == ["-m"] and arguments[1] in PACKAGES:
            check_job(arguments[1:], files)
        elif arguments[:1] == ["-m"]:
            assert importlib.util.find_spec(arguments[1]), words
        else:
            assert (ROOT / arguments[0]).exists(), words
    elif program == "maxray":
        check_job(arguments, files)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= {*targets}, words
    elif program == "curl":
        check_request(words)
    elif program == "serve":
        assert (ROOT / arguments[1]).exists(), words
    elif program == "uv" and "python" in arguments:
        check_command(arguments[arguments.index("python") :], files)
    elif program not in ("pytest", "ray", "uv"):
        assert {program, Path(program).name} & PROGRAMS, f"add a check of {program!r}"


def check_python(block: Block) -> None:
    """Checks that a block compiles and that what it imports exists."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), block


def check_commands(found: Iterable[list[str]], files: Mapping[str, str], location: object) -> None:
    """Checks commands and reports the first that is invalid."""
    for words in found:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                check_command(words, files)
        except SystemExit:
            pytest.fail(f"{location}: {words}: {errors.getvalue()}")
        except Exception as error:
            pytest.fail(f"{location}: {words}: {error!r}")


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_blocks_are_valid(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    files: dict[str, str] = {}
    for block in blocks(path):
        assert set(block.requires) <= REQUIREMENTS.keys(), block
        if block.file_name:
            files[block.file_name] = block.text
            (tmp_path / block.file_name).write_text(block.text)
        if block.language == "bash":
            check_commands(commands(block.text), files, block)
        elif block.language == "python":
            is_optional = "packages" in block.requires
            with contextlib.suppress(ImportError) if is_optional else contextlib.nullcontext():
                check_python(block)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in SHOWN or block.language.startswith("{"), block
    check_commands(inline_commands(path), files, path.name)


@pytest.mark.parametrize(
    ("components", "page"),
    [
        (COMPRESSORS, "docs/concepts/compression.md"),
        (CODECS, "docs/concepts/compression.md"),
        (ENCODERS, "docs/reference/encoders.md"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_components_are_listed(components, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [name for name in components.names() if f"`{name}`" not in text] == []


def is_executed(block: Block) -> bool:
    """Returns whether the block is run, and not only checked."""
    is_code = block.language in ("bash", "python") and not block.file_name
    return is_code and not block.requires


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory of all pages, so that an index of one page is complete for the others."""
    path = tmp_path_factory.mktemp("documentation")
    for name in ("cluster", "examples", "jobs"):
        (path / name).symlink_to(ROOT / name)
    return path


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "path", [path for path in PAGES if any(map(is_executed, blocks(path)))], ids=page_id
)
def test_blocks_run_in_order(path, folder):
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT)}
    for block in blocks(path):
        if block.file_name:
            (folder / block.file_name).write_text(block.text)
        if is_executed(block):
            shell = ["bash", "-euo", "pipefail", "-c"]
            done = subprocess.run(
                [*(shell if block.language == "bash" else [sys.executable, "-c"]), block.text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_to_files(path):
    """Sphinx checks the links and the anchors between the pages of `docs`."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_every_shipped_spec_is_in_the_index_of_specs():
    folder = ROOT / "jobs/specs"
    text = (folder / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/.-]+\.yaml)\)", text))
    assert linked == {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}


def test_pages_that_the_code_names_exist():
    """Docstrings, comments and specs name pages by their path from the root."""
    found = subprocess.run(
        ["git", "grep", "-hoE", r"docs/[a-z/-]+\.md", "--", "*.py", "*.yaml", "*.cff", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in set(found.stdout.split()):
        assert (ROOT / name).exists(), name


def test_generated_reference():
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    from docs.extensions import http, specs

    assert not doctest.testmod(specs).failed and not doctest.testmod(http).failed
    classes = {*SPECS.values(), *PROFILES.values()}
    for components in specs.COMPONENTS.values():
        classes |= {components.spec_class(name) for name in components.names()}
    classes |= {inner for spec_class in classes for inner in specs.nested(spec_class)}
    missing = [
        f"{spec_class.__qualname__}.{name}"
        for spec_class in classes
        for name in spec_class.model_fields
        if name != "name" and not specs.description(spec_class, name)
    ]
    assert not missing
