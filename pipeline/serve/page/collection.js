/** View of a map of the collection: its items, at the positions of a projection of their vectors. */

import { getText } from "./api.js";
import { h, replace } from "./dom.js";
import { count, parseCsv } from "./text.js";

/** Colours of the most frequent sources (Okabe and Ito, distinct for everyone), and of the others. */
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
const OTHER = "#8a8f94";
/** Distance from a point, and of the corners of a selected area, in pixels. */
const REACH = 12;
const STEP = 8;
/** Maximum number of corners of a selected area, and of the selected items that are listed. */
const MAX_CORNERS = 40;
const MAX_LISTED = 24;

const pointsByIndex = new Map();

/** Returns the items of an index with their positions: {item_id, title, source, modality, x, y}. */
async function loadPoints(index, signal) {
  if (!pointsByIndex.has(index)) {
    const text = await getText(`v1/indexes/${encodeURIComponent(index)}/map`, signal);
    const points = parseCsv(text).map((row) => ({ ...row, x: Number(row.x), y: Number(row.y) }));
    pointsByIndex.set(index, points);
  }
  return pointsByIndex.get(index);
}

/** Returns the ids of the items in an area of the map, or null without an area. */
export async function idsInArea(index, area, signal) {
  if (!area) return null;
  return inside(await loadPoints(index, signal), parseArea(area)).map(({ item_id: id }) => id);
}

/** Parses "x,y,x,y,…" into corners [x, y]. */
function parseArea(area) {
  const numbers = area.split(",").map(Number);
  const corners = [];
  for (let i = 0; i + 1 < numbers.length; i += 2) corners.push([numbers[i], numbers[i + 1]]);
  return corners;
}

/** Formats corners, of which at most `MAX_CORNERS` are retained. */
export function formatArea(corners) {
  const every = Math.ceil(corners.length / MAX_CORNERS);
  return corners.filter((_, i) => i % every === 0).flat().map((value) => value.toFixed(3)).join(",");
}

/** Returns the points inside a polygon: those from which a ray crosses its edges an odd number of times. */
export function inside(points, corners) {
  return points.filter(({ x, y }) => {
    let isInside = false;
    corners.forEach(([x1, y1], i) => {
      const [x0, y0] = corners.at(i - 1);
      if (y0 > y !== y1 > y && x < ((x1 - x0) * (y - y0)) / (y1 - y0) + x0) isInside = !isInside;
    });
    return isInside;
  });
}

/**
 * The view.
 *
 * @param {object} page
 * @param {function} page.open Opens an item.
 * @param {function} page.select Changes the selected area in the address.
 * @param {function} page.search Shows the search in the selected area.
 */
export class CollectionMap {
  #page;
  #points = [];
  #colours = new Map();
  #canvas;
  #label;
  #selection;
  #corners = [];
  #current = null;

  constructor(page) {
    this.#page = page;
    window.addEventListener("resize", () => this.#canvas?.isConnected && this.#draw());
  }

  /** Shows the map of an index with `num_items` items. */
  async show(root, { index, area }, numItems, signal) {
    this.#points = await loadPoints(index, signal);
    signal.throwIfAborted();
    this.#corners = area ? parseArea(area) : [];
    this.#current = null;
    this.#canvas = h("canvas.collection", {
      tabindex: "0",
      role: "application",
      "aria-label": "Map of the items: arrow keys move between them, Enter opens one",
    });
    this.#label = h("p.note", { role: "status" });
    this.#selection = h("div.selected-items");
    const number = this.#points.length;
    const shown = number < numItems ? `${count(number)} of ${count(numItems)} items` : `${count(number)} items`;
    replace(
      root,
      h("h2", {}, `Map of ${index}`),
      h(
        "p.note",
        {},
        `${shown}: similar items are near each other (the first two principal components of their ` +
          "vectors). Click an item to open it, or draw around items to search among them.",
      ),
      this.#legend(),
      this.#canvas,
      this.#label,
      this.#selection,
    );
    this.#listen();
    this.#select();
  }

  /** Assigns colours to the sources, and explains them. */
  #legend() {
    const counts = new Map();
    for (const { source } of this.#points) counts.set(source, (counts.get(source) ?? 0) + 1);
    const sources = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    this.#colours = new Map(sources.map(([source], i) => [source, COLOURS[i] ?? OTHER]));
    const entry = (name, number, fill) => {
      const dot = h("span.dot", { "aria-hidden": "true" });
      dot.style.backgroundColor = fill;
      return h("li", {}, dot, name, h("span.count", {}, count(number)));
    };
    const rest = sources.slice(COLOURS.length).reduce((sum, [, number]) => sum + number, 0);
    return h(
      "ul.plot-legend",
      { "aria-label": "Sources" },
      sources.slice(0, COLOURS.length).map(([name, number], i) => entry(name, number, COLOURS[i])),
      rest ? entry("other sources", rest, OTHER) : null,
    );
  }

  /** Returns the position of a point on the canvas, in pixels. */
  #place({ x, y }) {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = [width / 2 - REACH, height / 2 - REACH];
    return [width / 2 + x * scale[0], height / 2 - y * scale[1]];
  }

  /** Returns the coordinates of a pointer, in those of the points. */
  #coordinates(event) {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const box = this.#canvas.getBoundingClientRect();
    return [
      (event.clientX - box.left - width / 2) / (width / 2 - REACH),
      (height / 2 - (event.clientY - box.top)) / (height / 2 - REACH),
    ];
  }

  /** Returns the point that is nearest to a position in pixels, among those that pass a test. */
  #nearest([left, top], limit, isCandidate = () => true) {
    let [best, shortest] = [null, limit];
    for (const point of this.#points) {
      const [x, y] = this.#place(point);
      const distance = Math.hypot(x - left, y - top);
      if (distance < shortest && isCandidate(x - left, y - top)) [best, shortest] = [point, distance];
    }
    return best;
  }

  #listen() {
    const canvas = this.#canvas;
    let start = null;
    let corners = [];
    const pixels = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      start = pixels(event);
      corners = [];
      if (event.pointerType !== "touch") canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!start || event.pointerType === "touch") {
        this.#point(this.#nearest(pixels(event), REACH));
        return;
      }
      const [x, y] = pixels(event);
      if (Math.hypot(x - start[0], y - start[1]) < STEP) return;
      if (!corners.length) corners.push(this.#coordinates(event));
      start = [x, y];
      corners.push(this.#coordinates(event));
      this.#corners = corners;
      this.#draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (!start) return;
      start = null;
      const point = this.#nearest(pixels(event), REACH);
      if (corners.length > 2) {
        this.#corners = parseArea(formatArea(corners));
        this.#page.select(formatArea(corners));
        this.#select();
      } else if (point) this.#page.open(point.item_id);
      else if (this.#corners.length) this.#clear();
    });
    canvas.addEventListener("pointercancel", () => (start = null));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    if (event.key === "Enter" && this.#current) this.#page.open(this.#current.item_id);
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const from = this.#current ? this.#place(this.#current) : [width / 2, height / 2];
    const isAhead = (x, y) => {
      const along = x * step[0] + y * step[1];
      return along > 0 && Math.abs(x * step[1] + y * step[0]) <= along;
    };
    this.#point(this.#nearest(from, Infinity, isAhead) ?? this.#current);
  }

  /** Marks an item, or none (null), and shows its title. */
  #point(point) {
    if (point === this.#current) return;
    this.#current = point;
    this.#canvas.classList.toggle("on-item", Boolean(point));
    this.#label.textContent = point ? `${name(point)} · ${point.source}` : "";
    this.#draw();
  }

  #clear() {
    this.#corners = [];
    this.#page.select("");
    this.#select();
  }

  /** Lists the items of the selected area. */
  #select() {
    this.#draw();
    if (!this.#corners.length) {
      this.#selection.replaceChildren();
      return;
    }
    const found = inside(this.#points, this.#corners);
    const button = (kind, label, click) => h(kind, { type: "button", on: { click } }, label);
    const items = found.slice(0, MAX_LISTED).map((point) =>
      h("li", {}, button("button.link", name(point), () => this.#page.open(point.item_id))),
    );
    const more = found.length - items.length;
    replace(
      this.#selection,
      h(
        "div.row.wrap",
        {},
        h("h3", {}, `${count(found.length)} ${found.length === 1 ? "item" : "items"} selected`),
        found.length ? button("button.primary", "Search among them", () => this.#page.search()) : null,
        button("button.quiet-button", "Clear", () => this.#clear()),
      ),
      h("ul", {}, items, more > 0 ? h("li.note", {}, `and ${count(more)} more`) : null),
    );
  }

  #draw() {
    const canvas = this.#canvas;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const circle = (point, radius) => {
      context.beginPath();
      context.arc(...this.#place(point), radius, 0, 2 * Math.PI);
    };
    const isSelected = new Set(inside(this.#points, this.#corners));
    const radius = this.#points.length > 2000 ? 2 : 4;
    for (const point of this.#points) {
      context.globalAlpha = this.#corners.length && !isSelected.has(point) ? 0.2 : 0.8;
      context.fillStyle = this.#colours.get(point.source);
      circle(point, radius);
      context.fill();
    }
    context.globalAlpha = 1;
    context.strokeStyle = getComputedStyle(canvas).color;
    if (this.#current) {
      context.lineWidth = 2;
      circle(this.#current, radius + 4);
      context.stroke();
    }
    if (this.#corners.length) {
      context.lineWidth = 1.5;
      context.setLineDash([5, 4]);
      context.beginPath();
      for (const [x, y] of this.#corners) context.lineTo(...this.#place({ x, y }));
      context.closePath();
      context.stroke();
    }
  }
}

function name({ title, item_id: id }) {
  return title ? `${title} (${id})` : id;
}
