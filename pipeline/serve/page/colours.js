/**
 * Colour scale of similarity maps: pale yellow over orange to dark red (YlOrRd of ColorBrewer). The
 * luminance decreases monotonically, so the order of the colours is visible to everyone.
 */

const STOPS = [
  [255, 247, 188],
  [254, 227, 145],
  [254, 196, 79],
  [254, 153, 41],
  [236, 112, 20],
  [204, 76, 2],
  [140, 34, 2],
];

/** Returns the position of a value in [low, high] as a number in [0, 1]; null for no number. */
export function position(value, [low, high]) {
  if (value === null || !Number.isFinite(value)) return null;
  if (high <= low) return value >= high ? 1 : 0;
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

/** Returns the colour [red, green, blue] at a position in [0, 1]. */
export function colour(at) {
  const scaled = Math.min(1, Math.max(0, at)) * (STOPS.length - 1);
  const i = Math.min(Math.floor(scaled), STOPS.length - 2);
  return STOPS[i].map((low, channel) =>
    Math.round(low + (scaled - i) * (STOPS[i + 1][channel] - low)),
  );
}

/** Opacity of a position. Low values are transparent, so that the page remains readable. */
export function alpha(at, opacity) {
  return opacity * Math.min(1, 1.1 * at ** 1.6);
}

/** Returns a CSS colour at a position. */
export function css(at, opacity = 1) {
  const [red, green, blue] = colour(at);
  return `rgb(${red} ${green} ${blue} / ${opacity})`;
}

/** Relative luminance of a colour as defined by WCAG. */
export function luminance([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Returns the text colour with the higher contrast on the colour at a position. */
export function textColour(at) {
  return luminance(colour(at)) > 0.179 ? "#000000" : "#ffffff";
}

/**
 * Returns the range of similarities over all hits, which all maps of a search share.
 *
 * The range is known from the matches alone: it begins at the lowest mean similarity of a query
 * token in a hit and ends at the highest similarity.
 */
export function similarityRange(hits) {
  const matches = hits.flatMap((hit) => hit.matches ?? []);
  if (!matches.length) return [0, 1];
  const means = matches.map((match) => match.similarity - match.contribution);
  return [Math.min(...means), Math.max(...matches.map((m) => m.similarity))];
}

/** Returns the range of contributions over all hits, which starts at 0. */
export function contributionRange(hits) {
  const values = hits.flatMap((hit) => (hit.matches ?? []).map((match) => match.contribution));
  return [0, Math.max(1e-6, ...values)];
}

/**
 * Returns the range of the values of words that are compared by vectors of their own: from the mean
 * similarity with a query token to the highest of all tokens, or of the highlights (null) from 0.
 */
export function wordRange(words, token) {
  if (token === null) return [0, Math.max(1e-6, ...words.map(({ highlight }) => highlight))];
  const values = words.map(({ similarities }) => similarities[token]).filter(Number.isFinite);
  if (!values.length) return [0, 1];
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return [mean, Math.max(...words.map(({ similarities }) => Math.max(...similarities)))];
}

/** Returns the value of a word: of a query token, or its highlight for all tokens (null). */
export function wordValue(word, token) {
  return token === null ? word.highlight : word.similarities[token];
}
