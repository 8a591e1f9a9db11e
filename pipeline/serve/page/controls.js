/** The form: representations, scores, filters and the errors of the API at their fields. */

import { $, h, replace } from "./dom.js";
import { DEFAULTS, facetFilter, parseFacetFilter } from "./state.js";
import { count } from "./text.js";

const SCORES = {
  maxsim: "MaxSim",
  single_vector: "single vector",
  hybrid: "hybrid",
  fused: "fused (with BM25)",
};
/** Plain words for the values of selects. */
/** Media types of the files that a query can have, by kind of query. */
const ACCEPTED = { image: "image/png,image/jpeg,image/webp", audio: "audio/*", video: "video/*" };
/** Labels of searches that combine representations, by the other field. */
const COMBINED = { caption: "contents and captions", image: "texts and images" };
const CANDIDATES = { exact: "all items", single: "best single vectors", bm25: "best by BM25" };
const EDITED_FILTER =
  "The filter has conditions that these buttons cannot show. Clear it to use them.";
/** Controls of the fields of a request, as named in the errors of the API. */
const FIELDS = {
  index: "index",
  query: "q",
  negative: "negative",
  representation: "rep",
  score: "score",
  weights: "score",
  fusion: "score",
  candidates: "candidates",
  num_candidates: "candidates",
  k: "k",
  group_by: "group",
  filter: "filter",
  "rerank.top": "depth",
  rerank: "rerank",
};
/** Fields whose control has a label with the same meaning. */
const LABELLED = new Set([
  "query",
  "representation",
  "score",
  "candidates",
  "k",
  "group_by",
  "filter",
  "rerank.top",
]);
/** Fields of the state that are set by a control of the same id. */
export const CONTROLS = [
  "index",
  "rep",
  "rerank",
  "score",
  "rep2",
  "rerank2",
  "score2",
  "candidates",
  "depth",
  "k",
  "group",
  "negative",
  "filter",
];

/** Controls that each side of a comparison has. Those of the right side have the suffix 2. */
const SIDE_CONTROLS = ["rep", "rerank", "score"];

/** Returns the id of the control of a field of a request, or null. */
function controlOf(field, side = "a") {
  if (!field) return null;
  const names = Object.keys(FIELDS).filter((name) => field === name || field.startsWith(`${name}.`));
  const name = names.sort((a, b) => b.length - a.length)[0];
  const id = FIELDS[name] ?? null;
  return side === "b" && SIDE_CONTROLS.includes(id) ? `${id}2` : id;
}

/** Shows an error of the API at its field. Returns false if no control shows the field. */
export function showFieldError(error, side) {
  const id = controlOf(error.field, side);
  const control = id && $(id);
  const message = id && $(`${id}-error`);
  if (!control || !message) return false;
  control.setAttribute("aria-invalid", "true");
  message.textContent = withLabel(error, id);
  message.hidden = false;
  if (id !== "q") $("options").open = true;
  return true;
}

/** Returns the message of an error, with the label of the control in place of the field. */
function withLabel(error, id) {
  const label = document.querySelector(`label[for="${id}"]`)?.textContent;
  // Some controls set several fields, which their labels would not distinguish.
  if (!label || !LABELLED.has(error.field)) return error.message;
  if (!error.message.startsWith(`${error.field} `)) return error.message;
  return label + error.message.slice(error.field.length);
}

export function clearErrors() {
  for (const message of document.querySelectorAll(".field-error")) {
    message.hidden = true;
    message.textContent = "";
  }
  for (const control of document.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
  }
}

/** Fills the controls with the values of a state and the options of its index. */
export function fillControls(state, indexes, facets) {
  const info = indexInfo(state, indexes);
  setOptions($("index"), indexes.map(({ name }) => [name, name]), info?.name ?? state.index);
  const names = [...representationLabels(info, facets)];
  const reranking = [["", "no reranking"]];
  reranking.push(...names.map(([name, label]) => [`vectors:${name}`, `MaxSim of ${label}`]));
  reranking.push(...(info?.rerankers ?? []).map((name) => [name, name]));
  const all = combined({ ...DEFAULTS, view: state.view }, info);
  for (const [side, suffix] of [["a", ""], ["b", "2"]]) {
    const isBoth = side === "a" && combined(state, info) !== null;
    const name = isBoth ? "" : state[`rep${suffix}`] || info?.default_representation || "";
    const options = all && side === "a" ? [["", combinedLabel(all)], ...names] : names;
    setOptions($(`rep${suffix}`), options, name);
    setOptions($(`rerank${suffix}`), reranking, state[`rerank${suffix}`]);
    const scores = currentRepresentation(state, info, side)?.scores ?? ["maxsim"];
    const labels = scores.map((score) => [score, scoreLabel(score)]);
    if (side === "b") labels.unshift(["", "as on the left"]);
    setOptions($(`score${suffix}`), labels, state[`score${suffix}`]);
  }
  const representation = currentRepresentation(state, info);
  const generators = representation?.candidates ?? [];
  const chosen = representation?.default_candidates ?? "exact";
  const generatorLabel = (name) => CANDIDATES[name] ?? name;
  setOptions(
    $("candidates"),
    [
      ["", `default (${generatorLabel(chosen)})`],
      ...generators.map((name) => [name, generatorLabel(name)]),
    ],
    state.candidates,
  );
  for (const name of MEMBER_CONTROLS) $(name).disabled = Boolean(info?.members);
  $("k").value = state.k;
  $("depth").value = state.depth;
  $("group").value = state.group;
  $("negative").value = state.negative;
  $("filter").value = state.filter;
  $("q").value = state.q;
  const kinds = queryKinds(state, info);
  const files = ["image", "audio", "video"].filter((kind) => kinds.has(kind));
  $("image-button").hidden = !files.length;
  $("image-file").accept = files.map((kind) => ACCEPTED[kind]).join(",");
  $("record-button").hidden = !kinds.has("audio") || !navigator.mediaDevices;
  $("q").placeholder = kinds.has("image")
    ? "Search by text, or drop or paste an image"
    : "Search by text";
  $("chosen").textContent = chosenOptions(state, all ? "" : info?.default_representation);
  fillFacets(facets, state.filter);
}

/** Returns the options that differ from their defaults, for the heading of the folded options. */
function chosenOptions(state, representation) {
  const ids = ["rep", "rerank", "score", "candidates"].filter(
    (id) => state[id] !== DEFAULTS[id] && !(id === "rep" && state.rep === representation),
  );
  const chosen = ids.map((id) => $(id).selectedOptions[0].textContent);
  if (state.k !== DEFAULTS.k) chosen.push(`${state.k} hits`);
  if (state.group) chosen.push("grouped by document");
  if (state.negative.trim()) chosen.push(`not ${state.negative.trim()}`);
  if (state.filter.trim()) chosen.push(state.filter.trim());
  return chosen.length ? `: ${chosen.join(" · ")}` : "";
}

/** Controls that do not apply to a federation, whose members set their values. */
const MEMBER_CONTROLS = ["rep", "score", "candidates", "negative"];

/**
 * Returns a federation with the fields of an index that the page needs. Items are no queries: the
 * members have different vectors of an item, if they have it at all.
 */
export function federationInfo(federation, indexes) {
  const queries = federation.members.flatMap(({ index, representation }) => {
    const info = indexes.find(({ name }) => name === index);
    const name = representation ?? info?.default_representation;
    return currentRepresentation({ rep: name }, info)?.queries ?? [];
  });
  const kinds = queries.filter((kind) => kind !== "item");
  return { ...federation, representations: [], queries: kinds };
}

/** Returns the index of a state. The first one is the default. */
export function indexInfo(state, indexes) {
  return indexes.find(({ name }) => name === state.index) ?? (state.index ? null : indexes[0]);
}

/**
 * Returns the searched representation of a state, or undefined. A prefix NAME@K is that of NAME.
 * `standard` is the name of the representation if the state names none.
 */
export function currentRepresentation(
  state,
  info,
  side = "a",
  standard = info?.default_representation,
) {
  const given = side === "b" ? state.rep2 : state.rep;
  const name = (given || standard || "").split("@")[0];
  return info?.representations.find((representation) => representation.name === name);
}

/**
 * Returns the representations of contents and of captions or images, which a search without a given
 * representation combines, or null if it does not. Scores of the same query by the same encoder are
 * comparable, except for those that are normalised over a list of hits. Images have another encoder.
 */
export function combined(state, info) {
  const isChosen = state.rep || state.rerank || state.candidates || state.score === "fused";
  const content = currentRepresentation(state, info);
  if (state.view !== "search" || isChosen || content?.field !== "content") return null;
  const captions = info.representations.filter(
    ({ role, field, encoder, dim, scores }) =>
      role === "search" &&
      field === "caption" &&
      encoder === content.encoder &&
      dim === content.dim &&
      scores.includes(state.score),
  );
  const caption = captions.find((other) => other.compressor === content.compressor) ?? captions[0];
  const image = info.representations.find((other) => other.field === "image");
  const other = caption ?? (state.score === DEFAULTS.score ? image : null);
  return other ? [content, other] : null;
}

function combinedLabel([, { field }]) {
  return COMBINED[field];
}

/**
 * Returns plain labels of the searched representations by name: contents before captions, most
 * vectors first. The name is part of a label that would not be unique.
 */
export function representationLabels(info, facets) {
  const searched = (info?.representations ?? [])
    .filter(({ role }) => role === "search")
    .map((representation) => {
      const { name, field, compressor, num_vectors: maximum } = representation;
      const mean = sizeOf(name, facets)?.vectors_per_item;
      const vectors = maximum ?? (mean ? Math.round(mean) : null);
      const isWhole = compressor === "none";
      const number = `${vectors} ${vectors === 1 ? "vector" : "vectors"}`;
      const size = isWhole ? "all vectors" : vectors === null ? name : number;
      const label = { caption: `captions: ${size}`, image: "what images show" }[field] ?? size;
      return { name, label, order: [field === "image", field === "caption", !isWhole, -(vectors ?? 0)] };
    });
  searched.sort((a, b) => {
    const at = a.order.findIndex((value, i) => value !== b.order[i]);
    return at < 0 ? a.name.localeCompare(b.name) : a.order[at] - b.order[at];
  });
  const isUnique = (label) => searched.filter((other) => other.label === label).length === 1;
  return new Map(
    searched.map(({ name, label }) => [name, isUnique(label) ? label : `${label} (${name})`]),
  );
}

/** Returns the plain label of a search: that of its representation, or of both combined ones. */
export function searchLabel(state, info, facets, representation, side = "a") {
  const all = side === "a" && !state.item ? combined(state, info) : null;
  if (all) return combinedLabel(all);
  const name = (side === "b" ? state.rep2 : state.rep) || representation;
  return representationLabels(info, facets).get(name) ?? name;
}

/**
 * Returns the name of the representation that is compared with a given one: that of the same encoder
 * and field with the fewest bytes per item, else of any other, else the given one.
 */
export function smallestOther(left, representations, facets) {
  const [name] = left.split("@");
  const given = representations.find((representation) => representation.name === name);
  const others = representations.filter((other) => other.role === "search" && other !== given);
  const similar = others.filter(
    ({ encoder, field }) => encoder === given?.encoder && field === given?.field,
  );
  const size = (other) => sizeOf(other.name, facets)?.bytes_per_item ?? Infinity;
  const smallest = (similar.length ? similar : others).reduce(
    (best, other) => (!best || size(other) < size(best) ? other : best),
    null,
  );
  return smallest?.name ?? left;
}

/** Returns the kinds of queries that all sides of a state support. */
export function queryKinds(state, info) {
  if (info?.members) return new Set(info.queries);
  const all = combined(state, info);
  if (all) return new Set(all.flatMap(({ queries }) => queries));
  const sides = state.view === "compare" ? ["a", "b"] : ["a"];
  const [first, ...others] = sides.map(
    (side) => currentRepresentation(state, info, side)?.queries ?? [],
  );
  return new Set(first.filter((kind) => others.every((kinds) => kinds.includes(kind))));
}

/** Returns the size of a representation, or of a prefix NAME@K of one, or null if unknown. */
export function sizeOf(name, facets) {
  const [column, prefix] = (name ?? "").split("@");
  const size = facets?.sizes.find((other) => other.name === column);
  if (!size) return null;
  const share = prefix ? Math.min(1, Number(prefix) / size.vectors_per_item) : 1;
  return {
    vectors_per_item: share * size.vectors_per_item,
    bytes_per_item: share * size.bytes_per_item,
  };
}

export function scoreLabel(name) {
  return SCORES[name] ?? name;
}

function setOptions(select, options, value) {
  const all = options.some(([name]) => name === value) ? options : [...options, [value, value]];
  replace(
    select,
    all.map(([name, label]) => h("option", { value: name, selected: name === value }, label)),
  );
  select.value = value;
}

/** Shows the facets as chips. A filter that was edited by hand has no pressed chips. */
function fillFacets(facets, filter) {
  const columns = (facets?.facets ?? []).map(({ column }) => column);
  const selected = parseFacetFilter(filter, columns);
  const groups = (facets?.facets ?? []).map((facet) => {
    if (facet.num_values < 2) return null;
    const chips = facet.values.map(({ value, count: number }) => {
      const isPressed = Boolean(selected?.[facet.column].includes(value));
      const chip = h(
        "button.chip",
        {
          type: "button",
          "aria-pressed": String(isPressed),
          disabled: selected === null,
          title: selected === null ? EDITED_FILTER : null,
          dataset: { value: `${facet.column}=${value}` },
        },
        value,
        h("span.count", {}, count(number)),
      );
      chip.addEventListener("click", () => {
        const values = selected[facet.column];
        const changed = isPressed ? values.filter((v) => v !== value) : [...values, value];
        $("filter").value = facetFilter({ ...selected, [facet.column]: changed });
        $("filter").dispatchEvent(new Event("change", { bubbles: true }));
      });
      return chip;
    });
    return h(
      "div.facet",
      { role: "group", "aria-label": facet.column },
      h("span.facet-name", {}, facet.column),
      chips,
    );
  });
  const focused = document.activeElement?.dataset.value; // the chip is replaced by a new one
  const note = selected === null && groups.some(Boolean);
  replace($("facets"), groups, note ? h("p.note", {}, EDITED_FILTER) : null);
  if (focused) $("facets").querySelector(`[data-value="${CSS.escape(focused)}"]`)?.focus();
}
