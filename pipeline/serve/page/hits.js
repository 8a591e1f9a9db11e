/** Cards of the hits of a search. */

import { previewUrl } from "./api.js";
import { h, marked, placeBox } from "./dom.js";
import { highlights, place, snippet, time } from "./text.js";

/** Number of frames of a video, and their width in pixels. */
const NUM_FRAMES = 3;
const FRAME_WIDTH = 240;
const THUMBNAIL_WIDTH = 360;

/**
 * Returns the card of a hit.
 *
 * @param {object} hit Hit of the API.
 * @param {object} view
 * @param {string} view.index Name of the index, or that of the member that describes the hit.
 * @param {Media} view.media Loader of previews.
 * @param {function} view.open Opens the hit in the item view.
 * @param {function} view.similar Searches with an item, or a part of it, as the query.
 * @param {object} view.judge Judgments of the current query, see judge.js.
 * @param {{kind: string, by: number, from: number|null}} [view.change] Change of the rank.
 * @param {string} [view.badge] By what the hit was found, if not by its content.
 */
export function hitCard(hit, view) {
  const name = title(hit);
  const href = view.href(hit);
  const open = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    view.open(hit);
  };
  const body = h(
    "div.hit-body",
    {},
    h(
      "h3.hit-title",
      {},
      h("span.rank", { "aria-hidden": "true" }, hit.rank),
      h("a", { href, on: { click: open } }, name),
      view.change ? changeBadge(view.change) : null,
    ),
    h(
      "p.meta",
      {},
      hit.modality ? h("span.badge", {}, hit.modality) : null,
      view.badge ? h("span.badge", {}, view.badge) : null,
      place(hit.span) ? h("span", {}, place(hit.span)) : null,
      h("span.id", { title: hit.item_id }, hit.item_id),
    ),
    hit.text ? h("p.snippet", {}, marked(snippet(hit.text, highlights(hit)))) : null,
    h("p.scores", {}, scores(hit)),
    h(
      "div.actions",
      {},
      view.canSearchItems
        ? h(
            "button.link",
            { type: "button", on: { click: () => view.similar(hit) } },
            "More like this",
          )
        : null,
      view.judge.buttons(hit),
    ),
  );
  const visual = preview(hit, view, open, href);
  const card = h("li.hit", { dataset: { item: hit.item_id, modality: hit.modality ?? "" } });
  if (visual) card.append(visual);
  else card.classList.add("text-only");
  card.append(body);
  return card;
}

/** Checks whether an item has an image: a page, an image or the frames of a video. */
export function hasImage({ modality }) {
  return ["page", "image", "video"].includes(modality);
}

/** Returns the title of a hit, or its id if it has none. */
export function title(hit) {
  return hit.title || hit.parent_id || hit.item_id;
}

/** Returns the components of the score of a hit as nodes. */
export function scores(hit) {
  const parts = hit.parts ?? {};
  const shown = [h("span.score", {}, h("b", {}, number(hit.score)), " score")];
  if (hit.first_stage) {
    const first = hit.first_stage;
    shown.push(h("span", {}, `first stage: rank ${first.rank}, ${number(first.score)}`));
  }
  if (parts.maxsim !== null && parts.maxsim !== undefined && parts.maxsim !== hit.score) {
    shown.push(h("span", {}, `MaxSim ${number(parts.maxsim)}`));
  }
  if (parts.maxsim_mean !== null && parts.maxsim_mean !== undefined) {
    shown.push(h("span", {}, `${number(parts.maxsim_mean)} per token`));
  }
  if (parts.single_vector !== null && parts.single_vector !== undefined) {
    shown.push(h("span", {}, `single vector ${number(parts.single_vector)}`));
  }
  if (parts.bm25 !== null && parts.bm25 !== undefined) {
    shown.push(h("span", {}, `BM25 ${number(parts.bm25)}`));
  }
  if (hit.rerank?.score !== null && hit.rerank?.score !== undefined) {
    shown.push(h("span", {}, `reranker ${number(hit.rerank.score)}`));
  }
  for (const { member, rank, score, value } of hit.members ?? []) {
    const title = `Rank ${rank} in ${member}, whose score ${number(score)} adds ${number(value)}`;
    shown.push(h("span.member", { title }, h("b", {}, member), ` #${rank}: ${number(score)} → ${number(value)}`));
  }
  return shown;
}

function number(value) {
  return value.toFixed(Math.abs(value) >= 100 ? 1 : 3);
}

/** Returns a badge for the change of a rank relative to the other column of a comparison. */
function changeBadge({ kind, by, from }) {
  const texts = {
    same: ["=", "same rank as on the left"],
    up: [`▲ ${by}`, `up ${by} from rank ${from} on the left`],
    down: [`▼ ${by}`, `down ${by} from rank ${from} on the left`],
    new: ["new", "not among the hits on the left"],
  };
  const [label, description] = texts[kind];
  return h(
    `span.change.${kind}`,
    { title: description },
    h("span", { "aria-hidden": "true" }, label),
    h("span.visually-hidden", {}, description),
  );
}

function preview(hit, view, open, href) {
  const link = (...children) =>
    h("a.thumb", { href, tabindex: "-1", "aria-hidden": "true", on: { click: open } }, ...children);
  if (hit.modality === "page" || hit.modality === "image") {
    const image = h("img", { alt: "", loading: "lazy", decoding: "async" });
    const holder = h("span.frame", {}, image);
    for (const passage of hit.passages ?? []) {
      if (passage.box) holder.append(placeBox(h("span.box"), passage.box));
    }
    const url = previewUrl(view.index, hit.item_id, { width: THUMBNAIL_WIDTH });
    view.media.load(image, url, () => missing(holder, "no preview"));
    return link(holder);
  }
  if (hit.modality === "video" && hit.span) {
    const frames = frameTimes(hit).map((seconds) => {
      const image = h("img", { alt: "", loading: "lazy", decoding: "async" });
      const frame = h("span.frame", {}, image, h("span.time", {}, time(seconds)));
      const url = previewUrl(view.index, hit.item_id, { seconds, width: FRAME_WIDTH });
      view.media.load(image, url, () => missing(frame, time(seconds)));
      return frame;
    });
    return link(h("span.strip", {}, frames), timeBar(hit));
  }
  if (hit.modality === "audio" && hit.span) {
    return link(h("span.wave", {}, "♪"), timeBar(hit));
  }
  return null;
}

function missing(holder, text) {
  holder.replaceChildren(h("span.missing", {}, text));
}

/** Returns times of frames of a video: those of the best passages, then evenly spaced ones. */
function frameTimes(hit) {
  const { start, end } = hit.span;
  const found = (hit.passages ?? []).filter((p) => p.times).map((p) => mean(p.times));
  for (let i = 0; found.length < NUM_FRAMES; i++) {
    found.push(start + ((end - start) * (i + 0.5)) / NUM_FRAMES);
  }
  const inside = found.slice(0, NUM_FRAMES).map((t) => Math.min(Math.max(t, start), end));
  return [...new Set(inside.map((t) => Number(t.toFixed(3))))].sort((a, b) => a - b);
}

/** Returns a bar with the times of the best passages of a hit. */
function timeBar(hit) {
  const { start, end } = hit.span;
  const bar = h("span.time-bar");
  for (const passage of hit.passages ?? []) {
    if (!passage.times || end <= start) continue;
    const [from, to] = passage.times.map((t) => (t - start) / (end - start));
    bar.append(placeBox(h("span.hot"), [from, 0, Math.max(to, from + 0.02), 1]));
  }
  return h("span.time-row", {}, time(start), bar, time(end));
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
