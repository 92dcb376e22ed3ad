// Dead letters: listed when the view is opened and when their number changes, because each listing makes
// the broker deliver them.

import { attempt, json, request } from "./api.js";
import { $, Table, ask, bytes, copy, duration, el, plural, shortId, show } from "./dom.js";

let listedAt = null; // the number of letters when they were listed last; null if they are to be listed

const letters = new Table($("#letters"), {
  label: "Dead letters",
  key: (letter) => letter.id,
  empty: "No dead letters.",
  columns: [
    {
      title: "Request", version: (letter) => letter.id,
      fill: (letter) => [el("span", { className: "id cut", title: letter.id, textContent: shortId(letter.id) })],
    },
    { title: "Tenant", kind: "name", text: tenantOf },
    { title: "Reason", kind: "name wide", text: (letter) => letter.reason },
    { title: "Queue", kind: "name", text: (letter) => letter.queue },
    { title: "Age", kind: "number", text: (letter) => duration(letter.age_s) },
    { title: "Size", kind: "number", text: (letter) => bytes(letter.num_bytes) },
    { title: "Actions", kind: "act", version: (letter) => letter.can_retry, fill: actions },
  ],
});

// Without a tenant, a job is of someone without an API key, and what is no job is of its publisher.
function tenantOf(letter) {
  if (letter.tenant) return letter.tenant;
  if (letter.can_retry) return "anonymous";
  return letter.user ? `user ${letter.user}` : "unknown";
}

function actions(letter) {
  const path = `/admin/v1/dead-letters/${encodeURIComponent(letter.id)}`;
  const label = (verb) => `${verb} ${shortId(letter.id)}`;
  const read = el("button", {
    type: "button", className: "quiet", textContent: "Show", "aria-label": label("Show"),
    onclick: () => attempt(read, () => showBody(letter, path)),
  });
  const retry = el("button", {
    type: "button", className: "quiet", textContent: "Retry", "aria-label": label("Retry"),
    onclick: () => act(retry, () => request(`${path}/retry`, { method: "POST" }), "returned to its queue"),
  });
  const drop = el("button", {
    type: "button", className: "danger", textContent: "Drop", "aria-label": label("Drop"),
    onclick: async () => {
      const text = "The job is removed for good. Whoever waits for its answer never gets one.";
      const answer = await ask(`Drop ${shortId(letter.id)}?`, text, [{ label: "Drop", value: "drop", kind: "danger" }]);
      if (answer) await act(drop, () => request(path, { method: "DELETE" }), "dropped");
    },
  });
  const act = (button, work, done) => attempt(button, async () => {
    await work();
    show(`${shortId(letter.id)} was ${done}.`);
    await listLetters();
  });
  return letter.can_retry ? [read, retry, drop] : [read, drop];
}

const reader = $("#letter-dialog");
let shown = ""; // the body in the dialog

async function showBody(letter, path) {
  const { body, format, content_type: type, is_truncated: isTruncated } = await json(path);
  shown = body;
  const facts = [type || "no content type", bytes(letter.num_bytes)];
  if (format === "base64") facts.push("shown in Base64");
  if (isTruncated) facts.push("only the beginning is shown");
  $("#letter-title").textContent = shortId(letter.id);
  $("#letter-facts").textContent = facts.join(" · ");
  $("#letter-body").textContent = body;
  reader.showModal();
}

$("#letter-close").addEventListener("click", () => reader.close());
$("#letter-copy").addEventListener("click", () => copy(shown, "Body"));

const dropAll = $("#drop-all");
dropAll.addEventListener("click", async () => {
  const text = "All jobs in this list and beyond it are removed for good. Whoever waits for their answers never gets one.";
  const answer = await ask("Drop all dead letters?", text, [{ label: "Drop all", value: "drop", kind: "danger" }]);
  if (!answer) return;
  await attempt(dropAll, async () => {
    const { num_letters: number } = await (await request("/admin/v1/dead-letters", { method: "DELETE" })).json();
    show(`${plural(number, "dead letter")} dropped.`);
    await listLetters();
  });
});

async function listLetters() {
  const { data } = await json("/admin/v1/dead-letters");
  letters.show(data);
  dropAll.hidden = data.length === 0;
}

// Has the next count list them, because the view was opened.
export function listSoon() {
  listedAt = null;
}

// Shows how many there are, and lists them if `isOpen` and the number has changed.
export async function countLetters(number, isOpen) {
  const badge = $("#dead-count");
  badge.hidden = !number;
  badge.textContent = number ?? "";
  if (!isOpen || number === listedAt) return;
  listedAt = number;
  try {
    await listLetters();
  } catch (error) {
    listSoon();
    throw error;
  }
}
