/** Writer of ZIP archives without compression. */

/** Version 2.0 of the format, and the flag of names in UTF-8. */
const VERSION = 20;
const UTF8 = 0x0800;
/** 1 January 1980, the first date of the format. Archives of equal files are equal. */
const DATE = 0x0021;

/** Returns the CRC-32 of bytes. */
export function crc32(data) {
  let crc = 0xffffffff;
  for (const byte of data) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (crc ^ 0xffffffff) >>> 0;
}

/**
 * Returns an archive.
 *
 * @param {Object<string, string>} files Contents by path, such as {"folder/file.txt": "text"}.
 * @returns {Blob}
 */
export function zip(files) {
  const encoder = new TextEncoder();
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const [path, text] of Object.entries(files)) {
    const [name, data] = [encoder.encode(path), encoder.encode(text)];
    // Fields of both headers: version, flags, method, time, date, CRC, sizes, and lengths of the
    // name and of the extra field.
    const common = [
      ...[u16(VERSION), u16(UTF8), u16(0), u16(0), u16(DATE), u32(crc32(data))],
      ...[u32(data.length), u32(data.length), u16(name.length), u16(0)],
    ];
    const local = [u32(0x04034b50), ...common, name, data];
    parts.push(...local);
    // Length of the comment, number of the disk, attributes, and position of the local header.
    const rest = [u16(0), u16(0), u16(0), u32(0), u32(offset)];
    directory.push(u32(0x02014b50), u16(VERSION), ...common, ...rest, name);
    offset += length(local);
  }
  const count = u16(Object.keys(files).length);
  const end = [u32(0x06054b50), u16(0), u16(0), count, count, u32(length(directory)), u32(offset)];
  return new Blob([...parts, ...directory, ...end, u16(0)], { type: "application/zip" });
}

function u16(value) {
  return new Uint8Array([value & 0xff, value >>> 8]);
}

function u32(value) {
  return new Uint8Array([value & 0xff, (value >>> 8) & 0xff, (value >>> 16) & 0xff, value >>> 24]);
}

function length(arrays) {
  return arrays.reduce((sum, array) => sum + array.length, 0);
}
