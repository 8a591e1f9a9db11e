/** Client of the HTTP API of the server that serves the page. */

const KEY = "maxray-key";
/** Simultaneous requests for previews, and attempts if the server is overloaded. */
const MAX_REQUESTS = 6;
const MAX_TRIES = 4;

/** Error response of the API, or a failed connection (code "network"). */
class ApiError extends Error {
  constructor(status, problem, retryAfter = null) {
    super(problem.message);
    this.status = status;
    this.code = problem.code;
    this.field = problem.field ?? null;
    this.requestId = problem.request_id ?? null;
    this.retryAfter = retryAfter;
  }
}

export function getKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Returns the URL of a route, relative to the page, so that the server may have a path prefix. */
function apiUrl(path, parameters = {}) {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

/** Returns an id as one segment of a URL. */
export function segment(id) {
  return encodeURIComponent(id);
}

async function request(url, options = {}) {
  const headers = new Headers(options.headers);
  const key = getKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(url, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { code: "network", message: "the server cannot be reached" });
  }
  if (response.ok) return response;
  let problem = { code: "internal", message: `${response.status} ${response.statusText}` };
  try {
    problem = (await response.json()).error ?? problem;
  } catch {
    // A proxy in front of the server sends no JSON.
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  throw new ApiError(response.status, problem, retryAfter);
}

export async function getJson(path, parameters, signal) {
  return (await request(apiUrl(path, parameters), { signal })).json();
}

export async function getText(path, signal) {
  return (await request(apiUrl(path), { signal })).text();
}

export async function getBlob(url, signal) {
  return (await request(url, { signal })).blob();
}

async function postJson(path, body, signal) {
  const response = await request(apiUrl(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  return response.json();
}

export function search(body, signal) {
  return postJson("v1/search", body, signal);
}

export function previewUrl(index, itemId, parameters = {}) {
  return apiUrl(`v1/previews/${segment(itemId)}`, { index, ...parameters });
}

export function mediaUrl(index, itemId) {
  return apiUrl(`v1/media/${segment(itemId)}`, { index });
}

/**
 * Loads media of one view. An element cannot send an access key, so with a key its file is fetched
 * and displayed from a `blob:` URL, which is released with the view.
 */
export class Media {
  #urls = new Set();
  #controller = new AbortController();
  #queue = [];
  #active = 0;

  /** Sets the source of an `img`, `audio` or `video` element. Calls `failed` on an error. */
  async load(element, url, failed = () => {}) {
    element.addEventListener("error", () => failed(null), { once: true });
    if (!getKey()) {
      element.src = url;
      return;
    }
    try {
      const blob = await this.#enqueue(() => this.#fetch(url));
      const source = URL.createObjectURL(blob);
      if (this.#controller.signal.aborted) URL.revokeObjectURL(source);
      else {
        this.#urls.add(source);
        element.src = source;
      }
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    }
  }

  /** Stops all requests and releases all files. */
  release() {
    this.#controller.abort();
    this.#urls.forEach((url) => URL.revokeObjectURL(url));
    this.#urls.clear();
    this.#queue = [];
  }

  async #fetch(url) {
    for (let attempt = 1; ; attempt++) {
      try {
        return await getBlob(url, this.#controller.signal);
      } catch (error) {
        const isBusy = [429, 503].includes(error.status);
        if (!isBusy || attempt === MAX_TRIES) throw error;
        await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retryAfter ?? 1)));
      }
    }
  }

  #enqueue(task) {
    return new Promise((resolve, reject) => {
      this.#queue.push({ task, resolve, reject });
      this.#next();
    });
  }

  #next() {
    while (this.#active < MAX_REQUESTS && this.#queue.length) {
      const { task, resolve, reject } = this.#queue.shift();
      this.#active += 1;
      task()
        .then(resolve, reject)
        .finally(() => {
          this.#active -= 1;
          this.#next();
        });
    }
  }
}
