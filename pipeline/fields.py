"""Names of the fields of specs, read from the source code of this package without importing it.

Importing an encoder imports torch and transformers, which takes seconds.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


def field_names(component: str) -> list[str]:
    """Returns the names of the fields of a component's spec.

    Args:
        component: Import path of the component in the form `module:Class`.

    Raises:
        LookupError: The definition of the spec cannot be found.
        OSError: The component belongs to another package.

    >>> field_names("pipeline.compression.random:Random")
    ['name', 'num_vectors', 'ratio', 'rounding', 'seed']
    """
    module, _, name = component.partition(":")
    fields = (
        ast.unparse(assignment.target)
        for assignment in _assignments(module, f"{name}.Spec")
        if "ClassVar" not in ast.unparse(assignment.annotation)
    )
    return list(dict.fromkeys(fields))  # a subclass may define a field again


def _assignments(module: str, name: str) -> Iterator[ast.AnnAssign]:
    """Yields the annotated assignments of a spec class, after those of its base classes."""
    module, definition = _definition(module, name)
    if (module, definition.name) != ("pipeline.config", "Spec"):
        for base in reversed(definition.bases):
            yield from _assignments(module, ast.unparse(base))
        yield from (node for node in definition.body if isinstance(node, ast.AnnAssign))


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Finds a class, `Class`, `Class.Spec` or `module.Class`, and the module that defines it."""
    head, _, rest = name.partition(".")
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and any(head == alias.name for alias in node.names):
            is_module = head.islower()
            source = f"{node.module}.{head}" if is_module else str(node.module)
            return _definition(source, rest if is_module else name)
        if isinstance(node, ast.ClassDef) and node.name == head:
            for inner in [node] if not rest else node.body:
                if isinstance(inner, ast.ClassDef) and inner.name == (rest or head):
                    return module, inner
                if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == rest:
                    return _definition(module, ast.unparse(inner.value))  # `Spec = OtherSpec`
    raise LookupError(f"{module}:{name}")


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")).body
