/** Start page of an index: example queries and some of its items, before the first query. */

import { previewUrl } from "./api.js";
import { h } from "./dom.js";
import { hasImage } from "./hits.js";

const THUMBNAIL_WIDTH = 240;

/** Returns a link that changes the state of the page, but opens in a new tab as any other link. */
export function stateLink(name, { href, go, ...attributes }, ...children) {
  const click = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go();
  };
  return h(name, { href, ...attributes, on: { click } }, ...children);
}

/**
 * Returns a grid of items.
 *
 * @param {object[]} samples Items of the index, see the facets of the API.
 * @param {object} view
 * @param {string} view.index Name of the index.
 * @param {Media} view.media Loader of previews.
 * @param {function} view.link Returns the `href` and `go` of the link of an item, or null if items of
 *   the index cannot be opened without a query.
 */
export function sampleGrid(samples, view) {
  if (!samples.length) return null;
  const tiles = samples.map((sample) => {
    const link = view.link(sample.item_id);
    const content = [visual(sample, view), h("span.tile-title", {}, sample.title || sample.item_id)];
    const attributes = { title: sample.title || sample.item_id };
    return h(
      "li",
      { dataset: { sample: sample.item_id, modality: sample.modality } },
      link ? stateLink("a.tile", { ...link, ...attributes }, content) : h("span.tile", attributes, content),
    );
  });
  return h("ul.samples", { "aria-label": "Some of the items" }, tiles);
}

/** Returns the thumbnail of an item, or a sign of its modality. */
function visual({ item_id, modality }, view) {
  const sign = (text) => h("span.tile-sign", { "aria-hidden": "true" }, text);
  if (!hasImage({ modality })) return sign(modality === "audio" ? "♪" : "¶");
  const image = h("img", { alt: "", loading: "lazy", decoding: "async" });
  const url = previewUrl(view.index, item_id, { width: THUMBNAIL_WIDTH });
  view.media.load(image, url, () => image.replaceWith(sign("▢")));
  return image;
}
