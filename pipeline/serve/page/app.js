/** The search page: its state, its views and the searches that they show. */

import { Media, getJson, getKey, search, setKey } from "./api.js";
import { CollectionMap, idsInArea } from "./collection.js";
import {
  CONTROLS,
  clearErrors,
  combined,
  currentRepresentation,
  federationInfo,
  fillControls,
  indexInfo,
  queryKinds,
  scoreLabel,
  searchLabel,
  showFieldError,
  sizeOf,
  smallestOther,
} from "./controls.js";
import { $, append, h, replace } from "./dom.js";
import { Evaluations } from "./evaluations.js";
import { hitCard, title } from "./hits.js";
import {
  attachmentOf,
  contentOf,
  dataUrl,
  kindOf,
  readAttachment,
  record,
} from "./attachments.js";
import { Judge, setUpExport } from "./judge.js";
import { alternate, changes, kendall, lost, merge, overlap } from "./ranks.js";
import { sampleGrid, stateLink } from "./start.js";
import {
  DEFAULTS,
  EVALUATION,
  federatedBody,
  formatState,
  hasQuery,
  parseState,
  searchBody,
} from "./state.js";
import { alternatives, bytes, describeRepresentation, milliseconds } from "./text.js";
import { Viewer } from "./viewer.js";

/** Number of hits that "More results" adds. */
const MORE_HITS = 20;
/** Orders of the shown hits by the values of `state.sort`. */
const SORTS = {
  "": ["best first", (a, b) => a.rank - b.rank],
  title: ["title", (a, b) => title(a).localeCompare(title(b))],
  source: [
    "source and place",
    (a, b) =>
      (a.source ?? "").localeCompare(b.source ?? "") ||
      a.parent_id.localeCompare(b.parent_id) ||
      (a.span?.start ?? 0) - (b.span?.start ?? 0),
  ],
};

let state = parseState(location.search);
let attachment = history.state?.attachment ?? null;
let indexes = [];
const facetsByIndex = new Map();
let controller = new AbortController();
let media = new Media();
/** Attachment of the query of the shown results. */
let shownAttachment = null;
/**
 * Columns of the shown results: {side, label, response, hits, itself, representation}. `itself` is the
 * hit of the item that is the query, which is not listed.
 */
let columns = [];
let shownView = null;
const narrow = window.matchMedia("(max-width: 720px)");

const viewer = new Viewer({
  close: () => go({ open: "" }),
  step: (by) => {
    const hits = openColumn()?.hits ?? [];
    const at = hits.findIndex((hit) => hit.item_id === state.open);
    const next = hits[at + by];
    if (next) go({ open: next.item_id }, { replace: true });
  },
  similar: (hit, part) => searchByItem(hit, part),
  open: openItem,
});
const collection = new CollectionMap({
  open: openItem,
  select: (area) => keep({ area }),
  search: () => go({ view: "search" }),
});
const evaluations = new Evaluations({
  href: (change) => `./${formatState({ ...state, open: "", ...change })}`,
  go: (change) => {
    attachment = null;
    go(change);
  },
  keep,
});

// -- state ------------------------------------------------------------------------------------

/** Changes the state and shows it. The change is an entry of the history of the browser. */
function go(change, { replace: isReplacing = false } = {}) {
  const next = { ...state, ...change };
  const url = formatState(next) || "./";
  const entry = { attachment };
  if (isReplacing) history.replaceState(entry, "", url);
  else history.pushState(entry, "", url);
  return show(next);
}

/** Changes the state in the URL only: the view already shows the change. */
function keep(change) {
  state = { ...state, ...change };
  history.replaceState({ attachment }, "", formatState(state) || "./");
}

async function show(next) {
  if (!next.index && indexes.length) next.index = indexes[0].name;
  const withoutItem = (other) => formatState({ ...other, open: "" });
  next.ids = state.ids;
  const isSameSearch = contentOf(attachment) === contentOf(shownAttachment) && withoutItem(next) === withoutItem(state);
  state = next;
  if (isSameSearch && columns.length) {
    showItem();
    return;
  }
  await update();
}

window.addEventListener("popstate", (event) => {
  attachment = event.state?.attachment ?? null;
  show(parseState(location.search));
});

/** Shows the current state: loads what the view needs, and searches. */
async function update() {
  $("arrangement").replaceChildren();
  controller.abort();
  controller = new AbortController();
  const { signal } = controller;
  columns = [];
  shownAttachment = attachment;
  clearErrors();
  hideBanner();
  document.body.dataset.view = state.view;
  document.body.classList.toggle("start", state.view === "search" && !hasQuery(state, attachment));
  if (state.view !== shownView) {
    shownView = state.view;
    $("options").open = state.view === "compare" && !narrow.matches;
  }
  for (const link of document.querySelectorAll("nav a[data-view]")) {
    const isCurrent = link.dataset.view === state.view;
    link.toggleAttribute("aria-current", isCurrent);
    if (isCurrent) link.setAttribute("aria-current", "page");
    link.href = `./${formatState({ ...state, open: "", ...EVALUATION, view: link.dataset.view })}`;
  }
  showQueryPart();
  try {
    if (!indexes.length) {
      const { indexes: found, federations = [] } = await getJson("v1/indexes", {}, signal);
      indexes = [...found, ...federations.map((federation) => federationInfo(federation, found))];
    }
    if (!indexes.length) {
      showEmpty("No index", "This access key cannot access any index of the server.");
      return;
    }
    if (!state.index) state.index = indexes[0].name;
    if (state.view === "compare" && !state.rep2) await chooseSides(signal);
    fillControls(state, indexes, facetsByIndex.get(state.index));
    if (!indexInfo(state, indexes)) {
      showError({ field: "index", message: `unknown index '${state.index}'` });
      return;
    }
    if (indexInfo(state, indexes).members && ["compare", "map"].includes(state.view)) {
      viewer.close();
      showEmpty("This view needs an index", `${state.index} is a federation. Choose an index.`);
      return;
    }
    loadFacets(signal);
    if (state.view === "evaluations") {
      await evaluations.show($("results"), state, signal);
      return;
    }
    if (state.view === "map") {
      viewer.close();
      $("status").textContent = "";
      await collection.show($("results"), state, indexInfo(state, indexes).num_items, signal);
      return;
    }
    state.ids = await idsInArea(state.index, state.area, signal);
    signal.throwIfAborted();
    if (!hasQuery(state, attachment)) {
      showStart();
      return;
    }
    await runSearch(signal);
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) showError(error);
  }
}

/** Compares a representation with the smallest similar one, if the URL names no other. */
async function chooseSides(signal) {
  const info = indexInfo(state, indexes);
  const left = state.rep || info?.default_representation || "";
  const facets = await fetchFacets(state.index, signal);
  signal.throwIfAborted();
  state.rep = left;
  state.rep2 = smallestOther(left, info?.representations ?? [], facets);
}

/** Returns the facets of an index, or undefined if they cannot be loaded: the page works without. */
async function fetchFacets(name, signal) {
  if (indexes.find((info) => info.name === name)?.members) return undefined;
  if (!facetsByIndex.has(name)) {
    try {
      const path = `v1/indexes/${encodeURIComponent(name)}/facets`;
      facetsByIndex.set(name, await getJson(path, {}, signal));
    } catch {
      return undefined;
    }
  }
  return facetsByIndex.get(name);
}

/** Loads the facets after the first results, which do not need them. */
async function loadFacets(signal) {
  const name = state.index;
  if (facetsByIndex.has(name)) {
    fillExamples();
    return;
  }
  if (!(await fetchFacets(name, signal))) return;
  if (signal.aborted || state.index !== name) return;
  if (!$("search-form").contains(document.activeElement) || document.activeElement === $("q")) {
    const draft = $("q").value;
    fillControls(state, indexes, facetsByIndex.get(name));
    $("q").value = draft;
  }
  columns.forEach(fillColumnHead);
  fillExamples();
  if (document.body.classList.contains("start")) showStart();
}

function fillExamples() {
  const examples = facetsByIndex.get(state.index)?.examples ?? [];
  const chips = examples.map((example) => {
    const change = { q: example.query, item: "", box: "", times: "", open: "", ...answering(example) };
    return stateLink("a.chip", linkTo(change), example.query);
  });
  const isShown = chips.length > 0 && state.view !== "evaluations" && !hasQuery(state, attachment);
  $("examples").hidden = !isShown;
  replace($("examples"), h("span.facet-name", {}, "Try"), chips);
}

/** Returns the address and the action of a link that changes the state and removes the attachment. */
function linkTo(change) {
  return {
    href: `./${formatState({ ...state, ...change })}`,
    go: () => {
      attachment = null;
      go(change);
    },
  };
}

/** Returns the change to the representation of an example, or to none if the current one suits. */
function answering({ representation }) {
  const info = indexInfo(state, indexes);
  const other = info?.representations.find(({ name }) => name === representation);
  const isSearched = (current) =>
    current?.encoder === other?.encoder && current?.field === other?.field;
  const isAnswered = (current) =>
    (combined(current, info) ?? [currentRepresentation(current, info)]).some(isSearched);
  if (isAnswered(state)) return {};
  const all = { rep: "", rerank: "", candidates: "", score: DEFAULTS.score };
  if (state.view === "search" && isAnswered({ ...state, ...all })) return all;
  return { rep: representation, rep2: "", rerank: "", rerank2: "" };
}

// -- query ------------------------------------------------------------------------------------

/** Shows the file or the item that is part of the query, with a button that removes it. */
function showQueryPart() {
  const part = $("query-part");
  part.hidden = !(state.item || attachment || state.area);
  part.replaceChildren();
  const remove = h(
    "button.icon",
    {
      type: "button",
      "aria-label": "Remove from the query",
      on: {
        click: () => {
          attachment = null;
          go({ item: "", box: "", times: "", open: "" });
          $("q").focus();
        },
      },
    },
    "✕",
  );
  if (state.item) {
    const kind = state.box || state.times ? "part of " : "like ";
    append(part, [h("span.query-item", { title: state.item }, kind, state.item), remove]);
  } else if (attachment?.image) {
    append(part, [h("img", { src: dataUrl(attachment.image), alt: "Query image" }), remove]);
  } else if (attachment) {
    append(part, [h("span.query-item", {}, ...Object.keys(attachment)), remove]);
  }
  if (state.area) {
    const click = () => go({ area: "", open: "" });
    const attributes = { type: "button", "aria-label": "Search all items", on: { click } };
    const all = h("button.icon", attributes, "✕");
    append(part, [h("span.query-item", {}, "in an area of the map"), all]);
  }
}

async function attach(file) {
  clearErrors();
  const kinds = currentQueryKinds();
  const kind = kindOf(file);
  try {
    if (!kinds.has(kind)) throw new Error("this representation does not support such queries");
    attachment = await readAttachment(file);
  } catch (error) {
    showFieldError({ field: "query", message: `Query ${kind}: ${error.message}` });
    return;
  }
  columns = [];
  const q = kinds.has("composed") ? $("q").value : "";
  go({ item: "", box: "", times: "", open: "", q });
}

/** Removes the attachment if there is a text that cannot be combined with it. */
function replaceAttachment(text) {
  if (text.trim() && !currentQueryKinds().has("composed")) attachment = null;
}

let stopRecording = null;

/** Starts to record the microphone, or searches by the recording. */
async function toggleRecording() {
  const button = $("record-button");
  const stop = stopRecording;
  stopRecording = null;
  button.setAttribute("aria-pressed", String(!stop));
  try {
    if (stop) await attach(await stop());
    else stopRecording = await record();
  } catch (error) {
    button.setAttribute("aria-pressed", "false");
    showFieldError({ field: "query", message: `Microphone: ${error.message}` });
  }
}

function currentQueryKinds() {
  return queryKinds(state, indexInfo(state, indexes));
}

function searchByItem(hit, part = {}) {
  attachment = null;
  go({
    ...memberChange(hit),
    view: state.view === "compare" ? "compare" : "search",
    q: "",
    item: hit.item_id,
    box: part.box ? part.box.join(",") : "",
    times: part.times ? part.times.join(",") : "",
    open: "",
  });
  window.scrollTo({ top: 0 });
}

/** Returns the change to the index and representation of the member that found a federated hit. */
function memberChange(hit) {
  return hit?.index ? { index: hit.index, rep: hit.representation, group: "" } : {};
}

/** Returns the searched representation of a hit in its index, or in that of its member. */
function representationOf(hit, column) {
  if (!hit.index) return column.representation;
  const info = indexes.find(({ name }) => name === hit.index);
  return currentRepresentation({ rep: hit.representation }, info);
}

/** Opens an item of the index, with similar items as the hits. */
function openItem(id) {
  attachment = null;
  const view = state.view === "compare" ? "compare" : "search";
  const column = openColumn();
  go({ ...memberChange(column && openHit(column)), view, q: "", item: id, box: "", times: "", filter: "", area: "", open: id });
}

// -- results ----------------------------------------------------------------------------------

async function runSearch(signal) {
  viewer.close();
  showLoading();
  const found = await findColumns(signal, showError);
  if (!found) return;
  performance.mark("maxray-answer");
  columns = found;
  drawResults();
  performance.measure("maxray-draw", "maxray-answer");
  const isSubmitted = $("query-box").contains(document.activeElement) && $("q").value === state.q;
  if (isSubmitted) $("results").focus({ preventScroll: true }); // keys now move between the hits
  showItem();
  if (columns.length === 2) await compareDurations(signal);
}

/** Searches and returns the columns, or null after an error, which is passed to `failed`. */
async function findColumns(signal, failed) {
  const found = [];
  for (const side of state.view === "compare" ? ["a", "b"] : ["a"]) {
    try {
      const response = await find(side, signal);
      const hits = response.hits.filter((hit) => hit.item_id !== state.item);
      hits.forEach((hit, rank) => (hit.rank = rank + 1));
      const itself = response.hits.find((hit) => hit.item_id === state.item);
      const info = indexInfo(state, indexes);
      const representation = currentRepresentation(state, info, side, response.representation);
      found.push({ side, response, hits, itself, representation });
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) failed(error, side);
      return null;
    }
  }
  return signal.aborted ? null : found;
}

/** Searches one representation, or contents together with captions or images. */
async function find(side, signal) {
  if (indexInfo(state, indexes).members) return findFederated(signal);
  const body = { ...searchBody(state, attachment, side), explain: "matches" };
  const all = side === "a" ? combined(state, indexInfo(state, indexes)) : null;
  if (!all) return search(body, signal);
  const searchIn = async ({ name, field }) => {
    const response = await search({ ...body, representation: name }, signal);
    response.hits.forEach((hit) => (hit.found = { name, field }));
    return response;
  };
  const parts = [...(state.q.trim() ? ["text"] : []), ...Object.keys(attachment ?? {})];
  const kind = parts.length > 1 ? "composed" : parts[0];
  const both = state.item ? all : all.filter(({ queries }) => queries.includes(kind));
  if (!both.length) return search(body, signal); // the server tells which queries are supported
  if (state.item) {
    // The contents and the caption of an item are different queries, and it may lack either.
    return searchIn(both[0]).catch((error) => {
      if (error.code !== "invalid_argument") throw error;
      return searchIn(both[1]);
    });
  }
  const settled = await Promise.allSettled(both.map(searchIn));
  const responses = settled.flatMap(({ value }) => value ?? []);
  // One of two encoders may not read a query, such as a video without speech.
  const isBroken = ({ reason }) => reason && (!responses.length || reason.code !== "invalid_argument");
  const broken = settled.find(isBroken);
  if (broken) throw broken.reason;
  const rankings = responses.map(({ hits }) => hits);
  const join = both.some(({ field }) => field === "image") ? alternate : merge;
  const hits = join(rankings, state.group ? "parent_id" : "item_id").slice(0, body.k);
  const slowest = responses.map((response) => response.durations_ms).sort((a, b) => b.total - a.total);
  const warnings = [...new Set(responses.flatMap((response) => response.warnings))];
  return { ...responses[0], hits, warnings, durations_ms: slowest[0] };
}

/** Searches a federation. Its hits have the index of the member that describes them. */
async function findFederated(signal) {
  const response = await search(federatedBody(searchBody(state, attachment)), signal);
  const names = new Map(response.members.map(({ name, index }) => [name, index]));
  for (const hit of response.hits) hit.index = names.get(hit.members[0].member);
  return response;
}

/** Adds hits to the shown ones, and moves the focus to the first new one. */
async function showMore() {
  const button = $("more");
  const last = columns[0].hits.length;
  const before = state.k;
  button.disabled = true;
  keep({ k: String((Number(state.k) || last) + MORE_HITS) });
  const found = await findColumns(controller.signal, (error) => {
    keep({ k: before });
    showBanner(error.message, "warning");
  });
  button.disabled = false;
  if (!found) return;
  columns = found;
  $("k").value = state.k;
  const top = window.scrollY;
  drawResults();
  window.scrollTo({ top });
  const id = columns[0].hits.find((hit) => hit.rank > last)?.item_id;
  if (id) document.querySelector(`${itemSelector(id)} .hit-title a`).focus({ preventScroll: true });
  if (columns.length === 2) await compareDurations(controller.signal);
}

function itemSelector(id) {
  return `[data-item="${CSS.escape(id)}"]`;
}

/**
 * Shows the durations of a second run of both searches, one after the other. The first one loads
 * vectors, and simultaneous searches would wait for each other.
 */
async function compareDurations(signal) {
  const compared = columns;
  for (const column of compared) {
    try {
      const { durations_ms } = await search(searchBody(state, attachment, column.side), signal);
      column.warm = durations_ms;
    } catch {
      return; // the key has a rate limit, or there is a new search
    }
  }
  if (!signal.aborted && columns === compared) columns.forEach(fillColumnHead);
}

/** Returns the representation of a column, with its score if that of the other column differs. */
function columnLabel({ side, response }) {
  if (response.members) return `${response.members.length} members as one`;
  const facets = facetsByIndex.get(state.index);
  const label = searchLabel(state, indexInfo(state, indexes), facets, response.representation, side);
  const isSame = state.view !== "compare" || !state.score2 || state.score2 === state.score;
  if (isSame) return label;
  return `${label} · ${scoreLabel(side === "b" ? state.score2 : state.score)}`;
}

function drawResults() {
  media.release();
  media = new Media();
  const results = $("results");
  results.removeAttribute("aria-busy");
  const judge = new Judge(state, attachment);
  const reference = columns[0].hits.map((hit) => hit.item_id);
  const moved = columns[1] ? changes(columns[1].hits.map((hit) => hit.item_id), reference) : null;
  if (columns.length === 1) columns[0].hits.sort((SORTS[state.sort] ?? SORTS[""])[1]);
  const isGrid = columns.length === 1 && hasGrid(columns[0].hits);
  const parts = columns.map((column, i) => {
    const cards = column.hits.map((hit) =>
      hitCard(hit, {
        index: hit.index ?? state.index,
        media,
        judge,
        canSearchItems: representationOf(hit, column)?.queries.includes("item") ?? false,
        href: () => `./${formatState({ ...state, open: hit.item_id })}`,
        open: () => go({ open: hit.item_id }),
        similar: () => searchByItem(hit),
        change: i && moved ? moved.get(hit.item_id) : null,
        badge: { caption: "by its caption", image: "by what it shows" }[hit.found?.field],
      }),
    );
    column.head = h("div.column-head");
    fillColumnHead(column);
    const list = cards.length
      ? h(isGrid ? "ol.hits.grid" : "ol.hits", {}, cards)
      : h("div.empty", {}, h("h2", {}, "No hits"), h("p", {}, emptyHint()));
    return h("div.column", { dataset: { side: column.side } }, column.head, list, lostList(i));
  });
  replace(
    results,
    comparison(),
    h("div.columns", { class: `columns count-${parts.length}` }, parts),
    moreButton(),
  );
  replace($("arrangement"), arrangement(isGrid));
  $("status").textContent = statusText();
}

/** Checks whether hits are shown as a grid of images, by default if all are images. */
function hasGrid(hits) {
  if (state.layout) return state.layout === "grid";
  return hits.length > 0 && hits.every(({ modality }) => modality === "image");
}

/** Returns the controls of the order and of the layout of the shown hits. */
function arrangement(isGrid) {
  if (columns.length !== 1 || columns[0].hits.length < 2) return [];
  const change = (changed, id) => {
    keep(changed);
    drawResults();
    $(id).focus();
  };
  const options = Object.entries(SORTS).map(([value, [label]]) =>
    h("option", { value, selected: value === state.sort }, label),
  );
  const sort = h("select", { id: "sort", title: "Orders the hits that are shown" }, options);
  sort.addEventListener("change", () => change({ sort: sort.value }, "sort"));
  const layout = ["list", "grid"].map((name) =>
    h(
      "button.chip",
      {
        type: "button",
        id: `layout-${name}`,
        "aria-pressed": String(isGrid === (name === "grid")),
        on: { click: () => change({ layout: name }, `layout-${name}`) },
      },
      name,
    ),
  );
  return [
    h("label", { for: "sort" }, "Order"),
    sort,
    h("span.chips", { role: "group", "aria-label": "Layout" }, layout),
  ];
}

/** Returns the button that shows more hits, unless there are fewer than requested. */
function moreButton() {
  if (!columns.some(({ hits }) => hits.length && hits.length >= Number(state.k))) return null;
  return h("button.quiet-button", { type: "button", id: "more", on: { click: showMore } }, "More results");
}

function statusText() {
  const [first] = columns;
  const total = Math.max(...columns.map(({ response }) => response.durations_ms.total));
  const number = first.hits.length;
  const text = `${number} ${number === 1 ? "hit" : "hits"} in ${milliseconds(total)}`;
  const { index, version, members } = first.response;
  const versions = members?.map((member) => `${member.name} ${member.version}`).join(", ");
  return `${text} · ${index}, version ${versions ?? version}`;
}

function emptyHint() {
  return state.filter
    ? "No item matches the filter and the query. Remove or change the filter."
    : "The index has no items with vectors in this representation.";
}

/** Shows the representation, its size and the duration of each stage above a column. */
function fillColumnHead(column) {
  const size = sizeOf(column.response.representation, facetsByIndex.get(state.index));
  const { durations_ms: first, candidates, reranked, members } = column.response;
  const durations = column.warm ?? first;
  const stages = Object.entries(durations).filter(([name]) => name !== "total");
  column.label = columnLabel(column);
  replace(
    column.head,
    h("h2", {}, column.label),
    h("p.note", {}, describeRepresentation(column.representation, size)),
    h(
      "p.note",
      { title: stages.map(([name, value]) => `${name} ${milliseconds(value)}`).join(", ") },
      milliseconds(durations.total),
      members ? "" : ` · ${candidates} candidates`,
      reranked ? " · reranked" : "",
    ),
  );
  column.bytes = size?.bytes_per_item ?? null;
  const summary = $("comparison");
  if (summary && columns.length === 2) fillComparison(summary);
}

function comparison() {
  if (columns.length < 2) return null;
  const element = h("dl", { id: "comparison" });
  fillComparison(element);
  return element;
}

/** Shows how much of the left ranking the right one retains, and what it costs. */
function fillComparison(element) {
  const [left, right] = columns.map((column) => column.hits.map((hit) => hit.item_id));
  const k = Math.max(left.length, right.length);
  const tau = kendall(left, right);
  const [one, other] = columns;
  const isMeasured = columns.every(({ warm }) => warm);
  const ms = columns.map(({ warm }) => milliseconds(warm?.total ?? 0));
  const rows = [
    [`overlap@${k}`, `${Math.round(100 * overlap(left, right, k))} %`],
    ["Kendall's τ", tau === null ? "–" : tau.toFixed(2)],
    ["time of a repeated search", isMeasured ? `${ms[0]} → ${ms[1]}` : "…"],
  ];
  if (one.bytes && other.bytes) {
    const share = other.bytes / one.bytes;
    const sizes = `${bytes(one.bytes)} → ${bytes(other.bytes)}`;
    rows.push(["vectors per item", `${sizes} (${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %)`]);
  }
  replace(
    element,
    rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/** Lists the hits of the left column that the right one lost. */
function lostList(column) {
  if (column !== 1) return null;
  const [left, right] = columns.map(({ hits }) => hits.map((hit) => hit.item_id));
  const ids = lost(right, left);
  if (!ids.length) return null;
  const items = ids.map((id) => {
    const hit = columns[0].hits.find((other) => other.item_id === id);
    const href = `./${formatState({ ...state, open: id })}`;
    const open = (event) => {
      event.preventDefault();
      go({ open: id });
    };
    return h(
      "li",
      {},
      h("span.rank", {}, hit.rank),
      h("a", { href, on: { click: open } }, hit.title || id),
      h("span.id", {}, id),
    );
  });
  return h("div.lost", {}, h("h3", {}, `Lost (${ids.length})`), h("ul", {}, items));
}

function openColumn() {
  return columns.find((column) => openHit(column));
}

function openHit({ hits, itself }) {
  return [...hits, itself].find((hit) => hit?.item_id === state.open);
}

/** Shows the warnings of the server, and that the item of the state is not among the hits. */
function showWarnings() {
  const warnings = columns.flatMap(({ response }) => response.warnings);
  if (columns.some(({ response }) => response.degraded)) warnings.unshift("Incomplete hits:");
  if (state.open && !openColumn()) {
    warnings.push(`The item ${state.open} is not among the hits of this search.`);
  }
  if (warnings.length) showBanner(warnings.join(" "), "warning");
  else hideBanner();
}

/** Opens or closes the item view, as the state says. */
function showItem() {
  showWarnings();
  const column = openColumn();
  if (!state.open || !column) {
    const wasOpen = viewer.isOpen;
    viewer.close();
    if (wasOpen && lastOpened) {
      document.querySelector(`${itemSelector(lastOpened)} .hit-title a`)?.focus();
    }
    return;
  }
  lastOpened = state.open;
  const hit = openHit(column);
  viewer.open(
    hit,
    {
      state: hit.found ? { ...state, rep: hit.found.name } : { ...state, ...memberChange(hit) },
      attachment,
      sides: columns,
      canSearchItems: representationOf(hit, column)?.queries.includes("item") ?? false,
      judge: new Judge(state, attachment),
      hasKey: Boolean(getKey()),
    },
  );
}
let lastOpened = null;

function showLoading() {
  media.release();
  columns = [];
  const skeleton = () => h("li.hit.skeleton", { "aria-hidden": "true" }, h("span"), h("span"));
  const results = $("results");
  results.setAttribute("aria-busy", "true");
  replace(results, h("ol.hits", {}, Array.from({ length: 4 }, skeleton)));
  $("status").textContent = "Searching …";
}

/** Shows what the index contains and how it can be searched. */
function showStart() {
  viewer.close();
  columns = [];
  const info = indexInfo(state, indexes);
  if (info.members) {
    const names = info.members.map(({ name, index }) => (name === index ? name : `${name} (${index})`));
    showEmpty(info.name, `${names.join(", ")} are searched as one.`);
    return;
  }
  if (!info.num_items) {
    const text = "Add files with maxray index. The page shows them without a restart of the server.";
    showEmpty(`${info.name} is empty`, text);
    return;
  }
  const number = info.num_items.toLocaleString("en-GB");
  const kinds = currentQueryKinds();
  const ways = ["Search by text", kinds.has("image") ? "by an image" : null];
  if (kinds.has("audio")) ways.push("by speech");
  if (kinds.has("composed")) ways.push("by several of these");
  const isCompare = state.view === "compare";
  const text = isCompare
    ? "Run one query with two representations, and see what the smaller one loses and why."
    : `${alternatives(ways.filter(Boolean))}. Open a hit to see which parts match.`;
  showEmpty(`${number} ${info.num_items === 1 ? "item" : "items"} in ${info.name}`, text);
  if (isCompare) return;
  media.release();
  media = new Media();
  const canOpen = kinds.has("item");
  const grid = sampleGrid(facetsByIndex.get(state.index)?.samples ?? [], {
    index: state.index,
    media,
    link: (id) => (canOpen ? linkTo({ item: id, open: id }) : null),
  });
  append($("results"), [grid]);
  const isFree = [document.body, null].includes(document.activeElement);
  if (isFree && !narrow.matches) $("q").focus({ preventScroll: true });
}

function showEmpty(heading, text) {
  const results = $("results");
  results.removeAttribute("aria-busy");
  $("status").textContent = "";
  replace(results, h("div.empty", {}, h("h2", {}, heading), h("p", {}, text)));
}

// -- errors -----------------------------------------------------------------------------------

function showError(error, side) {
  const results = $("results");
  results.removeAttribute("aria-busy");
  $("status").textContent = "";
  replace(results);
  columns = [];
  if (error.status === 401) {
    const text = getKey()
      ? `The server rejected the access key: ${error.message}.`
      : "This server requires an access key.";
    showEmpty("Access key required", text);
    results.firstChild.append(
      h(
        "button.primary",
        { type: "button", on: { click: () => askForKey() } },
        "Enter the access key",
      ),
    );
    askForKey(getKey() ? `The server rejected the key: ${error.message}. Try another one.` : "");
    return;
  }
  if (showFieldError(error, side)) {
    showEmpty("The search is not valid", "Correct the marked field and search again.");
    return;
  }
  const messages = {
    network: "The server cannot be reached. Check that it is running.",
    rate_limited: "This access key has sent too many requests.",
    unavailable: `The server is overloaded or restarting: ${error.message}.`,
    timeout: `The search took too long: ${error.message}.`,
    forbidden: `The server refused the request: ${error.message}.`,
  };
  const details = error.requestId ? ` (request ${error.requestId})` : "";
  showBanner(`${messages[error.code] ?? error.message}${details}`, "error", true);
  if (!(error.code in messages) && error.status === undefined) console.error(error);
}

function showBanner(text, kind, canRetry = false) {
  const banner = $("banner");
  banner.className = kind;
  banner.hidden = false;
  const retry = h("button.quiet-button", { type: "button", on: { click: update } }, "Try again");
  replace(banner, h("span", {}, text), canRetry ? retry : null);
}

function hideBanner() {
  $("banner").hidden = true;
  $("banner").replaceChildren();
}

// -- access key -------------------------------------------------------------------------------

/** Opens the dialog of the access key, with the reason if the server rejected the current one. */
function askForKey(problem = "") {
  const dialog = $("key-dialog");
  if (viewer.isOpen) viewer.close();
  $("key-input").value = "";
  $("key-input").setAttribute("aria-invalid", String(Boolean(problem)));
  $("key-error").textContent = problem;
  $("key-error").hidden = !problem;
  $("key-remove").hidden = !getKey();
  if (!dialog.open) dialog.showModal();
  $("key-input").focus();
}

function changeKey(key) {
  setKey(key);
  $("key-dialog").close();
  indexes = [];
  facetsByIndex.clear();
  columns = [];
  update();
}

// -- events -----------------------------------------------------------------------------------

$("q").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  event.preventDefault(); // the browser would empty the query
  $("results").focus({ preventScroll: true });
});

$("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const q = $("q").value;
  const change = { q, open: "", sort: "" };
  if (state.view === "map") change.view = "search";
  if (q.trim()) Object.assign(change, { item: "", box: "", times: "" });
  replaceAttachment(q);
  columns = [];
  go({ ...change, ...controlValues() });
});

for (const name of CONTROLS) {
  $(name).addEventListener("change", () => {
    const change = controlValues();
    if (name === "index") {
      Object.assign(change, { rep: "", rep2: "", rerank: "", rerank2: "", filter: "" });
      Object.assign(change, { score: "maxsim", score2: "", candidates: "" });
      Object.assign(change, { item: "", box: "", times: "", area: "" });
    }
    if (name === "rep") Object.assign(change, { candidates: "" });
    replaceAttachment($("q").value);
    go({ ...change, q: $("q").value, open: "" });
  });
}

function controlValues() {
  const values = Object.fromEntries(CONTROLS.map((name) => [name, $(name).value]));
  return { ...values, k: values.k.trim() || DEFAULTS.k };
}

for (const link of document.querySelectorAll("nav a[data-view], .brand")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const view = link.dataset.view;
    if (view) {
      go({ view, open: "", ...EVALUATION });
    } else {
      attachment = null;
      go({ ...parseState(""), index: state.index });
    }
  });
}

$("image-button").addEventListener("click", () => $("image-file").click());
$("image-file").addEventListener("change", () => {
  const [file] = $("image-file").files;
  if (file) attach(file);
  $("image-file").value = "";
});
$("record-button").addEventListener("click", toggleRecording);
document.addEventListener("paste", (event) => {
  const file = attachmentOf(event.clipboardData);
  if (!file) return;
  event.preventDefault();
  attach(file);
});
document.addEventListener("dragover", (event) => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  event.preventDefault();
  const file = attachmentOf(event.dataTransfer);
  if (file) attach(file);
  else if (event.dataTransfer.files.length) {
    showFieldError({ field: "query", message: "The file must be an image, audio or a video." });
  }
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) {
    return;
  }
  if (event.target.matches("input, select, textarea")) return;
  if (event.key === "/") {
    event.preventDefault();
    $("q").focus();
    $("q").select();
  }
  const steps = { j: 1, k: -1 };
  if (event.key in steps) {
    const links = [...document.querySelectorAll(".hit-title a")];
    const at = links.indexOf(document.activeElement);
    links[Math.min(Math.max(at + steps[event.key], 0), links.length - 1)]?.focus();
  }
});

$("key-button").addEventListener("click", () => askForKey());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key-input").value.trim();
  if (key) changeKey(key);
});
$("key-remove").addEventListener("click", () => changeKey(""));

setUpExport();
update();
