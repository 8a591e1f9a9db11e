/** Returns texts whose contrast with their background is below that of WCAG AA. */
const parse = (text) => {
  const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
  return text.startsWith('color(') ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
};
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((c) =>
    c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
const background = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    layers.push(parse(getComputedStyle(e).backgroundColor));
    if (e.tagName === 'DIALOG') break;
  }
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const problems = new Set();
const open = document.querySelector('dialog[open]');
const walker = document.createTreeWalker(open ?? document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !e.checkVisibility({visibilityProperty: true})) {
    continue;
  }
  if (e.closest('.visually-hidden, :disabled, option, svg, .skip')) continue;
  const style = getComputedStyle(e);
  const below = background(e);
  const text = over(parse(style.color), below);
  const [low, high] = [luminance(text), luminance(below)].sort((a, b) => a - b);
  const ratio = (high + 0.05) / (low + 0.05);
  const size = parseFloat(style.fontSize);
  const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  if (ratio < (isLarge ? 3 : 4.5)) {
    problems.add(`${ratio.toFixed(2)}: ${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
  }
}
return [...problems];
