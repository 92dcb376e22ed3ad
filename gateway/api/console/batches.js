// Batches: upload, progress and results. The gateway may not have the endpoints; then there is no such view.

import { ApiError, attempt, json, postJson, request } from "./api.js";
import { $, Table, bar, count, download, duration, el, show, since, tag } from "./dom.js";

const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);

const batches = new Table($("#batch-list"), {
  label: "Batches",
  key: (batch) => batch.id,
  empty: "No batches yet.",
  columns: [
    {
      title: "Batch", kind: "wide", version: (batch) => batch.id,
      fill: (batch) => [el("span", { className: "id whole", textContent: batch.id })],
    },
    { title: "Endpoint", text: (batch) => batch.endpoint },
    {
      title: "State", version: (batch) => batch.status,
      fill: ({ status }) => [tag(status.replaceAll("_", " "), status === "completed" ? "good" : status === "failed" ? "warn" : "")],
    },
    {
      title: "Progress", version: ({ request_counts: all }) => JSON.stringify(all),
      fill: ({ request_counts: all }) => [el("span", {}, ...progress(all ?? {}))],
    },
    { title: "Age", kind: "number", text: (batch) => duration(since(batch.created_at)) },
    {
      title: "Actions", kind: "act", version: (batch) => [batch.status, batch.output_file_id, batch.error_file_id].join(),
      fill: actions,
    },
  ],
});

function progress({ total = 0, completed = 0, failed = 0 }) {
  const words = `${count(completed)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}`;
  return bar(total ? (completed + failed) / total : 0, words, { isLimited: false });
}

function actions(batch) {
  const files = [["Results", batch.output_file_id], ["Errors", batch.error_file_id]];
  const buttons = files.filter(([, id]) => id).map(([label, id]) => {
    const button = el("button", {
      type: "button", className: "quiet", textContent: label, "aria-label": `${label} of ${batch.id}`,
      onclick: () => attempt(button, () => save(id)),
    });
    return button;
  });
  if (!ENDED.has(batch.status) && batch.status !== "cancelling") {
    const cancel = el("button", {
      type: "button", className: "danger", textContent: "Cancel", "aria-label": `Cancel ${batch.id}`,
      onclick: () => attempt(cancel, async () => {
        await request(`/v1/batches/${batch.id}/cancel`, { method: "POST" });
        await listBatches();
      }),
    });
    buttons.push(cancel);
  }
  return buttons;
}

async function save(fileId) {
  download(`${fileId}.jsonl`, await (await request(`/v1/files/${fileId}/content`)).blob());
}

export async function listBatches() {
  const { data } = await json("/v1/batches?limit=50");
  batches.show(data);
}

async function start() {
  const state = $("#batch-state");
  const file = $("#batch-file").files[0];
  const form = new FormData();
  form.set("purpose", "batch");
  form.set("file", file);
  state.textContent = "Uploading …";
  try {
    const uploaded = await (await request("/v1/files", { method: "POST", body: form })).json();
    await postJson("/v1/batches", {
      input_file_id: uploaded.id, endpoint: $("#batch-endpoint").value, completion_window: "24h",
    });
    $("#upload").reset();
    show(`${file.name} was started.`);
    await listBatches();
  } finally {
    state.textContent = "";
  }
}

// Returns whether this gateway has batches, as far as it can say.
export async function startBatches() {
  try {
    await listBatches();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const isPassing = error.status === 0 || error.status === 429 || error.status >= 500;
    if (!isPassing) return false;
  }
  $("#upload").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt($("#batch-send"), start);
  });
  return true;
}
