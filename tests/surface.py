"""Counts of what a reader has to hold in the head: lines, concepts, options.

python -m tests.surface             # prints the counts
python -m tests.surface --longest   # also the ten longest files and functions
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from docs.extensions.parsers import commands, parser
from pipeline import registry
from pipeline.registry import Registry
from tests.architecture import PIPELINE, ROOT, modules, syntax
from tests.bench.__main__ import BENCHES

#: Folders whose code ships in the wheel.
SHIPPED = ("pipeline", "jobs")
#: Folders of code outside the wheel that are not unit tests.
UNSHIPPED = ("examples", "tests/bench", "tests/chaos", "tests/tiny")
#: Calls that compose messages for users.
MESSAGES = {"SpecError", "MissingField", "UnknownField", "UsageError"}
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


def files(*folders: str) -> list[Path]:
    """Returns the Python files below folders except for tests, in order."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if not path.name.startswith("test_"))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as docstring):
                    yield docstring


@functools.cache
def line_counts(path: Path) -> tuple[int, int]:
    """Returns the number of lines of code (no blanks, comments, docstrings) and of docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = {
        line
        for node in docstrings(syntax(path))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - documented), len(documented)


def total_lines(*folders: str) -> tuple[int, int]:
    """Returns the sums of `line_counts` over the files below folders."""
    counts = [line_counts(path) for path in files(*folders)]
    return sum(code for code, _ in counts), sum(text for _, text in counts)


def registries() -> list[Registry]:
    """Returns the registries of components."""
    return [value for value in vars(registry).values() if isinstance(value, Registry)]


def fields() -> tuple[int, int]:
    """Returns the number of fields of the classes of specs, and of those of HTTP bodies."""
    for path in files(*SHIPPED):
        # Triton and the frameworks of retrievers may not be installed.
        if path.stem != "triton_kernels" and path.parent.name != "retrievers":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    counts: Counter[bool] = Counter()
    pending, seen = [BaseModel], set[type]()
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                pending.append(kind)
                if kind.__module__.split(".")[0] in SHIPPED and "[" not in kind.__name__:
                    declared = set(inspect.get_annotations(kind)) & set(kind.model_fields)
                    counts[kind.__module__.startswith("pipeline.serve")] += len(declared)
    return counts[False], counts[True]


def errors() -> tuple[int, int]:
    """Returns the number of places that compose an error for users, and their lines."""
    found = [
        node.end_lineno - node.lineno + 1
        for path in files(*SHIPPED)
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.Call) and node.end_lineno is not None
        for name in [node.func.id if isinstance(node.func, ast.Name) else ""]
        if name in MESSAGES
    ]
    return len(found), sum(found)


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number of lines and the name of each function of a file."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield length, f"{path.relative_to(ROOT)}:{node.name}"


def counts() -> dict[str, int]:
    """Returns the counts by what they count, in the order in which they are printed."""
    code, text = total_lines(*SHIPPED)
    spec_fields, http_fields = fields()
    error_places, error_lines = errors()
    importers = Counter(name for others in modules().values() for name in others)
    packages = [path for path in PIPELINE.iterdir() if (path / "__init__.py").is_file()]
    options = [o for command in commands() for o in parser(command)._actions if o.option_strings]
    jobs = ROOT / "jobs"
    verbs = [*jobs.glob("[!_]*.py"), *jobs.glob("*/__main__.py")]
    specs = list((jobs / "specs").rglob("*.yaml"))
    return {
        "lines of code in pipeline/ and jobs/": code,
        "lines of code outside unit tests": code + total_lines(*UNSHIPPED)[0],
        "lines of docstrings in pipeline/ and jobs/": text,
        "packages of pipeline/": len(packages),
        "root modules of pipeline/": len(list(PIPELINE.glob("[!_]*.py"))),
        "registries": len(registries()),
        "registry entries": sum(len(each.names()) for each in registries()),
        "verbs": len(verbs),
        "flags of verbs": sum("--help" not in option.option_strings for option in options),
        "benches": len(BENCHES),
        "spec fields": spec_fields,
        "HTTP fields": http_fields,
        "shipped specs": len(specs),
        "modules with one importer": sum(number == 1 for number in importers.values()),
        "places that compose errors": error_places,
        "lines that compose errors": error_lines,
        "lines of code of the longest file": max(line_counts(p)[0] for p in files(*SHIPPED)),
        "lines of the longest function": max(n for p in files(*SHIPPED) for n, _ in functions(p)),
    }


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--longest", action="store_true", help="print the longest files and functions"
    )
    args = parser.parse_args()
    for name, number in counts().items():
        print(f"{number:8,}  {name}")
    if args.longest:
        paths = files(*SHIPPED)
        longest = sorted(
            ((line_counts(p)[0], str(p.relative_to(ROOT))) for p in paths), reverse=True
        )
        print("\nlongest files, in lines of code")
        print("".join(f"{number:8,}  {name}\n" for number, name in longest[:10]))
        print("longest functions, in lines")
        found = sorted((f for path in paths for f in functions(path)), reverse=True)
        print("".join(f"{number:8,}  {name}\n" for number, name in found[:10]), end="")


if __name__ == "__main__":
    main()
