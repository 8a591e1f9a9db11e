/** Item view: an item with its similarity map, in one or in two representations. */

import { Media, getBlob, getJson, mediaUrl, previewUrl, search, segment } from "./api.js";
import {
  contributionRange,
  css,
  position,
  similarityRange,
  textColour,
  wordRange,
} from "./colours.js";
import { $, append, copyText, download, h, placeBox, replace } from "./dom.js";
import { hasImage, scores, title } from "./hits.js";
import {
  drawBoxes,
  drawLegend,
  drawRegions,
  drawStrip,
  hasSharedVectors,
  hasVector,
  isVisible,
  mappedText,
  shownWords,
  wordAt,
} from "./map.js";
import { searchBody } from "./state.js";
import { asCurl, asPython, metadataRows, place, time } from "./text.js";

/** Minimum width and height of a selected region, as a fraction of the image. */
const MIN_REGION = 0.01;
/** Step by which keys move the edges of a region, as a fraction of the image. */
const REGION_STEP = 0.02;
const PAGE_WIDTH = 1600;
/** Images that are narrower, in pixels, are enlarged without smoothing. */
const SMALL_WIDTH = 240;
/** Number of similar items, and the width of their previews in pixels. */
const NUM_NEIGHBOURS = 8;
const NEIGHBOUR_WIDTH = 160;
/** Factors by which images are enlarged. */
const ZOOMS = [1, 1.5, 2, 3, 4];

/**
 * Item view in a modal dialog.
 *
 * @param {object} page
 * @param {function} page.close Called when the user closes the view.
 * @param {function} page.step Opens the previous (-1) or the next (1) hit.
 * @param {function} page.open Opens an item.
 * @param {function} page.similar Searches with an item, or a part of it, as the query.
 */
export class Viewer {
  #dialog = $("viewer");
  #page;
  #media = new Media();
  #controller = new AbortController();
  #panes = [];
  #view = { token: null, pinned: null, opacity: 0.75, selected: null, regions: false };

  constructor(page) {
    this.#page = page;
    this.#dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      page.close();
    });
    this.#dialog.addEventListener("keydown", (event) => this.#onKey(event));
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) page.close();
    });
    window.addEventListener("resize", () => this.isOpen && this.#paint());
  }

  get isOpen() {
    return this.#dialog.open;
  }

  /**
   * Shows an item.
   *
   * @param {object} hit Hit of the item.
   * @param {object} context
   * @param {object} context.state State of the page.
   * @param {object|null} context.attachment Attachment of the query, see `searchBody`.
   * @param {{side: string, label: string, hits: object[]}[]} context.sides Columns, each with a
   *   representation and the hits that share its colour scale.
   * @param {boolean} context.canSearchItems Whether an item can be the query.
   * @param {Judge} context.judge Judgments of the query.
   */
  open(hit, context) {
    this.#reset();
    this.#hit = hit;
    this.#context = context;
    const close = h(
      "button.icon-button",
      { type: "button", "aria-label": "Close", on: { click: () => this.#page.close() } },
      "✕",
    );
    const button = (label, sign, click) =>
      h("button.icon-button", { type: "button", "aria-label": label, on: { click } }, sign);
    const zooms = h(
      "span.zooms",
      { hidden: !hasImage(hit) },
      button("Zoom out", "−", () => this.#zoom(-1)),
      button("Zoom in", "+", () => this.#zoom(1)),
    );
    this.#chips = h("div.chips.tokens", { role: "group", "aria-label": "Query tokens" });
    this.#legend = h("div.legend");
    this.#note = h("p.note", { role: "status" });
    this.#stage = h("div.stage", { class: `stage sides-${context.sides.length}` });
    this.#details = h("div.details");
    replace(
      this.#dialog,
      h(
        "header.viewer-top",
        {},
        h("h2", { id: "viewer-title" }, title(hit)),
        h("span.meta", {}, hit.modality ? h("span.badge", {}, hit.modality) : null, place(hit.span)),
        h("span.spacer"),
        zooms,
        button("Previous hit", "‹", () => this.#page.step(-1)),
        button("Next hit", "›", () => this.#page.step(1)),
        close,
      ),
      h(
        "div.viewer-body",
        {},
        this.#stage,
        h(
          "aside.panel",
          { "aria-label": "Explanation" },
          h(
            "div.steering",
            {},
            h("h3", {}, "Query tokens"),
            this.#chips,
            h("p.hint", {}, "Hover over a token to see its map, click to pin it. Hover over a " +
              "word or patch to see which tokens it serves."),
            this.#legend,
            this.#controls(),
            this.#note,
          ),
          this.#details,
        ),
      ),
    );
    for (const side of context.sides) this.#addPane(side);
    this.#fillDetails();
    if (!this.#dialog.open) this.#dialog.showModal();
    close.focus();
    this.#loadItem();
    this.#loadNeighbours();
    this.#dialog.querySelector(".steering").hidden = this.#isQuery;
    if (!this.#isQuery) this.#panes.forEach((pane) => this.#loadMap(pane));
    this.#reveal();
  }

  close() {
    this.#reset();
    if (this.#dialog.open) this.#dialog.close();
    this.#dialog.replaceChildren();
  }

  // -- parts ------------------------------------------------------------------------------------

  #hit;
  #context;
  #item = null;
  #chips;
  #legend;
  #note;
  #stage;
  #details;
  #player = null;
  #isRevealed = false;
  #zoomLevel = 0;

  #reset() {
    this.#controller.abort();
    this.#controller = new AbortController();
    this.#media.release();
    this.#media = new Media();
    this.#panes = [];
    this.#item = null;
    this.#player = null;
    this.#isRevealed = false;
    this.#zoomLevel = 0;
    Object.assign(this.#view, { token: null, pinned: null, selected: null, regions: false });
  }

  /** Enlarges the images by a number of steps. What is in the middle of a pane stays there. */
  #zoom(by) {
    const images = this.#panes.filter(({ canvas }) => canvas);
    const middles = images.map(({ element, canvas }) => {
      const [pane, stage] = [element, this.#stage].map((other) => other.getBoundingClientRect());
      const bottom = Math.min(pane.bottom, stage.bottom);
      const image = canvas.getBoundingClientRect();
      const x = (pane.left + pane.width / 2 - image.left) / image.width;
      const y = ((Math.max(pane.top, stage.top) + bottom) / 2 - image.top) / image.height;
      return [x, Math.min(y, 1)];
    });
    this.#zoomLevel = Math.min(Math.max(this.#zoomLevel + by, 0), ZOOMS.length - 1);
    this.#stage.classList.toggle("zoomed", this.#zoomLevel > 0);
    this.#stage.style.setProperty("--zoom", ZOOMS[this.#zoomLevel]);
    images.forEach(({ element, canvas }, i) => {
      const [pane, image] = [element, canvas].map((other) => other.getBoundingClientRect());
      const [x, y] = middles[i];
      element.scrollLeft += image.left + x * image.width - pane.left - pane.width / 2;
      element.scrollTop += image.top + y * image.height - pane.top - pane.height / 2;
    });
    this.#paint();
  }

  #controls() {
    const opacity = h("input", {
      type: "range",
      id: "opacity",
      min: "0",
      max: "1",
      step: "0.05",
      value: this.#view.opacity,
    });
    opacity.addEventListener("input", () => {
      this.#view.opacity = Number(opacity.value);
      this.#paint();
    });
    const regions = h("input", { type: "checkbox", id: "regions", disabled: true });
    regions.addEventListener("change", () => {
      this.#view.regions = regions.checked;
      this.#paint();
    });
    return h(
      "div.map-controls",
      {},
      h("label", { for: "opacity" }, "Opacity"),
      opacity,
      h("label.check", { for: "regions" }, regions, "Regions of the stored vectors"),
    );
  }

  /** Enables the regions of the stored vectors if the map of a pane assigns words to vectors. */
  #enableVectorRegions() {
    const regions = this.#dialog.querySelector("#regions");
    regions.disabled = !this.#panes.some((pane) => pane.words.some(hasVector));
    regions.parentElement.title = regions.disabled
      ? "The regions of the vectors of this item are not known in this representation."
      : "";
  }

  /** Adds the image, the player or the text of the item for one representation. */
  #addPane(side) {
    const hit = this.#hit;
    const pane = { ...side, map: null, words: [], canvas: null, text: null, seconds: null };
    pane.element = h("figure.pane");
    if (this.#context.sides.length > 1) {
      pane.element.append(h("figcaption", {}, side.label));
    }
    const isTimed = hit.span?.unit === "seconds";
    const isVisual = hasImage(hit);
    const image = isVisual ? this.#imageArea(pane) : null;
    append(pane.element, [isTimed ? this.#timeArea(pane) : null, pane.frameLabel, image]);
    pane.textArea = h("div.text-area");
    if (hit.text) this.#showText(pane, []);
    pane.element.append(pane.textArea);
    this.#panes.push(pane);
    this.#stage.append(pane.element);
  }

  /** Shows the text of the item with the words of a map and the best passages. */
  #showText(pane, words) {
    const passages = this.#framedPassages(pane);
    pane.text = mappedText(this.#hit.text, words, passages, (word) => this.#select(word));
    replace(pane.textArea, pane.text.paragraph);
  }

  /** Checks whether the item is the query: it matches itself everywhere, which is not shown. */
  get #isQuery() {
    const { item, box, times } = this.#context.state;
    return item === this.#hit.item_id && !box && !times;
  }

  get #bestPassages() {
    return this.#isQuery ? [] : (this.#hit.passages ?? []);
  }

  /** Returns the best passages if they are those of the representation of a pane. */
  #framedPassages(pane) {
    return pane.hits.includes(this.#hit) ? this.#bestPassages : [];
  }

  /** Scrolls to the best passage of a page, an image or a text. */
  #reveal() {
    const frame = this.#stage.querySelector('[data-passage="0"]');
    if (this.#player || this.#isRevealed || !frame) return;
    const image = frame.closest(".image-area")?.querySelector("img");
    if (image && !image.naturalWidth) return; // it is called again when the image is loaded
    this.#isRevealed = true;
    if (frame.getBoundingClientRect().bottom > 0.9 * window.innerHeight) scrollTo(frame);
  }

  /** Highlights a passage, or none (null), in the list and where it is framed. */
  #highlightPassage(number) {
    for (const element of this.#dialog.querySelectorAll("[data-passage]")) {
      element.classList.toggle("active", element.dataset.passage === String(number));
    }
  }

  #imageArea(pane) {
    const hit = this.#hit;
    const isVideo = hit.modality === "video";
    const alt = isVideo ? `Frame of ${title(hit)}` : title(hit);
    const image = h("img", { alt, decoding: "async" });
    pane.canvas = h("canvas", { "aria-hidden": "true" });
    pane.region = h("span.selection", {
      hidden: true,
      tabindex: "0",
      role: "application",
      "aria-label": "Selected region: arrow keys move it, with Shift they resize it, Enter searches",
    });
    const passages = this.#framedPassages(pane);
    pane.frames = passages.map((passage, number) => {
      if (!passage.box) return null;
      const label = passages.length > 1 ? h("span.passage-number", {}, number + 1) : null;
      const frame = h("span.passage-frame", { dataset: { passage: number } }, label);
      return placeBox(frame, clamp(passage.box));
    });
    const area = h(
      `div.image-area.${hit.modality}`,
      {},
      image,
      pane.canvas,
      pane.frames,
      pane.region,
    );
    image.addEventListener("load", () => {
      area.style.setProperty("--width", `${image.naturalWidth}px`);
      area.style.setProperty("--ratio", image.naturalWidth / image.naturalHeight);
      area.classList.toggle("small", image.naturalWidth < SMALL_WIDTH);
      this.#paint();
      this.#reveal();
    });
    pane.image = image;
    const failed = () => {
      area.replaceChildren(h("p.missing", {}, "The image of this item is not available."));
      pane.canvas = null;
    };
    pane.frameLabel = isVideo ? h("p.note.frame-label") : null;
    pane.showFrame = (seconds) => {
      pane.seconds = isVideo ? Math.min(seconds, hit.span.end - 0.1) : null;
      if (isVideo) pane.frameLabel.textContent = `Still frame at ${time(seconds)}, with its map`;
      const parameters = isVideo ? { seconds, width: 960 } : { width: PAGE_WIDTH };
      this.#media.load(image, previewUrl(this.#context.state.index, hit.item_id, parameters), failed);
    };
    pane.showFrame(isVideo ? firstTime(hit) : null);
    pane.canvas.addEventListener("pointermove", (event) => this.#onPointer(pane, event));
    pane.canvas.addEventListener("pointerleave", () => this.#select(null));
    this.#enableRegions(pane);
    return area;
  }

  /** Adds the player and the similarity strip of a video or audio item. */
  #timeArea(pane) {
    const hit = this.#hit;
    const { start, end } = hit.span;
    const isFirst = !this.#panes.length;
    const strip = h("canvas.similarity-strip", {
      role: "slider",
      tabindex: "0",
      "aria-label": "Time",
      "aria-valuemin": start,
      "aria-valuemax": end,
    });
    pane.strip = strip;
    const marker = h("span.marker");
    pane.seek = (seconds, shouldShow = true) => {
      const at = Math.min(Math.max(seconds, start), end);
      pane.time = at;
      marker.style.left = `${(100 * (at - start)) / (end - start || 1)}%`;
      strip.setAttribute("aria-valuenow", at.toFixed(2));
      strip.setAttribute("aria-valuetext", time(at));
      if (pane.showFrame && shouldShow) pane.showFrame(Number(at.toFixed(3)));
    };
    const seekAll = (seconds) => {
      this.#panes.forEach((other) => other.seek?.(seconds));
      if (this.#player) this.#player.currentTime = seconds;
    };
    strip.addEventListener("click", (event) => {
      const box = strip.getBoundingClientRect();
      seekAll(start + ((event.clientX - box.left) / box.width) * (end - start));
    });
    strip.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 0.5, ArrowLeft: -0.5, Home: -Infinity, End: Infinity };
      if (!(event.key in steps)) return;
      event.preventDefault();
      event.stopPropagation();
      seekAll(Math.min(Math.max(pane.time + steps[event.key], start), end));
    });
    const parts = [];
    if (isFirst) {
      const tag = hit.modality === "video" ? "video" : "audio";
      const player = h(tag, { controls: true, preload: "metadata", "aria-label": title(hit) });
      const url = mediaUrl(this.#context.state.index, hit.item_id);
      this.#media.load(player, url, () =>
        player.replaceWith(h("p.missing", {}, "The file of this item is not available.")),
      );
      player.addEventListener("loadedmetadata", () => (player.currentTime = firstTime(hit)), {
        once: true,
      });
      player.addEventListener("timeupdate", () => {
        this.#panes.forEach((other) => other.seek?.(player.currentTime, false));
      });
      this.#player = player;
      parts.push(player);
    }
    parts.push(
      h(
        "div.time-area",
        {},
        h("span.time", {}, time(start)),
        h("span.strip-holder", {}, strip, this.#timeFrames(pane), marker),
        h("span.time", {}, time(end)),
      ),
    );
    pane.seek(firstTime(hit), false);
    return parts.length > 1 ? h("div", {}, parts) : parts[0];
  }

  /** Returns frames of the best passages on the similarity strip. */
  #timeFrames(pane) {
    const { start, end } = this.#hit.span;
    const share = (seconds) => Math.min(1, Math.max(0, (seconds - start) / (end - start || 1)));
    return this.#framedPassages(pane).map(({ times }, number) => {
      if (!times) return null;
      const frame = h("span.passage-frame", { dataset: { passage: number } });
      return placeBox(frame, [share(times[0]), 0, share(times[1]), 1]);
    });
  }

  /** Lets the user draw a rectangle on the image, which becomes the query. */
  #enableRegions(pane) {
    const { canvas, region } = pane;
    let start = null;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const share = (value, low, size) => Math.min(1, Math.max(0, (value - low) / size));
      return [share(event.clientX, box.left, box.width), share(event.clientY, box.top, box.height)];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return; // a touch scrolls
      start = at(event);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!start) return;
      showRegion(region, sorted(start, at(event)));
    });
    canvas.addEventListener("pointerup", (event) => {
      if (!start) return;
      const box = sorted(start, at(event));
      start = null;
      if (box[2] - box[0] < MIN_REGION || box[3] - box[1] < MIN_REGION) {
        region.hidden = true;
        return;
      }
      this.#selectRegion(pane, box);
    });
    region.addEventListener("keydown", (event) => this.#onRegionKey(pane, event));
  }

  #selectRegion(pane, box) {
    pane.box = box;
    showRegion(pane.region, box);
    this.#offerRegion(box, pane.seconds);
  }

  /** Moves the selected region with the arrow keys, or with Shift its right and lower edges. */
  #onRegionKey(pane, event) {
    if (event.key === "Enter") this.#details.querySelector(".region-offer button")?.click();
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const edges = steps[event.key].map((step, axis) => {
      const [low, high] = [pane.box[axis], pane.box[axis + 2]];
      const lowest = event.shiftKey ? low + REGION_STEP - high : -low;
      const by = Math.min(Math.max(step * REGION_STEP, lowest), 1 - high);
      return [event.shiftKey ? low : low + by, high + by];
    });
    this.#selectRegion(pane, [edges[0][0], edges[1][0], edges[0][1], edges[1][1]]);
  }

  /** Selects the middle of the image, for users without a mouse. */
  #startRegion() {
    const pane = this.#panes.find((other) => other.canvas);
    if (!pane) return;
    this.#selectRegion(pane, [0.25, 0.25, 0.75, 0.75]);
    pane.region.focus();
  }

  #offerRegion(box, seconds) {
    const rounded = box.map((value) => Number(value.toFixed(4)));
    const part = { box: rounded };
    if (this.#hit.modality === "video" && seconds !== null) {
      part.times = [Math.max(0, seconds - 0.5), seconds + 0.5].map((t) => Number(t.toFixed(3)));
    }
    const holder = this.#details.querySelector(".region-offer");
    if (!holder || !this.#context.canSearchItems) return;
    const button = h("button.primary", { type: "button" }, "Search with the selected region");
    button.addEventListener("click", () => this.#page.similar(this.#hit, part));
    replace(holder, button);
    button.scrollIntoView({ block: "nearest" });
  }

  #fillDetails() {
    const hit = this.#hit;
    const { state, attachment, sides, canSearchItems, judge } = this.#context;
    const similar = canSearchItems
      ? h(
          "button.quiet-button",
          { type: "button", on: { click: () => this.#page.similar(hit) } },
          "More like this",
        )
      : null;
    const region =
      canSearchItems && this.#panes.some((pane) => pane.canvas)
        ? h(
            "button.quiet-button",
            { type: "button", on: { click: () => this.#startRegion() } },
            "Select a region",
          )
        : null;
    const body = searchBody(state, attachment, sides[0].side);
    const url = new URL("./", document.baseURI).href;
    const copy = (label, text) => {
      const button = h("button.quiet-button", { type: "button" }, label);
      button.addEventListener("click", () => copyText(text(), button));
      return button;
    };
    replace(
      this.#details,
      h("div.region-offer"),
      h("div.row.wrap", {}, similar, region, this.#file(), judge.buttons(hit)),
      h("div.neighbours", { hidden: true, role: "list", "aria-label": "Similar items" }),
      h("h3", {}, "Score"),
      this.#scores(),
      this.#passages(),
      h("h3", {}, "Item"),
      h("dl.item", {}, h("dt", {}, "id"), h("dd", {}, hit.item_id)),
      h("h3", {}, "This search"),
      h(
        "div.row",
        {},
        copy("Copy as curl", () => asCurl(`${url}v1/search`, body, this.#context.hasKey)),
        copy("Copy as Python", () => asPython(url.replace(/\/$/, ""), body, this.#context.hasKey)),
      ),
    );
  }

  /** Returns links to the file of the item, or a button that saves its text. */
  #file() {
    const hit = this.#hit;
    const isFile = hasImage(hit) || hit.modality === "audio";
    const file = (hit.parent_id || hit.item_id).split("/").at(-1);
    const name = isFile ? file : `${file}.txt`;
    const save = (label, load) => {
      const button = h("button.quiet-button", { type: "button" }, label);
      const failed = () => (button.textContent = "The file is not available");
      button.addEventListener("click", () =>
        load().then((content) => download(name, content), failed),
      );
      return button;
    };
    if (!isFile) {
      return hit.text ? save("Download the text", async () => hit.text) : null;
    }
    const url = mediaUrl(this.#context.state.index, hit.item_id);
    // A link cannot send an access key.
    if (this.#context.hasKey) return save("Download", () => getBlob(url));
    const href = hit.modality === "page" ? `${url}#page=${hit.span.start}` : url;
    return [
      h("a.quiet-button", { href, target: "_blank", rel: "noopener" }, "Open the file"),
      h("a.quiet-button", { href: url, download: name }, "Download"),
    ];
  }

  /** Shows the items that are most similar to this one. */
  async #loadNeighbours() {
    const { state, sides, canSearchItems } = this.#context;
    if (!canSearchItems) return;
    const { index, representation } = searchBody(state, null, sides[0].side);
    const body = { index, representation, query: { item: this.#hit.item_id }, k: NUM_NEIGHBOURS + 1 };
    let hits;
    try {
      ({ hits } = await search(body, this.#controller.signal));
    } catch {
      return; // the item has no vectors in this representation, or the view was closed
    }
    const holder = this.#details.querySelector(".neighbours");
    const others = hits.filter((hit) => hit.item_id !== this.#hit.item_id).slice(0, NUM_NEIGHBOURS);
    replace(holder, others.map((hit) => this.#neighbour(hit)));
    holder.hidden = !others.length;
  }

  #neighbour(hit) {
    const label = h("span.label", {}, [title(hit), place(hit.span)].filter(Boolean).join(", "));
    const open = () => this.#page.open(hit.item_id);
    const button = h("button", { type: "button", title: hit.item_id, on: { click: open } }, label);
    if (hasImage(hit)) {
      const image = h("img", { alt: "" });
      const parameters = { width: NEIGHBOUR_WIDTH };
      const url = previewUrl(this.#context.state.index, hit.item_id, parameters);
      this.#media.load(image, url, () => image.remove());
      button.prepend(image);
    }
    return h("div", { role: "listitem" }, button);
  }

  /** Returns the score in each representation. */
  #scores() {
    const { sides } = this.#context;
    if (sides.length === 1) return h("p.scores", {}, scores(this.#hit));
    return sides.map(({ label, hits }) => {
      const hit = hits.find((other) => other.item_id === this.#hit.item_id);
      const found = hit ? [h("span", {}, `rank ${hit.rank}`), scores(hit)] : "not among the hits";
      return h("p.scores", {}, h("b", {}, label), found);
    });
  }

  #passages() {
    const hit = this.#hit;
    const passages = this.#bestPassages;
    if (!passages.length) return null;
    const points = Array.from(hit.text ?? "");
    const rows = passages.map((passage, number) => {
      const [start, end] = passage.span;
      const text = start >= 0 ? points.slice(start, end).join("") : "Region of the image";
      const part = passage.box ? { box: clamp(passage.box) } : {};
      if (passage.times) part.times = passage.times;
      const buttons = [];
      if (this.#context.canSearchItems && (passage.box || passage.times)) {
        buttons.push(
          h(
            "button.link",
            { type: "button", on: { click: () => this.#page.similar(hit, part) } },
            "More like this part",
          ),
        );
      }
      if (passage.times && hit.span?.unit === "seconds") {
        const [from] = passage.times;
        const jump = () => {
          this.#panes.forEach((pane) => pane.seek?.(from));
          if (this.#player) this.#player.currentTime = from;
        };
        const label = `Go to ${time(from)}`;
        buttons.push(h("button.link", { type: "button", on: { click: jump } }, label));
      }
      const show = () => {
        const selector = `.passage-frame[data-passage="${number}"]:not([hidden])`;
        const frame = this.#stage.querySelector(selector);
        if (frame) scrollTo(frame);
      };
      const name = h("button.passage", { type: "button", on: { click: show } }, text);
      if (passages.length > 1) name.prepend(h("span.rank", {}, `${number + 1}  `));
      const on = {
        pointerenter: () => this.#highlightPassage(number),
        pointerleave: () => this.#highlightPassage(null),
        focusin: () => this.#highlightPassage(number),
        focusout: () => this.#highlightPassage(null),
      };
      return h("li", { dataset: { passage: number }, on }, name, buttons);
    });
    return [h("h3", {}, "Best passages"), h("ol.passages", {}, rows)];
  }

  async #loadItem() {
    const { state } = this.#context;
    const signal = this.#controller.signal;
    try {
      const path = `v1/items/${segment(this.#hit.item_id)}`;
      this.#item = await getJson(path, { index: state.index }, signal);
    } catch {
      return; // the view shows what the hit contains
    }
    const list = this.#details.querySelector("dl.item");
    if (!list) return;
    const entries = (rows) => rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
    append(list, entries([["parent", this.#item.parent_id], ["source", this.#item.source]]));
    const { metadata, ...rest } = this.#item.metadata ?? {};
    // Some sources keep the metadata of their records in a field of this name.
    const isNested = metadata !== null && typeof metadata === "object";
    const rows = metadataRows(isNested ? { ...rest, ...metadata } : this.#item.metadata);
    if (rows.length) list.after(h("h3", {}, "Metadata"), h("dl.item.metadata", {}, entries(rows)));
  }

  // -- maps -------------------------------------------------------------------------------------

  async #loadMap(pane) {
    const { state, attachment } = this.#context;
    const { rerank, candidates, group_by: group, filter, ...body } = searchBody(
      state,
      attachment,
      pane.side,
    );
    const request = { ...body, k: 1, ids: [this.#hit.item_id], score: "maxsim", explain: "map" };
    pane.element.setAttribute("aria-busy", "true");
    try {
      const response = await search(request, this.#controller.signal);
      pane.map = response.hits[0]?.map ?? null;
      pane.matches = response.hits[0]?.matches ?? [];
      pane.representation = response.representation;
      pane.words = pane.map ? shownWords(pane.map, pane.matches, response.representation) : [];
      pane.isShared = hasSharedVectors(pane.words);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#note.textContent = `No similarity map: ${error.message}`;
    } finally {
      pane.element.removeAttribute("aria-busy");
    }
    this.#enableVectorRegions();
    if (!pane.map) {
      this.#note.textContent ||= "This item has no similarity map in this representation.";
      this.#paint();
      return;
    }
    this.#explainEvidence();
    const inText = pane.words.filter((word) => word.span[0] >= 0);
    if (this.#hit.text && inText.length) this.#showText(pane, inText);
    if (pane === this.#panes.find((other) => other.map)) this.#fillTokens(pane);
    this.#paint();
  }

  /** Says by which vectors the words are compared, where a vector represents several words. */
  #explainEvidence() {
    const notes = this.#panes.map(({ map, isShared, representation }) => {
      if (!map || !isShared) return null;
      return map.evidence === representation
        ? `A vector of ${representation} stands for several words, which are equally similar to a ` +
            "query token. Coloured are the words of the vector that matches it."
        : `Words are compared by their own vectors (${map.evidence}). Outlined are the words of ` +
            `the vector of ${representation} that matches the query token.`;
    });
    this.#note.textContent = [...new Set(notes.filter(Boolean))].join(" ");
  }

  #fillTokens(pane) {
    const chip = (label, token) => {
      const button = h("button.chip", { type: "button", "aria-pressed": "false" }, label);
      button.dataset.token = token === null ? "all" : token;
      button.addEventListener("pointerenter", () => this.#show(token));
      button.addEventListener("pointerleave", () => this.#show(this.#view.pinned));
      button.addEventListener("focus", () => this.#show(token));
      button.addEventListener("blur", () => this.#show(this.#view.pinned));
      button.addEventListener("click", () => {
        this.#view.pinned = this.#view.pinned === token ? null : token;
        this.#show(this.#view.pinned);
      });
      return button;
    };
    const tokens = pane.map.query_tokens.map((text, i) => chip(text, i));
    replace(this.#chips, chip("All", null), tokens);
  }

  #show(token) {
    this.#view.token = token;
    this.#paint();
  }

  #select(word) {
    if (this.#view.selected === word) return;
    this.#view.selected = word;
    this.#paint();
  }

  #onPointer(pane, event) {
    const box = pane.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const y = (event.clientY - box.top) / box.height;
    this.#select(wordAt(pane.words, x, y, pane.seconds));
  }

  /**
   * Checks whether words of merged vectors are compared by their own vectors. The matches of the hits
   * are those of the merged vectors, so they do not define a colour scale of all hits.
   */
  get #isByToken() {
    return this.#panes.some(
      ({ map, isShared, representation }) => isShared && map.evidence !== representation,
    );
  }

  /** Returns the ends of the colour scale. */
  #range(pane, token = this.#view.token) {
    if (this.#isByToken) return wordRange(pane.words, token);
    const hits = [...pane.hits, { matches: pane.matches ?? [] }];
    return token === null ? contributionRange(hits) : similarityRange(hits);
  }

  #paint() {
    for (const pane of this.#panes) {
      const match = pane.isShared && pane.matches[this.#view.token];
      const vector = match ? match.document_token : null;
      const view = { ...this.#view, vector, range: this.#range(pane), seconds: pane.seconds };
      if (pane.canvas) {
        if (this.#view.regions) drawRegions(pane.canvas, pane.words, view);
        else drawBoxes(pane.canvas, pane.words, view);
        this.#bestPassages.forEach((passage, number) => {
          const frame = pane.frames[number];
          if (frame) frame.hidden = !isVisible(passage, pane.seconds);
        });
      }
      if (pane.strip) drawStrip(pane.strip, pane.words, this.#hit.span, view);
      pane.text?.paint(view);
    }
    this.#paintLegend();
    this.#paintChips();
  }

  #paintLegend() {
    const pane = this.#panes.find((other) => other.map);
    if (!pane) {
      this.#legend.replaceChildren();
      return;
    }
    const [low, high] = this.#range(pane);
    const isAll = this.#view.token === null;
    if (!this.#legend.firstChild) {
      const canvas = h("canvas", { width: "160", height: "10", "aria-hidden": "true" });
      drawLegend(canvas);
      this.#legend.append(h("span.low"), canvas, h("span.high"), h("span.what"));
    }
    this.#legend.querySelector(".low").textContent = low.toFixed(2);
    this.#legend.querySelector(".high").textContent = high.toFixed(2);
    this.#legend.classList.toggle("regions", this.#view.regions);
    const value = isAll ? "contribution to the score" : "similarity";
    const scale = this.#isByToken ? "scale of this item" : "same scale for all hits";
    this.#legend.querySelector(".what").textContent = this.#view.regions
      ? "one colour for each stored vector"
      : `${value}, ${scale}`;
  }

  /** Marks the shown and pinned tokens, and colours tokens by their similarity to the word. */
  #paintChips() {
    const { selected, token, pinned } = this.#view;
    const pane = this.#panes.find((other) => other.map);
    for (const button of this.#chips.children) {
      const number = button.dataset.token === "all" ? null : Number(button.dataset.token);
      button.setAttribute("aria-pressed", String(number === pinned));
      button.classList.toggle("shown", number === token);
      const value = selected && number !== null ? selected.similarities[number] : null;
      const isShown = value !== null && value !== undefined;
      const at = isShown ? position(value, this.#range(pane, number)) : null;
      button.style.backgroundColor = at === null ? "" : css(at);
      button.style.color = at === null ? "" : textColour(at);
      button.title = at === null ? "" : `similarity ${value.toFixed(3)}`;
    }
  }

  #onKey(event) {
    // Sliders and players use the arrow keys themselves.
    const usesArrows = event.target.matches("input[type=range], video, audio");
    if (usesArrows && event.key.startsWith("Arrow")) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, k: -1, j: 1 };
    if (event.key in steps && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.#page.step(steps[event.key]);
    }
    const zooms = { "-": -1, "+": 1, "=": 1, 0: -ZOOMS.length };
    if (event.key in zooms && !event.ctrlKey && !event.metaKey) this.#zoom(zooms[event.key]);
    const frames = { ",": -1, ".": 1 };
    if (event.key in frames && this.#hit?.span?.unit === "seconds") {
      const rate = this.#item?.metadata?.fps || 25;
      const pane = this.#panes[0];
      const seconds = pane.time + frames[event.key] / rate;
      this.#panes.forEach((other) => other.seek?.(seconds));
      if (this.#player) this.#player.currentTime = seconds;
    }
  }
}

/** Returns the start of the best passage of an item, or of the item. */
function firstTime(hit) {
  const found = (hit.passages ?? []).find((passage) => passage.times);
  return found ? found.times[0] : hit.span.start;
}

function scrollTo(element) {
  element.scrollIntoView({ block: "center", inline: "nearest" });
}

function sorted([x0, y0], [x1, y1]) {
  return [Math.min(x0, x1), Math.min(y0, y1), Math.max(x0, x1), Math.max(y0, y1)];
}

function clamp(box) {
  return box.map((value) => Math.min(1, Math.max(0, value)));
}

function showRegion(element, [x0, y0, x1, y1]) {
  element.hidden = false;
  element.style.left = `${100 * x0}%`;
  element.style.top = `${100 * y0}%`;
  element.style.width = `${100 * (x1 - x0)}%`;
  element.style.height = `${100 * (y1 - y0)}%`;
}
