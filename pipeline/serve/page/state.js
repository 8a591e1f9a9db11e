/** State of the page in the query string of its URL, and the search requests that it describes. */

/** Fields of the view of evaluations: the evaluation, the shown measure and the compared rows. */
export const EVALUATION = Object.freeze({ evaluation: "", measure: "", from: "", to: "" });

/** Fields of the state with their defaults, in the order in which they appear in the URL. */
export const DEFAULTS = Object.freeze({
  view: "search",
  index: "",
  q: "",
  item: "",
  box: "",
  times: "",
  rep: "",
  rerank: "",
  rep2: "",
  rerank2: "",
  score: "maxsim",
  score2: "",
  candidates: "",
  depth: "",
  k: "10",
  group: "",
  negative: "",
  filter: "",
  area: "",
  sort: "",
  layout: "",
  open: "",
  ...EVALUATION,
});

const VIEWS = ["search", "compare", "map", "evaluations"];

/** Parses a query string. Unknown fields are ignored, missing ones have their default. */
export function parseState(search) {
  const parameters = new URLSearchParams(search);
  const state = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    if (parameters.has(name)) state[name] = parameters.get(name);
  }
  if (!VIEWS.includes(state.view)) state.view = DEFAULTS.view;
  return state;
}

/** Returns the query string of a state, without the fields that have their default. */
export function formatState(state) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const given = state[name] ?? value;
    if (String(given) !== value) parameters.set(name, given);
  }
  const text = parameters.toString();
  return text ? `?${text}` : "";
}

/** Parses "a,b,..." into numbers, or returns null unless there are `count` finite ones. */
function parseNumbers(text, count) {
  if (!text) return null;
  const numbers = text.split(",").map(Number);
  return numbers.length === count && numbers.every(Number.isFinite) ? numbers : null;
}

/** Checks whether a state describes a query. */
export function hasQuery(state, attachment) {
  return Boolean(state.q.trim() || state.item || attachment);
}

/** Returns the query of a search request: a text, an attachment, both, or an item of the index. */
function queryOf(state, attachment) {
  if (state.item) {
    const query = { item: state.item };
    const box = parseNumbers(state.box, 4);
    const times = parseNumbers(state.times, 2);
    if (box) query.box = box;
    if (times) query.times = times;
    return query;
  }
  const text = state.q.trim();
  if (attachment) return text ? { text, ...attachment } : attachment;
  return text;
}

/**
 * Returns the body of a search request.
 *
 * @param {object} state State of the page, with the `ids` of the items in `area`.
 * @param {object|null} attachment Image, audio or video of the query in base64, by its kind.
 * @param {"a"|"b"} side Column of a comparison. The second has its own representation, reranking and
 *   score. Its score is that of the first unless it is given.
 */
export function searchBody(state, attachment = null, side = "a") {
  const body = { query: queryOf(state, attachment) };
  if (state.index) body.index = state.index;
  const representation = side === "b" ? state.rep2 : state.rep;
  if (representation) body.representation = representation;
  // A search by an item returns the item itself, which is not shown.
  const k = asNumber(state.k.trim() || DEFAULTS.k);
  body.k = state.item && Number.isInteger(k) ? k + 1 : k;
  const score = (side === "b" && state.score2) || state.score;
  if (score !== DEFAULTS.score) body.score = score;
  if (state.candidates) body.candidates = state.candidates;
  if (state.group) body.group_by = state.group;
  if (state.negative.trim()) body.negative = state.negative.trim();
  if (state.filter.trim()) body.filter = state.filter.trim();
  if (state.ids) body.ids = state.ids;
  const rerank = side === "b" ? state.rerank2 : state.rerank;
  if (rerank) {
    const [name, representation] = splitOnce(rerank, ":");
    // If a model fails, the page shows the hits without it, and the reason.
    body.rerank = name === "vectors" ? { name } : { name, optional: true };
    if (representation) body.rerank.representation = representation;
    if (state.depth) body.rerank.top = asNumber(state.depth);
  }
  return body;
}

/** Returns the body of a search of a federation: its members set the representations and scores. */
export function federatedBody({ query, index, k, filter, ids, rerank, group_by: group }) {
  const body = { query, index, k, filter, ids, rerank, explain: "matches" };
  return group ? { ...body, join: group } : body;
}

/** Converts the text of a field to a number, or returns it unchanged for the error of the API. */
function asNumber(text) {
  return /^-?\d+(\.\d+)?$/.test(text) ? Number(text) : text;
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + separator.length)];
}

/** Returns a string literal for a filter. */
function quote(text) {
  return `'${text.replaceAll("'", "''")}'`;
}

/** Returns the condition of a facet for its selected values, or "" without any. */
function condition(column, values) {
  if (!values.length) return "";
  if (values.length === 1) return `${column} = ${quote(values[0])}`;
  return `${column} IN (${values.map(quote).join(", ")})`;
}

/** Returns the filter of selected facet values by column. */
export function facetFilter(selected) {
  const parts = Object.entries(selected).map(([column, values]) => condition(column, values));
  return parts.filter(Boolean).join(" AND ");
}

/**
 * Returns the facet values that a filter selects by column, or null if the filter contains anything
 * else, because it was edited. White space and the case of keywords may differ from `facetFilter`.
 */
export function parseFacetFilter(filter, columns) {
  const selected = Object.fromEntries(columns.map((column) => [column, []]));
  const text = filter.trim();
  if (!text) return selected;
  const literal = "'(?:[^']|'')*'";
  const list = `\\(\\s*(${literal}(?:\\s*,\\s*${literal})*)\\s*\\)`;
  const part = new RegExp(`^(\\w+)\\s*(?:=\\s*(${literal})|\\bin\\s*${list})`, "i");
  let rest = text;
  for (;;) {
    const found = part.exec(rest);
    if (!found || !columns.includes(found[1]) || selected[found[1]].length) return null;
    const values = (found[2] ?? found[3]).match(new RegExp(literal, "g"));
    selected[found[1]] = values.map((value) => value.slice(1, -1).replaceAll("''", "'"));
    rest = rest.slice(found[0].length);
    if (!rest) return selected;
    const and = /^\s*and\s+/i.exec(rest);
    if (!and) return null;
    rest = rest.slice(and[0].length);
  }
}
