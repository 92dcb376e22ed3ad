// Batches: upload, progress and results. The gateway may not have the endpoints; then there is no such view.

import { ApiError, attempt, json, postJson, request } from "./api.js";
import { $, Table, ask, bar, count, download, duration, el, show, since, tag } from "./dom.js";

const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);

const ID = {
  title: "Batch", kind: "wide", version: (batch) => batch.id,
  fill: (batch) => [el("span", { className: "id whole", textContent: batch.id })],
};
const STATES = [
  { title: "Endpoint", text: (batch) => batch.endpoint },
  {
    title: "State", version: (batch) => batch.status,
    fill: ({ status }) => [tag(status.replaceAll("_", " "), status === "completed" ? "good" : status === "failed" ? "warn" : "")],
  },
  {
    title: "Progress", version: (batch) => batch.status + batch.num_promoted + JSON.stringify(batch.request_counts),
    fill: (batch) => [el("span", {}, ...progress(batch))],
  },
  { title: "Age", kind: "number", text: (batch) => duration(since(batch.created_at)) },
];

const batches = new Table($("#batch-list"), {
  label: "Batches",
  key: (batch) => batch.id,
  empty: "No batches yet.",
  columns: [
    ID, ...STATES,
    {
      title: "Actions", kind: "act", version: (batch) => [batch.status, batch.output_file_id, batch.error_file_id].join(),
      fill: actions,
    },
  ],
});

const ofAll = new Table($("#batches-of-all"), {
  label: "Batches of all tenants",
  key: (batch) => batch.id,
  empty: "No tenant has a batch.",
  columns: [
    ID, { title: "Tenant", kind: "name", text: ({ tenant }) => tenant || "anonymous" }, ...STATES,
    {
      title: "Actions", kind: "act", version: (batch) => batch.status,
      fill: (batch) => (canCancel(batch) ? [cancelButton(batch, "/admin/v1", showBatchesOfAll)] : []),
    },
  ],
});

// Requests that were not executed before the batch was cancelled or expired did not fail.
function progress({ status, num_promoted: promoted, request_counts: { total = 0, completed = 0, failed = 0 } = {} }) {
  const left = total - completed - failed;
  const words = [`${count(completed)} of ${count(total)}`];
  if (failed) words.push(`${count(failed)} failed`);
  if (promoted) words.push(`${count(promoted)} with priority`);
  if (left && (status === "cancelled" || status === "expired")) words.push(`${count(left)} ${status}`);
  return bar(total ? (completed + failed) / total : 0, words.join(", "), { isLimited: false });
}

const canCancel = ({ status }) => !ENDED.has(status) && status !== "cancelling";

// Cancels a batch below `path` after a question, and lists the batches again.
function cancelButton(batch, path, list) {
  const button = el("button", {
    type: "button", className: "danger", textContent: "Cancel", "aria-label": `Cancel ${batch.id}`,
    onclick: async () => {
      const text = "What is running is stopped. The answers so far are kept.";
      const answers = [{ label: "Cancel the batch", value: "cancel", kind: "danger" }];
      if (!(await ask(`Cancel ${batch.id}?`, text, answers, "Let it run"))) return;
      await attempt(button, async () => {
        await request(`${path}/batches/${batch.id}/cancel`, { method: "POST" });
        await list();
      });
    },
  });
  return button;
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
  if (canCancel(batch)) buttons.push(cancelButton(batch, "/v1", listBatches));
  return buttons;
}

async function save(fileId) {
  download(`${fileId}.jsonl`, await (await request(`/v1/files/${fileId}/content`)).blob());
}

export async function listBatches() {
  const { data } = await json("/v1/batches?limit=50");
  batches.show(data);
}

// Shows operators the newest batches of all tenants, those that have not ended first. A gateway that cannot store
// anything says so here, and the rest of the view is shown.
export async function showBatchesOfAll() {
  let problem = "";
  try {
    const { data } = await json("/admin/v1/batches?limit=100");
    const all = data.map(({ tenant, batch }) => ({ ...batch, tenant }));
    ofAll.show(all.sort((one, other) => ENDED.has(one.status) - ENDED.has(other.status)));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    problem = error.message;
  }
  const place = $("#batches-problem");
  if (place.textContent !== problem) place.textContent = problem; // once, because screen readers read it out
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
