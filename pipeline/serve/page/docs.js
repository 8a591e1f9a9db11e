/** Reference of the HTTP API, generated from the OpenAPI schema of the server. */

import { getJson } from "./api.js";
import { $, h, replace } from "./dom.js";

/** Returns the name of a type as nodes, with links to the types of the schema. */
export function typeName(schema = {}) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [h("a", { href: `#${name}` }, name)];
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.flatMap((option, i) => [i ? " or " : "", ...typeName(option)]);
  if (schema.allOf) return schema.allOf.flatMap(typeName);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["array of ", ...typeName(schema.items)];
  const values = schema.additionalProperties;
  if (values && values !== true) return ["object of ", ...typeName(values)];
  return [schema.type ?? "any"];
}

/** Returns a description with its code in back quotes as `code` elements. */
function described(text = "") {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

function field(name, schema, isRequired, description = schema.description) {
  const hasDefault = schema.default !== undefined && schema.default !== null;
  return [
    h("dt", {}, h("code", {}, name), " ", typeName(schema), isRequired ? ", required" : "",
      hasDefault ? `, default ${JSON.stringify(schema.default)}` : ""),
    h("dd", {}, described(description)),
  ];
}

function bodies(label, content = {}) {
  const types = Object.entries(content).map(([media, { schema }], i) => [
    i ? ", " : "", media, " ", schema && Object.keys(schema).length ? typeName(schema) : "",
  ]);
  return types.length ? h("p", {}, h("b", {}, `${label}: `), types) : null;
}

function route(method, path, operation) {
  const parameters = operation.parameters ?? [];
  return h(
    "section",
    {},
    h("h3", { id: operation.operationId }, `${method.toUpperCase()} ${path}`),
    h("p", {}, described(operation.description ?? operation.summary)),
    parameters.length
      ? h("dl", {}, parameters.map(({ name, schema, required, description }) =>
          field(name, schema, required, description)))
      : null,
    bodies("Request", operation.requestBody?.content),
    Object.entries(operation.responses).map(([status, { content }]) =>
      bodies(status === "default" ? "Error" : `Response ${status}`, content)),
  );
}

/** Returns the sections of a schema: its routes by tag, then its types. */
export function reference(schema) {
  const tags = new Map();
  for (const [path, operations] of Object.entries(schema.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      tags.set(tag, [...(tags.get(tag) ?? []), route(method, path, operation)]);
    }
  }
  const types = Object.entries(schema.components?.schemas ?? {}).map(([name, type]) =>
    h(
      "section",
      {},
      h("h3", { id: name }, name),
      h("p", {}, described(type.description), type.properties ? "" : typeName(type)),
      h("dl", {}, Object.entries(type.properties ?? {}).map(([key, value]) =>
        field(key, value, type.required?.includes(key)))),
    ),
  );
  return [
    h("h1", {}, `${schema.info.title} ${schema.info.version}`),
    h("p", {}, "With access keys, routes below /v1 require the header Authorization: Bearer KEY."),
    [...tags].map(([tag, routes]) => [h("h2", {}, tag), routes]),
    h("h2", {}, "Types"),
    types,
  ];
}

const main = $("reference");
if (main) {
  try {
    replace(main, reference(await getJson("openapi.json")));
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    replace(main, h("p.bad", {}, error.message));
  }
}
