"""The import graph of `pipeline`, and its diagram in docs/architecture.md.

python -m tests.architecture        # writes the diagram after an import has changed
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = ROOT / "pipeline"
DOCUMENT = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- diagram: begin -->\n", "<!-- diagram: end -->\n"


def part(path: Path) -> str:
    """Returns the name of the package or module directly below `pipeline` that holds a file."""
    return path.relative_to(PIPELINE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yields the names of the modules that a file imports, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path == PIPELINE / "registry.py":  # it names the types of what it imports only when used
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module != "pipeline":
                yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def packages() -> dict[str, set[str]]:
    """Returns for each package of `pipeline` the packages that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PIPELINE.glob("*/**/*.py")):
        named = {module.split(".")[1] for module in imports(path) if module.startswith("pipeline.")}
        graph.setdefault(part(path), set()).update(named - {part(path)})
    return {name: others & graph.keys() for name, others in graph.items()}


def modules() -> dict[str, set[str]]:
    """Returns for each module of `pipeline` and `jobs` the modules that it imports."""
    paths = [path for folder in ("pipeline", "jobs") for path in (ROOT / folder).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    known = set(names.values())
    return {name: (set(imports(path)) & known) - {name} for path, name in names.items()}


def without_detours(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns an acyclic graph without the edges that a longer path implies.

    >>> without_detours({"c": {"a", "b"}, "b": {"a"}, "a": set()})
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
    for name, others in sorted(without_detours(packages()).items()):
        lines += [f"    {name} --> {other}" for other in sorted(others)]
    return "\n".join([*lines, "```", ""])


def documented() -> tuple[str, str, str]:
    """Returns the text of docs/architecture.md before, in and after its diagram."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    current, after = rest.split(END)
    return before + BEGIN, current, END + after


if __name__ == "__main__":
    before, _, after = documented()
    DOCUMENT.write_text(before + diagram() + after, encoding="utf-8")
