/** Query images: chosen, dropped or pasted files, scaled down before they are sent. */

/** Maximum width and height of a query image in pixels. */
const MAX_SIDE = 1024;

/** Returns the JPEG or PNG file of a query image in base64, or throws an error with a message. */
export async function readImage(file) {
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

/** Returns the image file of a drop or paste event, or null. */
export function imageOf(transfer) {
  const files = [...(transfer?.files ?? [])];
  return files.find((file) => file.type.startsWith("image/")) ?? null;
}

/** Returns the URL of a query image for display. */
export function dataUrl(image) {
  const type = image.startsWith("/9j/") ? "jpeg" : "png";
  return `data:image/${type};base64,${image}`;
}
