/** Images, audio and videos of queries: chosen, dropped, pasted or recorded files. */

/** Maximum width and height of a query image in pixels. */
const MAX_SIDE = 1024;
/** Maximum size of audio and videos in bytes. Servers limit requests to 8 MiB by default. */
const MAX_BYTES = 5 << 20;
const KINDS = ["image", "audio", "video"];

/** Returns the kind of a file or of a media type such as "audio/webm", or undefined. */
export function kindOf({ type }) {
  return KINDS.find((kind) => type.startsWith(`${kind}/`));
}

/**
 * Returns the part of a query that a file is: an object of its kind and its content in base64.
 * Images are scaled down. Throws an error with a message.
 */
export async function readAttachment(file) {
  const kind = kindOf(file);
  if (kind === "image") return { image: await readImage(file) };
  if (file.size > MAX_BYTES) {
    throw new Error(`the file must have at most ${MAX_BYTES >> 20} MiB`);
  }
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the file cannot be read"));
    reader.readAsDataURL(file);
  });
  return { [kind]: url.slice(url.indexOf(",") + 1) };
}

/** Returns the content of an attachment in base64, or null. */
export function contentOf(attachment) {
  return Object.values(attachment ?? {})[0] ?? null;
}

/** Records the microphone until the returned function is called, which resolves to the audio. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const chunks = [];
  recorder.addEventListener("dataavailable", ({ data }) => chunks.push(data));
  recorder.start();
  return () =>
    new Promise((resolve) => {
      recorder.addEventListener("stop", () => {
        for (const track of stream.getTracks()) track.stop();
        resolve(new Blob(chunks, { type: recorder.mimeType || "audio/webm" }));
      });
      recorder.stop();
    });
}

async function readImage(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error("the file is not an image that this browser can read");
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // transparent pixels would become black
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const isPhoto = file.type === "image/jpeg" || file.type === "image/webp";
  const url = canvas.toDataURL(isPhoto ? "image/jpeg" : "image/png", 0.92);
  return url.slice(url.indexOf(",") + 1);
}

/** Returns the image, audio or video of a drop or paste event, or null. */
export function attachmentOf(transfer) {
  return [...(transfer?.files ?? [])].find(kindOf) ?? null;
}

/** Returns the URL of a query image for display. */
export function dataUrl(image) {
  const type = image.startsWith("/9j/") ? "jpeg" : "png";
  return `data:image/${type};base64,${image}`;
}
