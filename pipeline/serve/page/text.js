/** Formatting of numbers and texts. Offsets of the API count code points, not UTF-16 units. */

/** Returns a size in bytes with a unit. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let size = value;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || size >= 100 ? 0 : 1;
  return `${size.toFixed(digits)} ${units[unit]}`;
}

/** Joins parts of a sentence: "a", "a or b", "a, b, or c". */
export function alternatives(parts) {
  if (parts.length < 3) return parts.join(" or ");
  return `${parts.slice(0, -1).join(", ")}, or ${parts.at(-1)}`;
}

/**
 * Returns the metadata of an item as rows [name, value], without missing values. Names of nested
 * values are joined by dots.
 */
export function metadataRows(metadata, prefix = "") {
  return Object.entries(metadata ?? {}).flatMap(([key, value]) => {
    if (value === null || value === "") return [];
    const name = prefix + key;
    if (Array.isArray(value)) {
      const isFlat = value.every((entry) => entry === null || typeof entry !== "object");
      return [[name, isFlat ? value.join(", ") : `${value.length} entries`]];
    }
    if (typeof value === "object") return metadataRows(value, `${name}.`);
    return [[name, String(value)]];
  });
}

/** Returns the description of a representation, such as "hpool, float16, 32 vectors, 24.6 kB". */
export function describeRepresentation(representation, size) {
  if (!representation) return "";
  const { compressor, codec } = representation;
  const parts = [compressor === "none" ? "uncompressed" : (compressor ?? ""), codec ?? ""];
  if (size) {
    const vectors = size.vectors_per_item;
    parts.push(`${vectors.toFixed(vectors < 100 && vectors % 1 ? 1 : 0)} vectors`);
    parts.push(`${bytes(size.bytes_per_item)} per item`);
  }
  return parts.filter(Boolean).join(" · ");
}

/** Returns a duration in milliseconds or seconds. */
export function milliseconds(value) {
  return value < 1000 ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : seconds(value);
}

function seconds(value) {
  return `${(value / 1000).toFixed(1)} s`;
}

/** Returns a time in a video as m:ss. */
export function time(value) {
  const whole = Math.max(0, Math.round(value));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

export function count(value) {
  return value.toLocaleString("en-GB");
}

/** Returns the place of a hit in its parent, such as "page 2" or "0:10–0:20". */
export function place(span) {
  if (!span || !span.unit) return "";
  if (span.unit === "seconds") return `${time(span.start)}–${time(span.end)}`;
  if (span.unit === "page") return `page ${span.start}`;
  return `${span.unit} ${span.start}–${span.end}`;
}

/** Merges overlapping and adjacent ranges [start, end]. */
function merge(ranges) {
  const merged = [];
  for (const [start, end] of [...ranges].sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    const last = merged.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

/** Splits a text into pieces {text, marked} at ranges of code points. */
export function pieces(text, ranges) {
  const points = Array.from(text);
  const result = [];
  let done = 0;
  for (const [start, end] of merge(ranges)) {
    if (end <= start || start < done || start >= points.length) continue;
    if (start > done) result.push({ text: points.slice(done, start).join(""), marked: false });
    result.push({ text: points.slice(start, end).join(""), marked: true });
    done = end;
  }
  if (done < points.length) result.push({ text: points.slice(done).join(""), marked: false });
  return result;
}

/** Ranges of the words of a hit that match the query best, as in the command line. */
export function highlights(hit) {
  const ranges = [];
  for (const passage of hit.passages ?? []) {
    const most = Math.max(0, ...passage.highlights.map((word) => word.contribution));
    for (const word of passage.highlights) {
      if (word.contribution >= (2 / 3) * most) ranges.push(word.span);
    }
  }
  return ranges;
}

/** Returns pieces of the part of a text with the most highlighted characters. */
export function snippet(text, ranges, width = 280) {
  const points = Array.from(text);
  if (points.length <= width) return pieces(text, ranges);
  const merged = merge(ranges).filter(([start]) => start < points.length);
  let start = 0;
  let best = -1;
  for (const [from] of merged) {
    const inside = merged.filter(([a, b]) => a >= from && b <= from + width);
    const filled = inside.reduce((sum, [a, b]) => sum + b - a, 0);
    if (filled > best) {
      best = filled;
      const end = inside.at(-1)?.[1] ?? from;
      start = Math.round((from + end - width) / 2);
    }
  }
  start = Math.max(0, Math.min(start, points.length - width));
  let end = start + width;
  // Partial words at either end are dropped.
  while (start > 0 && start < end && !/\s/.test(points[start - 1])) start += 1;
  while (end < points.length && end > start && !/\s/.test(points[end])) end -= 1;
  const shown = merged
    .filter(([a, b]) => a >= start && b <= end)
    .map(([a, b]) => [a - start, b - start]);
  const result = pieces(points.slice(start, end).join(""), shown);
  if (start > 0) result.unshift({ text: "… ", marked: false });
  if (end < points.length) result.push({ text: " …", marked: false });
  return result;
}

/** Returns a search request as a command for a POSIX shell. */
export function asCurl(url, body, withKey) {
  const lines = [`curl -s ${shell(url)}`, "-H 'Content-Type: application/json'"];
  if (withKey) lines.push('-H "Authorization: Bearer $MAXRAY_KEY"');
  lines.push(`-d ${shell(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Returns a search request as a Python program, which reads an access key from MAXRAY_KEY. */
export function asPython(url, body, withKey) {
  const { query, ...options } = body;
  const lines = ["from pipeline.serve import wire", "from pipeline.serve.client import Client", ""];
  let given = python(query);
  if (typeof query !== "string") {
    const kind = "item" in query ? "StoredItem" : "Media";
    given = `wire.${kind}(${keywords(query)})`;
  } else {
    lines.shift();
  }
  if (withKey) lines.unshift("import os", "");
  const { rerank, ...rest } = options;
  const parts = [given, keywords(rest)];
  if (rerank) parts.push(`rerank=${python(rerank)}`);
  lines.push(
    `with Client(${python(url)}${withKey ? ', key=os.environ["MAXRAY_KEY"]' : ""}) as client:`,
    `    for hit in client.search(${parts.filter(Boolean).join(", ")}).hits:`,
    "        print(hit.rank, hit.score, hit.item_id)",
  );
  return lines.join("\n");
}

function keywords(values) {
  return Object.entries(values)
    .map(([name, value]) => `${name}=${python(value)}`)
    .join(", ");
}

/** Returns a JSON value as a Python literal. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([name, v]) => `${python(name)}: ${python(v)}`);
    return `{${entries.join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** Parses CSV with quoted fields into objects by column. */
export function parseCsv(text) {
  const rows = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i++) {
    const character = text[i];
    const row = rows.at(-1);
    if (quoted) {
      if (character !== '"') row[row.length - 1] += character;
      else if (text[i + 1] === '"') {
        row[row.length - 1] += '"';
        i += 1;
      } else quoted = false;
    } else if (character === '"') quoted = true;
    else if (character === ",") row.push("");
    else if (character === "\n") rows.push([""]);
    else if (character !== "\r") row[row.length - 1] += character;
  }
  const [names, ...rest] = rows.filter((row) => row.length > 1 || row[0]);
  const formula = /^'(?='*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])/; // see pipeline/runtime/text.py
  const cell = (value = "") => value.replace(formula, "");
  return rest.map((row) => Object.fromEntries(names.map((name, i) => [name, cell(row[i])])));
}
