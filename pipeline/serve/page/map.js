/** Similarity maps, drawn from the numbers of the API on a canvas over an image, or on words. */

import { alpha, colour, css, position, textColour, wordValue } from "./colours.js";
import { h } from "./dom.js";

/** Tolerance of times, which are rounded, in seconds. */
const TOLERANCE = 0.05;

/**
 * Draws the boxes of words in the colours of their values.
 *
 * @param {HTMLCanvasElement} canvas Canvas over the image.
 * @param {object[]} words Words of a map with boxes.
 * @param {object} view
 * @param {number|null} view.token Query token, or null for all.
 * @param {[number, number]} view.range Values at the ends of the colour scale.
 * @param {number} view.opacity Opacity of the highest value.
 * @param {object|null} view.selected Word that is outlined, with all words of its vector.
 * @param {number|null} view.vector Vector whose words are outlined if no word is selected.
 * @param {number|null} view.seconds Time of the frame, for videos.
 */
export function drawBoxes(canvas, words, view) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  const height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  for (const word of words) {
    if (!isVisible(word, view.seconds)) continue;
    const at = position(wordValue(word, view.token), view.range);
    if (at === null || at <= 0) continue;
    const [red, green, blue] = colour(at);
    context.fillStyle = `rgb(${red} ${green} ${blue} / ${alpha(at, view.opacity)})`;
    context.fillRect(...rectangle(word.box, width, height));
  }
  context.lineWidth = Math.max(1, 1.5 * ratio);
  context.strokeStyle = "#0b63b5";
  for (const word of words) {
    if (isOutlined(word, view) && isVisible(word, view.seconds)) {
      context.strokeRect(...rectangle(word.box, width, height));
    }
  }
}

/** Checks whether a word is selected, or of the vector that is. */
function isOutlined(word, { selected, vector }) {
  if (selected) return word === selected || (hasVector(word) && word.vector === selected.vector);
  return hasVector(word) && word.vector === vector;
}

/** Fills the regions of the stored vectors, each in a colour of its own. */
export function drawRegions(canvas, words, view) {
  drawBoxes(canvas, [], view);
  const context = canvas.getContext("2d");
  for (const word of words) {
    if (!isVisible(word, view.seconds)) continue;
    if (!hasVector(word)) continue;
    context.fillStyle = `hsl(${hue(word.vector)} 75% 50% / ${0.55 * view.opacity + 0.05})`;
    context.fillRect(...rectangle(word.box, canvas.width, canvas.height));
  }
}

/** Returns the hue of a vector. The golden angle separates the hues of successive vectors. */
function hue(vector) {
  return (vector * 137.508) % 360;
}

/** Checks whether the vector that represents a word or patch is known. */
export function hasVector(word) {
  return word.vector !== null && word.vector !== undefined;
}

function rectangle([x0, y0, x1, y1], width, height) {
  return [x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height];
}

/** Checks whether a word, patch or passage has a box that is visible at a time of a video. */
export function isVisible(word, seconds) {
  if (!word.box) return false;
  if (!word.times || seconds === null || seconds === undefined) return true;
  // Of two successive frames, one is visible at the time where they meet.
  return word.times[0] <= seconds + TOLERANCE && seconds + TOLERANCE < word.times[1];
}

/** Checks whether a vector of a map represents several words. */
export function hasSharedVectors(words) {
  const vectors = words.filter(hasVector).map(({ vector }) => vector);
  return new Set(vectors).size < vectors.length;
}

/**
 * Returns the words of a map with the similarities that are shown. Words that are compared by the
 * vector that they share are equally similar to a query token. Of them, only those of the vector
 * that matches the query token best are shown: its region.
 */
export function shownWords({ words, evidence }, matches, representation) {
  if (evidence !== representation || !hasSharedVectors(words)) return words;
  const isShown = (word, m) => matches[m]?.document_token === word.vector;
  return words.map((word) => ({
    ...word,
    similarities: word.similarities.map((value, m) => (isShown(word, m) ? value : null)),
  }));
}

/** Returns the smallest word at a position in [0, 1], or null. */
export function wordAt(words, x, y, seconds) {
  let best = null;
  let area = Infinity;
  for (const word of words) {
    if (!isVisible(word, seconds)) continue;
    const [x0, y0, x1, y1] = word.box;
    const size = (x1 - x0) * (y1 - y0);
    if (x >= x0 && x <= x1 && y >= y0 && y <= y1 && size < area) {
      best = word;
      area = size;
    }
  }
  return best;
}

/**
 * Returns a text with a span per word and a mark per passage, and a function that colours the words.
 *
 * @param {string} text
 * @param {object[]} words Words of a map with spans.
 * @param {object[]} passages Passages, best first. Their overlaps belong to the better one.
 * @param {function} onHover Called with the word under the pointer, or null.
 */
export function mappedText(text, words, passages, onHover) {
  const points = Array.from(text);
  const spans = [];
  const paragraph = h("p.mapped", { tabindex: "0", "aria-label": "Text with similarities" });
  const passageAt = (at) => passages.findIndex(({ span }) => span[0] <= at && at < span[1]);
  const ends = passages.flatMap(({ span }) => span).sort((a, b) => a - b);
  let mark = null;
  /** Appends the content that starts at a position, to the mark of a passage if it is in one. */
  const place = (content, at) => {
    const passage = passageAt(at);
    if (passage < 0) {
      mark = null;
      paragraph.append(content);
      return;
    }
    if (mark?.dataset.passage !== String(passage)) {
      mark = h("mark.passage-frame", { dataset: { passage } });
      paragraph.append(mark);
    }
    mark.append(content);
  };
  const placeText = (start, end) => {
    while (start < end) {
      const stop = Math.min(end, ends.find((at) => at > start) ?? end);
      place(points.slice(start, stop).join(""), start);
      start = stop;
    }
  };
  let done = 0;
  for (const word of [...words].sort((a, b) => a.span[0] - b.span[0])) {
    const [start, end] = word.span;
    if (start < done || end <= start) continue;
    placeText(done, start);
    const span = h("span.word", {}, points.slice(start, end).join(""));
    span.addEventListener("pointerenter", () => onHover(word));
    span.addEventListener("pointerleave", () => onHover(null));
    place(span, start);
    spans.push([span, word]);
    done = end;
  }
  placeText(done, points.length);
  const paint = (view) => {
    for (const [span, word] of spans) {
      if (view.regions) {
        const isShown = hasVector(word) && view.opacity > 0;
        span.style.backgroundColor = isShown ? `hsl(${hue(word.vector)} 80% 80%)` : "";
        span.style.color = isShown ? "#000000" : "";
      } else {
        const at = position(wordValue(word, view.token), view.range);
        const isShown = at !== null && at > 0.25 && view.opacity > 0;
        span.style.backgroundColor = isShown ? css(at) : "";
        span.style.color = isShown ? textColour(at) : "";
      }
      span.classList.toggle("selected", isOutlined(word, view));
    }
  };
  return { paragraph, paint };
}

/**
 * Draws the similarity over time of an item of a video or audio file.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {object[]} words Words with times.
 * @param {{start: number, end: number}} span Times of the item in seconds.
 * @param {object} view See `drawBoxes`.
 */
export function drawStrip(canvas, words, span, view) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const values = stripValues(words, span, view, canvas.width);
  values.forEach((at, x) => {
    if (at === null || at <= 0) return;
    context.fillStyle = css(at);
    const height = Math.max(2, at * canvas.height);
    context.fillRect(x, canvas.height - height, 1, height);
  });
}

/** Returns the highest position in the colour scale of the words at each of `width` times. */
export function stripValues(words, { start, end }, view, width) {
  const values = new Array(width).fill(null);
  for (const word of words) {
    if (!word.times || end <= start) continue;
    const at = position(wordValue(word, view.token), view.range);
    if (at === null) continue;
    const column = (seconds) => ((seconds - start) / (end - start)) * width;
    const first = Math.max(0, Math.floor(column(word.times[0])));
    const last = Math.min(width - 1, Math.max(first, Math.ceil(column(word.times[1])) - 1));
    for (let x = first; x <= last; x++) values[x] = Math.max(values[x] ?? 0, at);
  }
  return values;
}

/** Draws the colour scale of a legend. */
export function drawLegend(canvas) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = css(x / (canvas.width - 1));
    context.fillRect(x, 0, 1, canvas.height);
  }
}
