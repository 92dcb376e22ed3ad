// Requests to the gateway: the API key, errors, and streams of events.

import { show } from "./dom.js";
import { offerSignIn } from "./session.js";

const KEY = "warren.key";
const dialog = document.querySelector("#key-dialog");
const field = document.querySelector("#key");
let asking = null;

export class ApiError extends Error {
  constructor(status, code, message, retryAfterMs) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

// Asks for the key, once for all requests that lack it. Resolves to whether one was given.
export function askForKey(problem = "") {
  if (problem || asking === null) document.querySelector("#key-error").textContent = problem;
  asking ??= new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      asking = null;
      resolve(dialog.returnValue === "given");
    }, { once: true });
    dialog.returnValue = "";
    field.value = "";
    offerSignIn();
    dialog.showModal();
  });
  return asking;
}

document.querySelector("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, field.value.trim());
  document.querySelector("#key-button").hidden = false;
  dialog.close("given");
});
document.querySelector("#key-cancel").addEventListener("click", () => dialog.close(""));
document.querySelector("#key-button").addEventListener("click", async () => {
  if (await askForKey()) location.reload();
});
document.querySelector("#key-button").hidden = !hasKey();

const unreachable = () => new ApiError(0, "unreachable", "The gateway cannot be reached.", 0);

// Like fetch, with the key. Throws ApiError.
export async function request(path, options = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    const headers = new Headers(options.headers);
    if (sent !== null) headers.set("Authorization", `Bearer ${sent}`);
    const response = await fetch(path, { ...options, headers }).catch(() => { throw unreachable(); });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (sent !== sessionStorage.getItem(KEY)) continue; // another request was given a new one
    sessionStorage.removeItem(KEY);
    if (!(await askForKey(sent === null ? "" : error.message))) throw error;
  }
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

export const postJson = (path, body, options = {}) =>
  request(path, {
    ...options,
    method: "POST",
    headers: { "Content-Type": "application/json", ...options.headers },
    body: JSON.stringify(body),
  });

// Yields the events of a response: { id, data }, or { comment } for a line that begins with a colon.
// Throws ApiError if the connection breaks.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => { throw unreachable(); });
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) yield eventOf(block);
  }
}

function eventOf(block) {
  const event = {};
  for (const line of block.split("\n")) {
    const [name, text] = line.split(/: ?(.*)/s);
    event[name === "" ? "comment" : name] = text;
  }
  return event;
}

async function errorOf(response) {
  const retryAfterMs = Number(response.headers.get("retry-after-ms")) || 1000;
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message, retryAfterMs);
  } catch {
    return new ApiError(response.status, null, `The server answered with status ${response.status}.`, retryAfterMs);
  }
}

// Runs what a button does, and shows what goes wrong.
export async function attempt(button, work) {
  button.disabled = true;
  try {
    return await work();
  } catch (error) {
    show(error.message);
    return null;
  } finally {
    button.disabled = false;
  }
}
