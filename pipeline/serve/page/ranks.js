/** Differences between two rankings of the same query, and their merging. */

/** Returns the share of the first k ids of one ranking that the other has among its first k. */
export function overlap(one, other, k) {
  const first = one.slice(0, k);
  const rest = new Set(other.slice(0, k));
  const most = Math.max(first.length, rest.size);
  return most ? first.filter((id) => rest.has(id)).length / most : 1;
}

/**
 * Returns the change of each id of `ranking` relative to `reference`.
 *
 * @returns {Map<string, {kind: "same"|"up"|"down"|"new", by: number, from: number|null}>}
 */
export function changes(ranking, reference) {
  const before = new Map(reference.map((id, i) => [id, i + 1]));
  const result = new Map();
  ranking.forEach((id, i) => {
    const from = before.get(id) ?? null;
    const by = from === null ? 0 : from - (i + 1);
    const kind = from === null ? "new" : by > 0 ? "up" : by < 0 ? "down" : "same";
    result.set(id, { kind, by: Math.abs(by), from });
  });
  return result;
}

/** Returns the ids that `reference` has and `ranking` lacks. */
export function lost(ranking, reference) {
  const present = new Set(ranking);
  return reference.filter((id) => !present.has(id));
}

/**
 * Merges rankings of one query by score. An item, or a document if hits are grouped by documents, has
 * the best of its scores, so the first k hits of all rankings determine the first k merged ones.
 */
export function merge(rankings, id = "item_id") {
  const best = new Map();
  for (const hit of rankings.flat()) {
    const other = best.get(hit[id]);
    if (!other || hit.score > other.score) best.set(hit[id], hit);
  }
  return [...best.values()].sort((a, b) => b.score - a.score);
}

/**
 * Returns the first hit of each ranking, then the second ones, and so on. Scores of different encoders
 * are not comparable.
 */
export function alternate(rankings, id = "item_id") {
  const found = new Map();
  const longest = Math.max(...rankings.map((hits) => hits.length));
  for (let i = 0; i < longest; i++) {
    for (const hit of rankings.flatMap((hits) => hits.slice(i, i + 1))) {
      if (!found.has(hit[id])) found.set(hit[id], hit);
    }
  }
  return [...found.values()];
}

/** Returns Kendall's tau over the ids that both rankings have, or null for fewer than two. */
export function kendall(one, other) {
  const rank = new Map(other.map((id, i) => [id, i]));
  const common = one.filter((id) => rank.has(id)).map((id) => rank.get(id));
  const pairs = (common.length * (common.length - 1)) / 2;
  if (!pairs) return null;
  let sum = 0;
  for (let i = 0; i < common.length; i++) {
    for (let j = i + 1; j < common.length; j++) sum += common[i] < common[j] ? 1 : -1;
  }
  return sum / pairs;
}

/**
 * Returns the points that no other point of at most the same size equals or exceeds. Ranks (MdR) are
 * better if they are lower.
 */
export function pareto(points, measure = "") {
  const sign = measure === "MdR" ? -1 : 1;
  const sorted = [...points].sort((a, b) => a.size - b.size || sign * (b.quality - a.quality));
  const front = [];
  let best = -Infinity;
  for (const point of sorted) {
    if (sign * point.quality > best) {
      front.push(point);
      best = sign * point.quality;
    }
  }
  return front;
}
