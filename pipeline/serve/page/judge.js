/** Relevance judgments of hits, kept in the browser and exported as benchmarks. */

import { contentOf } from "./attachments.js";
import { $, download, h } from "./dom.js";
import { DEFAULTS } from "./state.js";
import { zip } from "./zip.js";

const STORE = "maxray-judgments";

/** Returns the judgments as {query id: {text, index, grades: {item id: grade}}}. */
export function judgments() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

/** Returns the id of a query, which is equal for equal queries of an index. */
function queryId(state, attachment = null) {
  const content = contentOf(attachment);
  const part = content ? `${content.length} ${content.slice(-64)}` : "";
  const text = [state.index, state.q.trim(), state.item, state.box, state.times, part].join("\n");
  let hash = 0xcbf29ce484222325n; // FNV-1a
  for (const byte of new TextEncoder().encode(text)) {
    hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  }
  return hash.toString(16).padStart(16, "0");
}

/** Checks whether a query is a text: the id of any other query contains its file or item. */
function isText(id, { text, index }) {
  return id === queryId({ ...DEFAULTS, index, q: text });
}

/**
 * Returns the judgments of text queries as files of benchmarks in the format of BEIR, with a folder
 * for each index.
 *
 * @returns {{files: Object<string, string>, num_exported: number, num_left_out: number}} Contents by
 *   path, and numbers of judgments. Those of other queries, and of ids with tabs or line breaks,
 *   which the format cannot contain, are left out.
 */
function exported(all) {
  const files = {};
  const numbers = { num_exported: 0, num_left_out: 0 };
  for (const [id, entry] of Object.entries(all)) {
    const grades = Object.entries(entry.grades);
    const valid = isText(id, entry) ? grades.filter(([item]) => !/[\t\r\n]/.test(item)) : [];
    numbers.num_exported += valid.length;
    numbers.num_left_out += grades.length - valid.length;
    if (!valid.length) continue;
    const folder = entry.index.replaceAll(/[^\w.-]/g, "_");
    const [queries, qrels] = [`${folder}/queries.jsonl`, `${folder}/qrels/test.tsv`];
    files[queries] = (files[queries] ?? "") + `${JSON.stringify({ _id: id, text: entry.text })}\n`;
    files[qrels] ??= "query-id\tcorpus-id\tscore\n";
    files[qrels] += valid.map(([item, grade]) => `${id}\t${item}\t${grade}\n`).join("");
  }
  return { files, ...numbers };
}

/** Judgments of one query, with buttons for its hits. */
export class Judge {
  constructor(state, attachment) {
    this.id = queryId(state, attachment);
    const [kind] = Object.keys(attachment ?? {});
    this.entry = { text: state.q.trim() || state.item || kind, index: state.index };
  }

  grade(itemId) {
    return judgments()[this.id]?.grades[itemId];
  }

  set(itemId, grade) {
    const all = judgments();
    const entry = all[this.id] ?? { ...this.entry, grades: {} };
    if (grade === undefined) delete entry.grades[itemId];
    else entry.grades[itemId] = grade;
    if (Object.keys(entry.grades).length) all[this.id] = entry;
    else delete all[this.id];
    localStorage.setItem(STORE, JSON.stringify(all));
    showExport();
  }

  /** Returns the two buttons that judge a hit. A second click removes the judgment. */
  buttons(hit) {
    const group = h("span.judge", { role: "group", "aria-label": "Relevance" });
    const update = () => {
      const grade = this.grade(hit.item_id);
      for (const button of group.children) {
        button.setAttribute("aria-pressed", String(Number(button.value) === grade));
      }
    };
    for (const [grade, label, sign] of [
      [1, "Relevant", "✓"],
      [0, "Not relevant", "✗"],
    ]) {
      const toggle = () => {
        this.set(hit.item_id, this.grade(hit.item_id) === grade ? undefined : grade);
        update();
      };
      const attributes = { type: "button", value: grade, "aria-label": label, title: label };
      group.append(h("button.icon", { ...attributes, on: { click: toggle } }, sign));
    }
    update();
    return group;
  }
}

/** Shows or hides the button that exports the judgments, and says what it leaves out. */
function showExport() {
  const { num_exported: num, num_left_out: rest } = exported(judgments());
  const button = $("judge-export");
  button.hidden = !num;
  button.textContent = `Export ${num} ${num === 1 ? "judgment" : "judgments"}`;
  const note = $("judge-note");
  note.hidden = !rest;
  const judged = rest === 1 ? "1 judgment" : `${rest} judgments`;
  note.textContent = `${judged} of file or item queries not exported`;
}

export function setUpExport() {
  $("judge-export").addEventListener("click", () => {
    download("judgments.zip", zip(exported(judgments()).files));
  });
  showExport();
}
