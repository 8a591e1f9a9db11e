/** Creation of elements. All texts are set with `textContent`, so markup in them is not parsed. */

/**
 * Creates an element.
 *
 * @param {string} name Tag name, with classes after dots: "p.quiet".
 * @param {object} [properties] Attributes; `on` has event listeners, `dataset` data attributes.
 * @param {...(Node|string|null|Array)} children Nodes, texts, arrays of them, or null.
 */
export function h(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) {
        element.addEventListener(event, listener);
      }
    } else if (key === "dataset") Object.assign(element.dataset, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(key, value);
    }
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

export function $(id) {
  return document.getElementById(id);
}

const SVG = "http://www.w3.org/2000/svg";

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) {
        element.addEventListener(event, listener);
      }
    } else element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

/** Sets the position of an element inside a positioned parent, from fractions of its size. */
export function placeBox(element, [x0, y0, x1, y1]) {
  const percent = (value) => `${(100 * value).toFixed(3)}%`;
  element.style.left = percent(x0);
  element.style.top = percent(y0);
  element.style.width = percent(x1 - x0);
  element.style.height = percent(y1 - y0);
  return element;
}

/** Returns inline nodes of pieces of a text, with `mark` elements for the marked ones. */
export function marked(pieces) {
  return pieces.map((piece) => (piece.marked ? h("mark", {}, piece.text) : piece.text));
}

/** Copies a text and tells the user. */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without a secure context, the text is selected for copying by hand.
    const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    button.after(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Copying failed";
    area.remove();
    button.focus();
  }
  setTimeout(() => (button.textContent = label), 1500);
}

/** Offers a text as a file. */
export function download(name, content, type = "text/plain") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
