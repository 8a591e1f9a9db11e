"""The directive `spec-reference`: the fields of specs, read from their pydantic classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs.extensions.parsers import PROFILES, SPECS
from pipeline import registry
from pipeline.config import ComponentSpec, Spec

#: Registered components by the heading of their group.
COMPONENTS: dict[str, registry.Registry[Any]] = {
    "sources": registry.SOURCES,
    "encoders": registry.ENCODERS,
    "ocr": registry.OCR,
    "speech": registry.SPEECH,
    "compressors": registry.COMPRESSORS,
    "codecs": registry.CODECS,
    "candidates": registry.CANDIDATES,
    "rerankers": registry.RERANKERS,
    "benchmarks": registry.BENCHMARKS,
    "learners": registry.LEARNERS,
    "training data": registry.TRAINING_DATA,
}


def description(spec_class: type[Spec], name: str) -> str:
    """Returns the documentation of a field; an overridden field inherits that of its parent."""
    for parent in spec_class.__mro__:
        field = getattr(parent, "model_fields", {}).get(name)
        if field is not None and field.description:
            return field.description
    return ""


def type_name(annotation: Any) -> str:
    """Returns a short form of a field's type.

    >>> type_name(int | None), type_name(tuple[str, ...])
    ('int | null', 'list[str]')
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return type_name(arguments[0])
    if annotation is type(None):
        return "null"
    if str(origin) == "typing.Literal":
        return " | ".join(repr(value) for value in arguments)
    if origin is not None and str(origin) in ("typing.Union", "<class 'types.UnionType'>"):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin in (list, tuple):
        inner = [type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list[{', '.join(inner)}]"
    if origin is not None:
        outer = {"Mapping": "dict"}.get(origin.__name__, origin.__name__)
        return f"{outer}[{', '.join(type_name(argument) for argument in arguments)}]"
    if annotation is Any:
        return "any"
    if annotation in (Spec, ComponentSpec):  # `registry` has the one at run time for the other
        return "component"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, ComponentSpec):
        value = value.name
    if isinstance(value, Spec):
        return "default: its defaults"
    text = "null" if value is None else repr(list(value) if isinstance(value, tuple) else value)
    return f"default: `{text.lower() if isinstance(value, bool) else text}`"


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yields the metadata in a type, such as those of `Annotated[int, Ge(1)] | None`."""
    for found in getattr(annotation, "__metadata__", ()):
        yield from found.metadata if isinstance(found, FieldInfo) else [found]
    for argument in get_args(annotation):
        yield from _metadata(argument)


def _constraints(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
    found = [
        f"{sign} {getattr(constraint, name):,}"
        for constraint in [*field.metadata, *_metadata(field.annotation)]
        for name, sign in signs.items()
        if getattr(constraint, name, None) is not None
    ]
    return ", ".join(dict.fromkeys(found))


def fields(spec_class: type[Spec]) -> Iterator[str]:
    """Yields each field of a spec as an entry of a Markdown definition list."""
    for name, field in spec_class.model_fields.items():
        if name == "name" and issubclass(spec_class, ComponentSpec) and not field.is_required():
            continue
        facts = [f"`{type_name(field.annotation)}`", _default(field), _constraints(field)]
        text = " ".join(description(spec_class, name).split())
        yield f"`{name}` ({'; '.join(fact for fact in facts if fact)})\n: {text or '—'}"


def nested(spec_class: type[Spec]) -> Iterator[type[Spec]]:
    """Yields the classes of specs that the fields of a spec hold, components aside."""

    def classes(annotation: Any) -> Iterator[type[Spec]]:
        is_class = inspect.isclass(annotation) and get_origin(annotation) is None
        if is_class and issubclass(annotation, Spec) and annotation not in (Spec, ComponentSpec):
            yield annotation
        for argument in get_args(annotation):
            yield from classes(argument)

    for field in spec_class.model_fields.values():
        for found in classes(field.annotation):
            yield found
            yield from nested(found)


def _summary(documented: type) -> str:
    text = (inspect.getdoc(documented) or "").partition("\n\n")[0]
    return " ".join(text.split())


def _jobs() -> Iterator[str]:
    seen: set[type[Spec]] = set()
    for title, classes in (("Specs of commands", SPECS), ("Resources profiles", PROFILES)):
        yield f"## {title}"
        for spec_class in dict.fromkeys(classes.values()):
            commands = [command for command in classes if classes[command] is spec_class]
            yield f"### {', '.join(commands)}: {spec_class.__name__}"
            yield _summary(spec_class)
            yield from fields(spec_class)
            for inner in nested(spec_class):
                if inner not in seen:
                    seen.add(inner)
                    yield f"#### {inner.__name__}"
                    yield _summary(inner)
                    yield from fields(inner)


def _components(title: str) -> Iterator[str]:
    components = COMPONENTS[title]
    for name in components.names():
        component = components.load(name)
        yield f"## {name}"
        yield _summary(component)
        yield from fields(components.spec_class(name))


class SpecReference(SphinxDirective):
    """Documents the specs of commands, or with an argument a group of components."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list:
        """Returns the nodes of the reference."""
        parts = _components(self.arguments[0]) if self.arguments else _jobs()
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("spec-reference", SpecReference)
    return {"parallel_read_safe": True}
