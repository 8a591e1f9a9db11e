/** Plot of quality against stored bytes per item. */

import { h, svg } from "./dom.js";
import { bytes } from "./text.js";

const PLOT = { width: 720, height: 380, left: 74, right: 20, top: 24, bottom: 48 };
/** Maximum number of intervals between ticks of the quality. */
const MAX_INTERVALS = 6;
/** Mean width and height of the characters of a label, and the radius of a point. */
const CHARACTER = { width: 6.2, height: 13 };
const RADIUS = 6;

/**
 * Draws points with axes, labels of some of them and a legend. Each point can be focused, and its
 * values are shown.
 *
 * @param {{name: string, size: number, quality: number, isReference: boolean}[]} points
 * @param {object[]} front The points on the Pareto front.
 * @param {string} measure Name of the quality.
 */
export function plot(points, front, measure) {
  const { width, height, left, right, top, bottom } = PLOT;
  const logs = points.map(({ size }) => Math.log10(size));
  const [x0, x1] = [Math.min(...logs) - 0.1, Math.max(...logs) + 0.1];
  const ticks = niceTicks(points.map(({ quality }) => quality));
  const [y0, y1] = [ticks[0], ticks.at(-1)];
  const x = (size) => left + ((Math.log10(size) - x0) / (x1 - x0)) * (width - left - right);
  const y = (quality) => height - bottom - ((quality - y0) / (y1 - y0)) * (height - top - bottom);
  const axis = (text, attributes) =>
    svg("text", { class: "axis", "text-anchor": "middle", ...attributes }, text);
  const children = [
    axis("stored bytes per item (logarithmic)", { x: (left + width - right) / 2, y: height - 6 }),
    axis(measure, { transform: `translate(14 ${(top + height - bottom) / 2}) rotate(-90)` }),
  ];
  for (const size of sizeTicks(x0, x1)) {
    children.push(
      svg("line", { class: "grid", x1: x(size), x2: x(size), y1: top, y2: height - bottom }),
      svg("text", { class: "tick", x: x(size), y: height - bottom + 18, "text-anchor": "middle" },
        bytes(size)),
    );
  }
  const digits = Math.max(2, Math.ceil(-Math.log10(ticks[1] - ticks[0]) - 1e-9));
  for (const quality of ticks) {
    children.push(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(quality), y2: y(quality) }),
      svg("text", { class: "tick", x: left - 8, y: y(quality) + 4, "text-anchor": "end" },
        quality.toFixed(digits)),
    );
  }
  children.push(
    svg("polyline", {
      class: "front-line",
      points: front.map(({ size, quality }) => `${x(size)},${y(quality)}`).join(" "),
    }),
  );
  const values = svg("text", { class: "plot-label", x: left, y: top - 9 });
  const kind = (point) =>
    `point${front.includes(point) ? " front" : ""}${point.isReference ? " reference" : ""}`;
  for (const point of points) {
    const { name, size, quality } = point;
    const text = `${name}: ${measure} ${quality.toFixed(3)}, ${bytes(size)}`;
    const show = () => (values.textContent = text);
    children.push(
      svg(
        "circle",
        {
          class: kind(point),
          cx: x(size),
          cy: y(quality),
          r: RADIUS,
          tabindex: 0,
          role: "img",
          "aria-label": text,
          on: { pointerenter: show, focus: show },
        },
        svg("title", {}, text),
      ),
    );
  }
  const placed = points.map((point) => ({ ...point, x: x(point.size), y: y(point.quality) }));
  const labelled = placed.filter((_, i) => front.includes(points[i]) || points[i].isReference);
  for (const { text, ...attributes } of labels(labelled, placed)) {
    children.push(svg("text", { class: "name", "aria-hidden": "true", ...attributes }, text));
  }
  return [
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${measure} by stored bytes` },
      children,
      values,
    ),
    legend(measure),
  ];
}

/** Explains the colours of the points and the star of the table. */
function legend(measure) {
  const entry = (kind, text) => {
    const circle = svg("circle", { class: `point ${kind}`, cx: 8, cy: 8, r: RADIUS });
    return h("li", {}, svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, circle), text);
  };
  return h(
    "ul.plot-legend",
    {},
    entry("front", `On the Pareto front (★ in the table): no row with at most as many bytes has a ` +
      `higher ${measure}`),
    entry("", "Other rows"),
    entry("reference", "Reference, with which the other rows are compared"),
  );
}

/**
 * Returns ticks at multiples of 1, 2 or 5 times a power of ten. They enclose the values, and stay in
 * [0, 1] if the values do.
 */
export function niceTicks(values) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (high - low < 0.01) {
    const isShare = low >= 0 && high <= 1;
    [low, high] = [low - 0.02, high + 0.02];
    if (isShare) [low, high] = [Math.max(0, low), Math.min(1, high)];
  }
  const power = 10 ** Math.floor(Math.log10((high - low) / MAX_INTERVALS));
  // Ticks are counted in units of the smallest step, because sums of decimals are not exact.
  for (const step of [1, 2, 5, 10, 20, 50]) {
    const unit = step * power;
    const [first, last] = [Math.floor(low / unit + 1e-9), Math.ceil(high / unit - 1e-9)];
    if (last - first > MAX_INTERVALS) continue;
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * unit).toFixed(9)));
  }
  return [low, high];
}

/** Returns sizes of 1, 2 or 5 times a power of ten inside a range of logarithms. */
function sizeTicks(low, high) {
  const found = [];
  const steps = high - low > 2.5 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 5];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const step of steps) {
      const size = step * 10 ** power;
      if (Math.log10(size) >= low && Math.log10(size) <= high) found.push(size);
    }
  }
  return found;
}

/** Returns the labels of points, each at the first position that is free, or none if none is. */
function labels(labelled, points) {
  const taken = points.map(({ x, y }) => [x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS]);
  const found = [];
  for (const { name, x, y } of labelled) {
    const gap = RADIUS + 4;
    const length = name.length * CHARACTER.width;
    const half = length / 2;
    const free = [
      { anchor: "middle", x, y: y - gap, from: x - half },
      { anchor: "start", x: x + gap, y: y + 4, from: x + gap },
      { anchor: "end", x: x - gap, y: y + 4, from: x - gap - length },
      { anchor: "middle", x, y: y + gap + 9, from: x - half },
    ].find((place) => {
      const box = [place.from, place.y - CHARACTER.height + 3, place.from + length, place.y + 3];
      const isInside =
        box[0] >= PLOT.left - 4 && box[2] <= PLOT.width && box[1] >= PLOT.top - 6 &&
        box[3] <= PLOT.height - PLOT.bottom;
      if (!isInside || taken.some((other) => intersect(box, other))) return false;
      taken.push(box);
      return true;
    });
    if (free) found.push({ text: name, x: free.x, y: free.y, "text-anchor": free.anchor });
  }
  return found;
}

function intersect(one, other) {
  return one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];
}
