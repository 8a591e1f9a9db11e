/** Relevance judgments of hits, kept in the browser and exported as qrels. */

import { $, download, h } from "./dom.js";

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
export function queryId(state, image = null) {
  const part = image ? `${image.length} ${image.slice(-64)}` : "";
  const text = [state.index, state.q.trim(), state.item, state.box, state.times, part].join("\n");
  let hash = 0xcbf29ce484222325n; // FNV-1a
  for (const byte of new TextEncoder().encode(text)) {
    hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  }
  return hash.toString(16).padStart(16, "0");
}

/** Returns lines of TREC qrels. Ids with white space, which the format cannot contain, are quoted. */
export function qrels(all) {
  const lines = [];
  for (const [query, { grades }] of Object.entries(all)) {
    for (const [item, grade] of Object.entries(grades)) {
      const id = /\s/.test(item) ? JSON.stringify(item).replaceAll(" ", "\\u0020") : item;
      lines.push(`${query} 0 ${id} ${grade}`);
    }
  }
  return lines.join("\n") + (lines.length ? "\n" : "");
}

/** Returns lines of queries as in BEIR collections. */
export function queryLines(all) {
  return Object.entries(all)
    .map(([id, { text }]) => `${JSON.stringify({ _id: id, text })}\n`)
    .join("");
}

/** Judgments of one query, with buttons for its hits. */
export class Judge {
  constructor(state, image) {
    this.id = queryId(state, image);
    this.entry = { text: state.q.trim() || state.item || "image", index: state.index };
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

/** Shows or hides the button that exports the judgments. */
export function showExport() {
  const all = judgments();
  const num = Object.values(all).reduce((sum, { grades }) => sum + Object.keys(grades).length, 0);
  const button = $("judge-export");
  button.hidden = !num;
  button.textContent = `Export ${num} ${num === 1 ? "judgment" : "judgments"}`;
}

export function setUpExport() {
  $("judge-export").addEventListener("click", () => {
    const all = judgments();
    download("qrels.txt", qrels(all));
    download("queries.jsonl", queryLines(all), "application/jsonl");
  });
  showExport();
}
