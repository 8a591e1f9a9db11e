/** Evaluations of the server: a list, a table with a Pareto plot, and queries that a budget loses. */

import { getBlob, getJson, getText } from "./api.js";
import { download, h, replace } from "./dom.js";
import { plot } from "./plot.js";
import { pareto } from "./ranks.js";
import { DEFAULTS, EVALUATION } from "./state.js";
import { bytes, parseCsv } from "./text.js";

/** Number of queries that a comparison of two rows shows on either side. */
const NUM_QUERIES = 15;

export class Evaluations {
  #page;

  /**
   * @param {object} page
   * @param {function} page.href Returns the URL of a change of the state.
   * @param {function} page.go Changes the state.
   * @param {function} page.keep Changes the state in the URL, without showing it.
   */
  constructor(page) {
    this.#page = page;
  }

  /** Shows the list, or the evaluation of the state. */
  async show(container, state, signal) {
    document.getElementById("status").textContent = "";
    replace(container, h("p.note", {}, "Loading evaluations …"));
    if (state.evaluation) await this.#showOne(container, state, signal);
    else await this.#showList(container, signal);
  }

  #link(text, change) {
    const link = h("a", { href: this.#page.href(change) }, text);
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.#page.go({ open: "", ...change });
    });
    return link;
  }

  async #showList(container, signal) {
    let evaluations;
    try {
      ({ evaluations } = await getJson("v1/evaluations", {}, signal));
    } catch (error) {
      if (error.code !== "not_found" && error.code !== "forbidden") throw error;
      const hint =
        error.code === "not_found" &&
        "Start the server with evaluations.folder=FOLDER, the folder in which maxray evaluate has " +
          "written its output folders, to list them here.";
      const texts = [`${error.message}.`, hint].filter(Boolean).map((text) => h("p", {}, text));
      replace(container, h("div.empty", {}, h("h2", {}, "No evaluations"), texts));
      return;
    }
    if (!evaluations.length) {
      const text =
        "Create one with POST /v1/evaluations or the Python client, or let a job write its output " +
        "to a folder below evaluations.folder.";
      replace(container, h("div.empty", {}, h("h2", {}, "No evaluations"), h("p", {}, text)));
      return;
    }
    const rows = evaluations.map((evaluation) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, this.#link(evaluation.id, { ...EVALUATION, evaluation: evaluation.id })),
        h("td.word", {}, evaluation.index),
        h("td.word", {}, h(`span.badge.${evaluation.state}`, {}, evaluation.state)),
        h("td.word", {}, evaluation.created.slice(0, 16).replace("T", " ")),
        h("td", {}, evaluation.results.length || "–"),
      ),
    );
    const head = ["Evaluation", "Index", "State", "Created (UTC)", "Rows"];
    replace(container, h("h2", {}, "Evaluations"), table(head, rows));
  }

  async #showOne(container, state, signal) {
    const id = state.evaluation;
    const path = `v1/evaluations/${encodeURIComponent(id)}`;
    const evaluation = await getJson(path, {}, signal);
    const back = h("p", {}, this.#link("← All evaluations", EVALUATION));
    const heading = h("h2", {}, `Evaluation of ${evaluation.index}`);
    if (evaluation.state !== "done") {
      const log = h("pre", {}, evaluation.progress.join("\n"));
      const message = evaluation.error ? h("p.bad", {}, evaluation.error) : null;
      const badge = h(`span.badge.${evaluation.state}`, {}, evaluation.state);
      replace(container, back, heading, badge, message, log);
      return;
    }
    const [metrics, perQuery, queries] = await Promise.all([
      getText(`${path}/files/metrics.csv`, signal).then(parseCsv),
      getText(`${path}/files/per_query.csv`, signal).then(parseCsv),
      evaluation.files.includes("queries.jsonl")
        ? getText(`${path}/files/queries.jsonl`, signal).then(parseQueries)
        : new Map(),
    ]);
    const measures = Object.keys(evaluation.results[0]?.measures ?? {});
    const files = evaluation.files.map((name) => {
      const button = h("button.link", { type: "button" }, name);
      button.addEventListener("click", async () => {
        download(name.split("/").at(-1), await getBlob(`${path}/files/${encodePath(name)}`));
      });
      return button;
    });
    const first = [state.measure, "nDCG@10"].find((name) => measures.includes(name)) ?? measures[0];
    const select = h(
      "select",
      { id: "plot-measure" },
      measures.map((name) => h("option", { value: name, selected: name === first }, name)),
    );
    const plotted = h("div.plot");
    const table = this.#metricsTable(metrics, measures);
    const changes = this.#queriesArea(state, evaluation, metrics, perQuery, queries);
    const draw = () => {
      const points = pointsOf(metrics, select.value);
      const front = pareto(points, select.value);
      replace(plotted, plotOrNote(metrics, points, front, select.value));
      table.mark(front.map(({ row }) => row));
      changes?.show(select.value);
    };
    select.addEventListener("change", () => {
      this.#page.keep({ measure: select.value });
      draw();
    });
    draw();
    replace(
      container,
      back,
      heading,
      h("p.note", {}, `${id} · finished ${(evaluation.finished ?? "").slice(0, 16)} UTC`),
      this.#plotArea(select, plotted),
      table.element,
      changes?.element,
      h("details", {}, h("summary", {}, "Files"), h("div.row.wrap", {}, files)),
    );
  }

  /** Returns the plot of a measure. `select` chooses the measure. */
  #plotArea(select, holder) {
    return h(
      "section",
      { "aria-label": "Quality and size" },
      h("div.row", {}, h("h3", {}, "Quality and size"), h("label", { for: "plot-measure" }, "Measure"),
        select),
      holder,
    );
  }

  /**
   * Returns the table of the results, which a click on a column heading sorts, and a function that
   * marks the rows on the Pareto front.
   */
  #metricsTable(metrics, measures) {
    const columns = [
      ...measures,
      ["retention", "% of reference", (v) => (100 * v).toFixed(1)],
      ["p_reference", "p (vs. reference)", (v) => (v < 0.001 ? "<0.001" : v.toFixed(3))],
      ["vectors_per_item", "vectors", (v) => v.toFixed(1)],
      ["all_bytes", "bytes per item", bytes],
      ["median_ms", "ms per query", (v) => v.toFixed(1)],
    ].map((column) => (Array.isArray(column) ? column : [column, column, (v) => v.toFixed(3)]));
    const shown = columns.filter(([name]) => metrics.some((row) => row[name]));
    const body = h("tbody");
    const lines = new Map(
      metrics.map((row) => [
        row,
        h(
          "tr",
          {},
          h(
            "th",
            { scope: "row" },
            rowName(row),
            isReference(row, metrics) ? [" ", h("span.badge", {}, "reference")] : null,
          ),
          shown.map(([name, , format]) => {
            const isCompared = name === "retention" || name === "p_reference";
            const title = isCompared && row[name] ? `compared with ${row.reference}` : null;
            return h("td", { title }, row[name] ? format(Number(row[name])) : "–");
          }),
        ),
      ]),
    );
    const fill = (rows) => replace(body, rows.map((row) => lines.get(row)));
    fill(metrics);
    const head = h("tr", {}, h("th", { scope: "col" }, "Representation"));
    for (const [name, label] of shown) {
      const button = h("button.link", { type: "button" }, label);
      const cell = h("th", { scope: "col" }, button);
      button.addEventListener("click", () => {
        const isDescending = cell.getAttribute("aria-sort") !== "descending";
        head.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
        const sign = isDescending ? -1 : 1;
        fill([...metrics].sort((a, b) => sign * (Number(a[name]) - Number(b[name]))));
      });
      head.append(cell);
    }
    const element = h(
      "div.scroll",
      { tabindex: "0", role: "region", "aria-label": "Results" },
      h("table", {}, h("thead", {}, head), body),
    );
    const mark = (front) =>
      lines.forEach((line, row) => line.classList.toggle("front", front.includes(row)));
    return { element, mark };
  }

  /**
   * Compares two rows query by query. Each query opens in the side-by-side view. Returns the element
   * and a function that shows a measure, or null for fewer than two rows.
   */
  #queriesArea(state, evaluation, metrics, perQuery, queries) {
    const runs = [...new Set(perQuery.map((row) => row.run))];
    if (runs.length < 2) return null;
    const choose = (id, label, value) => [
      h("label", { for: id }, label),
      h("select", { id }, runs.map((run) => h("option", { value: run, selected: run === value }, run))),
    ];
    const [from, to] = defaultRuns(metrics, runs);
    const given = (name, value) => (runs.includes(name) ? name : value);
    const controls = h(
      "div.row.wrap",
      {},
      choose("run-a", "From", given(state.from, from)),
      choose("run-b", "to", given(state.to, to)),
    );
    const lists = h("div.columns.count-2");
    const note = h("p.note", {}, "Only rows of MaxSim, hybrid and fused scores open side by side.");
    const heading = h("h3");
    let measure;
    const selected = () =>
      ["run-a", "run-b"].map((id) => controls.querySelector(`#${id}`).value);
    const draw = () => {
      const [a, b] = selected();
      const changes = queryChanges(perQuery, a, b, measure);
      const losses = changes.filter(({ change }) => change < 0).slice(0, NUM_QUERIES);
      const gains = changes.filter(({ change }) => change > 0).reverse().slice(0, NUM_QUERIES);
      note.hidden = Boolean(sidesOf(a, b));
      replace(
        lists,
        this.#queryList(`Lost in ${b}`, losses, evaluation, queries, a, b),
        this.#queryList(`Won in ${b}`, gains, evaluation, queries, a, b),
      );
    };
    controls.addEventListener("change", () => {
      const [a, b] = selected();
      this.#page.keep({ from: a, to: b });
      draw();
    });
    const show = (name) => {
      measure = name;
      heading.textContent = `Queries by change of ${name}`;
      draw();
    };
    const element = h("section", { "aria-label": "Queries" }, heading, controls, note, lists);
    return { element, show };
  }

  #queryList(heading, changes, evaluation, queries, a, b) {
    const sides = sidesOf(a, b);
    const search = { ...DEFAULTS, view: "compare", index: evaluation.index, ...sides };
    const rows = changes.map(({ id, change }) => {
      const text = queries.get(id);
      const label = text ?? `query ${id}`;
      return h(
        "li",
        {},
        h(`span.change.${change < 0 ? "down" : "up"}`, {}, signed(change)),
        text && sides ? this.#link(label, { ...search, q: text }) : label,
      );
    });
    const content = rows.length ? h("ol.queries", {}, rows) : h("p.note", {}, "None.");
    return h("div.column", {}, h("h4", {}, heading), content);
  }
}

/** Returns the change of a measure per query from one run to another, in ascending order. */
function queryChanges(rows, a, b, measure) {
  const values = (run) =>
    new Map(rows.filter((row) => row.run === run).map((row) => [row.query_id, Number(row[measure])]));
  const [before, after] = [values(a), values(b)];
  return [...before]
    .filter(([id]) => after.has(id))
    .map(([id, value]) => ({ id, change: after.get(id) - value }))
    .sort((one, other) => one.change - other.change);
}

/**
 * Returns the two rows that are compared at first: the reference of the first row, and the last row
 * with the same score as that reference.
 *
 * @param {object[]} metrics Rows of metrics.csv.
 * @param {string[]} runs Names of the runs of per_query.csv.
 */
export function defaultRuns(metrics, runs) {
  const references = metrics.map(({ reference }) => reference).filter((name) => runs.includes(name));
  const from = references[0] ?? runs[0];
  const others = runs.filter((run) => run !== from && run !== "bm25");
  const score = splitRun(from)?.score;
  const same = others.filter((run) => splitRun(run)?.score === score);
  return [from, same.at(-1) ?? others.at(-1) ?? runs.find((run) => run !== from)];
}

/** Returns the fields of the state that search with two rows, or null if a search cannot equal one. */
export function sidesOf(a, b) {
  const [left, right] = [a, b].map(splitRun);
  if (!left || !right) return null;
  return {
    rep: left.representation,
    score: left.score,
    rep2: right.representation,
    score2: right.score,
  };
}

/** Splits the name of a run such as "hpool_16.maxsim", or returns null for any other run. */
function splitRun(run) {
  const found = /^(.+)\.(maxsim|hybrid|fused)$/.exec(run);
  return found ? { representation: found[1], score: found[2] } : null;
}

function parseQueries(text) {
  const lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  return new Map(lines.map(({ _id: id, text: query }) => [id, query]));
}

function encodePath(path) {
  return path.split("/").map(encodeURIComponent).join("/");
}

function rowName(row) {
  return row.score && row.score !== row.representation
    ? `${row.representation} · ${row.score}`
    : row.representation;
}

function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
}

function table(head, rows) {
  return h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": "Evaluations" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows),
    ),
  );
}

/** Checks whether a row of metrics.csv is the reference of any row. */
function isReference(row, metrics) {
  const names = [row.representation, `${row.representation}.${row.score.replaceAll(/[ :]/g, "-")}`];
  return metrics.some(({ reference }) => names.includes(reference));
}

/**
 * Returns the points of the rows with stored vectors. Rows at 0, such as captions for queries of
 * texts, would squeeze the others.
 */
export function pointsOf(metrics, measure) {
  const stored = metrics.filter((row) => Number(row.all_bytes) > 0 && row[measure]);
  const positive = stored.filter((row) => Number(row[measure]) > 0);
  return (positive.length ? positive : stored)
    .map((row) => ({
      row,
      name: rowName(row),
      size: Number(row.all_bytes),
      quality: Number(row[measure]),
      isReference: isReference(row, metrics),
    }));
}

/** Returns the plot and a note on the rows that it cannot contain. */
function plotOrNote(metrics, points, front, measure) {
  if (!points.length) return h("p.note", {}, "No row of this evaluation has stored vectors.");
  const plotted = new Set(points.map(({ row }) => row));
  const others = metrics.filter((row) => !plotted.has(row) && row[measure]);
  const texts = others.map((row) => `${rowName(row)} (${measure} ${Number(row[measure]).toFixed(3)})`);
  const note = `Not in the plot, without stored vectors or at 0: ${texts.join(", ")}.`;
  return [plot(points, front, measure), texts.length ? h("p.note", {}, note) : null];
}
