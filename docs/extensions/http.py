"""The directive `http-reference`: routes and types, read from the server's OpenAPI schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pipeline.serve.api import create_app
from pipeline.serve.gateway import Gateway

Schema = dict[str, Any]


async def _no_gateway() -> Gateway:
    raise RuntimeError("the application is only inspected")


def type_name(schema: Schema) -> str:
    """Returns the type of a JSON schema in short.

    >>> type_name({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
    'array[string] | null'
    """
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    for combined in ("anyOf", "oneOf", "allOf"):
        if combined in schema:
            return " | ".join(dict.fromkeys(map(type_name, schema[combined])))
    if "prefixItems" in schema:
        return f"array[{', '.join(map(type_name, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        return f"array[{type_name(schema.get('items', {}))}]"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object[{type_name(schema['additionalProperties'])}]"
    return schema.get("type", "any")


def _entry(name: str, schema: Schema, required: bool) -> str:
    default = "" if required or "default" not in schema else json.dumps(schema["default"])
    facts = [f"`{type_name(schema)}`"]
    facts += ["required"] if required else [f"default: `{default}`"] if default else []
    text = " ".join(schema.get("description", "").split())
    return f"`{name}` ({'; '.join(facts)})" + (f"\n: {text}" if text else "\n: —")


def _content(described: Schema) -> str:
    """Returns the types of a body, with a link to each that is described below."""
    content = described.get("content", {})
    names = [
        type_name(body["schema"]) if body.get("schema") else kind for kind, body in content.items()
    ]
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _route(method: str, path: str, route: Schema) -> Iterator[str]:
    yield f"### {method.upper()} {path}"
    yield route.get("description") or route["summary"]
    for parameter in route.get("parameters", ()):
        described = {**parameter["schema"], "description": parameter.get("description", "")}
        yield _entry(parameter["name"], described, parameter.get("required", False))
    if request := _content(route.get("requestBody", {})):
        yield f"Request body: {request}"
    for status, response in route["responses"].items():
        if status != "default" and (body := _content(response)):
            yield f"Response {status}: {body}"


def reference() -> Iterator[str]:
    """Yields the paragraphs of the reference, in Markdown."""
    schema = create_app(_no_gateway).openapi()
    tags: dict[str, list[str]] = {}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            tags.setdefault(route.get("tags", ["other"])[0], []).extend(_route(method, path, route))
    for tag, parts in tags.items():
        yield f"## Routes: {tag}"
        yield from parts
    yield "## Types"
    for name, described in schema["components"]["schemas"].items():
        yield f"### {name}"
        if text := described.get("description"):
            yield text.partition("\n\n")[0]
        required = described.get("required", ())
        for field, inner in described.get("properties", {}).items():
            yield _entry(field, inner, field in required)


class HttpReference(SphinxDirective):
    """Documents the routes of the server and the types of their bodies."""

    def run(self) -> list:
        """Returns the nodes of the reference."""
        return self.parse_text_to_nodes("\n\n".join(reference()), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("http-reference", HttpReference)
    return {"parallel_read_safe": True}
