"""Import graph of `pipeline` and its diagram in docs/architecture.md.

python -m tests.architecture        # updates the diagram
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = ROOT / "pipeline"
DOCUMENT = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- diagram: begin -->\n", "<!-- diagram: end -->\n"


def part(path: Path) -> str:
    """Returns the package or module directly below `pipeline` that contains a file."""
    return path.relative_to(PIPELINE).parts[0].removesuffix(".py")


@functools.cache
def syntax(path: Path) -> ast.Module:
    """Returns the syntax tree of a file, which is parsed once per process."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns the modules that a file imports, including imports inside functions."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    tree = syntax(path)
    if path == PIPELINE / "registry.py":  # skips TYPE_CHECKING imports
        tree = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module != "pipeline":
                yield node.module
            names = (alias.name for alias in node.names if not alias.name.startswith("__"))
            yield from (f"{node.module}.{name}" for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def packages() -> dict[str, set[str]]:
    """Returns the imported packages of each package of `pipeline`."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PIPELINE.glob("*/**/*.py")):
        imported = {
            module.split(".")[1] for module in imports(path) if module.startswith("pipeline.")
        }
        graph.setdefault(part(path), set()).update(imported - {part(path)})
    return {name: others & graph.keys() for name, others in graph.items()}


def modules() -> dict[str, set[str]]:
    """Returns the imported modules of each module of `pipeline` and `jobs`."""
    paths = [path for folder in ("pipeline", "jobs") for path in (ROOT / folder).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    known = set(names.values())
    return {name: (set(imports(path)) & known) - {name} for path, name in names.items()}


def transitive_reduction(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Removes the edges of an acyclic graph that are implied by longer paths.

    >>> transitive_reduction({"c": {"a", "b"}, "b": {"a"}, "a": set()})
    {'c': {'b'}, 'b': {'a'}, 'a': set()}
    """

    def reachable(name: str) -> set[str]:
        return graph[name].union(*(reachable(other) for other in graph[name]))

    return {
        name: others - set().union(*(reachable(other) for other in others))
        for name, others in graph.items()
    }


def diagram() -> str:
    """Returns the import graph of the packages as a Mermaid flowchart; arrows mean "imports"."""
    lines = ["```mermaid", "flowchart TD"]
    for name, others in sorted(transitive_reduction(packages()).items()):
        lines += [f"    {name} --> {other}" for other in sorted(others)]
    return "\n".join([*lines, "```", ""])


def documented() -> tuple[str, str, str]:
    """Returns the text of docs/architecture.md before, in and after the diagram."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    current, after = rest.split(END)
    return before + BEGIN, current, END + after


if __name__ == "__main__":
    before, _, after = documented()
    DOCUMENT.write_text(before + diagram() + after, encoding="utf-8")
