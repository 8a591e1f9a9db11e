"""Public names: routes and types of the HTTP API, commands, spec fields and the Python API."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from docs.extensions import http, parsers, specs
from pipeline.serve.api import create_app
from tests.conftest import ROOT

#: Limits of a JSON schema.
LIMITS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
)
DIRECTIVE = re.compile(r"^\.\. auto(class|function|exception|module):: (\S+)$", re.MULTILINE)


def surface() -> dict[str, Any]:
    """Returns all public names with their types, defaults and help texts, sorted."""
    return {
        "http": dict(sorted(routes_and_types())),
        "commands": dict(sorted(command_options())),
        "specs": dict(sorted(spec_fields())),
        "python": dict(sorted(python_names())),
    }


def routes_and_types() -> Iterator[tuple[str, str]]:
    """Yields the parameters, bodies and responses of each route, and the fields of each type."""
    schema = create_app(http._no_gateway).openapi()

    def fact(described: dict[str, Any], required: bool) -> str:
        default = "required" if required else f"default {json.dumps(described.get('default'))}"
        kinds = [described, *described.get("anyOf", ())]
        limits = {f"{k} {v}": None for kind in kinds for k, v in kind.items() if k in LIMITS}
        return "; ".join([http.type_name(described), default, *limits])

    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            name = f"{method.upper()} {path}"
            yield name, route["summary"]
            yield f"{name} request", http._content(route.get("requestBody", {}))
            for parameter in route.get("parameters", ()):
                described = fact(parameter["schema"], parameter.get("required", False))
                yield f"{name} {parameter['in']} {parameter['name']}", described
            for status, response in route["responses"].items():
                yield f"{name} response {status}", http._content(response)
    for name, described in schema["components"]["schemas"].items():
        for field, inner in described.get("properties", {}).items():
            yield f"{name}.{field}", fact(inner, field in described.get("required", ()))


def command_options() -> Iterator[tuple[str, str]]:
    """Yields the help text of each command, and the help and default of each of its options."""
    for command in parsers.commands():
        parser, name = parsers.parser(command), " ".join(command)
        yield name, parser.description or ""
        for action in parser._actions:
            names = ", ".join(action.option_strings) or action.dest
            kind = action.metavar or ("flag" if action.nargs == 0 else "value")
            kind = kind if action.choices is None else list(action.choices)
            yield f"{name} {names}", f"{kind}; default {action.default!r}; {action.help}"


def spec_fields() -> Iterator[tuple[str, str]]:
    """Yields the type, the default and the limits of each field of all specs."""
    owners = {found.__name__: found for found in (*specs.SPECS.values(), *specs.PROFILES.values())}
    for kind, registry in specs.COMPONENTS.items():
        owners |= {f"{kind}.{name}": registry.spec_class(name) for name in registry.names()}
    classes = dict(owners)
    for owner, spec_class in owners.items():
        for inner in specs.nested(spec_class):
            if classes.setdefault(inner.__qualname__, inner) is not inner:
                classes[f"{owner} {inner.__qualname__}"] = inner
    for name, spec_class in classes.items():
        for line in specs.fields(spec_class):
            field, _, facts = line.partition("\n")[0].partition(" ")
            yield f"{name}.{field.strip('`')}", facts


def python_names() -> Iterator[tuple[str, str]]:
    """Yields the signatures of all names in the reference of the Python API."""
    for page in sorted((ROOT / "docs/reference/api").glob("*.md")):
        for kind, path in DIRECTIVE.findall(page.read_text("utf-8")):
            if kind == "module":
                module = importlib.import_module(path)
                found = vars(module).items()
                names = {n: v for n, v in found if getattr(v, "__module__", None) == path}
                for name, value in names.items():
                    if not name.startswith("_"):
                        yield from members(f"{path}.{name}", value)
            else:
                module, _, name = path.rpartition(".")
                yield from members(path, getattr(importlib.import_module(module), name))


def members(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the signature of a function, or of a class and its public members."""
    yield path, signature(value)
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and (inspect.isfunction(function) or hasattr(member, "fget")):
            yield f"{path}.{name}", signature(function)


def signature(value: Any) -> str:
    """Returns the parameters of a callable, otherwise the name of its type."""
    try:
        return re.sub(r" at 0x\w+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__
