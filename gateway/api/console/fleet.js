// Live workers, queues and streams, and what each tenant has used: all from /admin/v1/status.

import { attempt, json, request } from "./api.js";
import { $, Table, ask, bar, count, day, duration, el, percent, plural, shortId, show, since, tag } from "./dom.js";
import { showDeadlines } from "./deadlines.js";
import { lacksConsumer, problemsOf } from "./problems.js";
import { showRuns } from "./runs.js";

const LANES = { interactive: "Interactive", batch: "Batch", quick: "Embeddings and tokens", suspect: "Suspect" };
const STREAM_STATES = { waiting: "waiting", running: "running", ended: "ended" };

const name = (tenant) => tenant || "anonymous";
const idCell = (id) => [el("span", { className: "id", title: id, textContent: shortId(id) })];

const workers = new Table($("#workers"), {
  label: "Workers",
  key: (worker) => worker.id,
  empty: "No worker is alive. Requests wait in their queues; start one with warren worker.",
  columns: [
    { title: "Worker", version: (worker) => worker.id, fill: (worker) => idCell(worker.id) },
    {
      title: "Model", kind: "name", version: (worker) => worker.model + worker.numerics,
      fill: (worker) => [el("span", {}, worker.model, el("span", { className: "sub", textContent: worker.numerics }))],
    },
    {
      title: "Sequences", version: (worker) => `${worker.num_running}/${worker.max_num_seqs}`,
      fill: (worker) => [el("span", {}, ...bar(worker.num_running / worker.max_num_seqs,
        `${worker.num_running} of ${worker.max_num_seqs}`))],
    },
    { title: "Waiting", kind: "number", text: (worker) => count(worker.num_waiting) },
    {
      title: "KV cache", version: (worker) => percent(worker.kv_usage),
      fill: (worker) => [el("span", {}, ...bar(worker.kv_usage, percent(worker.kv_usage)))],
    },
    { title: "Answered", kind: "number", text: (worker) => count(worker.num_answered) },
    { title: "Uptime", kind: "number", text: (worker) => duration(since(worker.started_at)) },
    {
      title: "State", kind: "name", version: (worker) => worker.state + worker.end_notice,
      fill: (worker) => [el("span", {}, tag(worker.state.replaceAll("_", " "), worker.state === "serving" ? "good" : "warn"), reasonOf(worker))],
    },
    { title: "Actions", kind: "act", version: (worker) => worker.state, fill: (worker) => [drainButton(worker)] },
  ],
});

const queues = new Table($("#queues"), {
  label: "Queues",
  key: (queue) => `${queue.model} ${queue.lane}`,
  empty: "No queues yet: a model's queues appear with its first worker.",
  columns: [
    { title: "Model", kind: "name", text: (queue) => queue.model },
    { title: "Class", text: (queue) => LANES[queue.lane] },
    { title: "Waiting", kind: "number", text: (queue) => count(queue.num_waiting) },
    { title: "Oldest", kind: "number", text: (queue) => duration(queue.oldest_s) },
    {
      title: "Consumers", kind: "number", version: (queue) => `${queue.num_consumers} ${lacksConsumer(queue)}`,
      fill: (queue) => [lacksConsumer(queue) ? tag("no consumer", "warn") : count(queue.num_consumers)],
    },
  ],
});

const streams = new Table($("#streams"), {
  label: "Streams",
  key: (stream) => stream.id,
  empty: "No request is in flight.",
  columns: [
    { title: "Request", version: (stream) => stream.id, fill: (stream) => idCell(stream.id) },
    { title: "Tenant", kind: "name", text: (stream) => name(stream.tenant) },
    { title: "Model", kind: "name", text: (stream) => stream.model },
    {
      title: "State", version: (stream) => stream.state + stream.num_workers + stream.num_crashes,
      fill: (stream) => [el("span", {}, tag(STREAM_STATES[stream.state], stream.state === "running" ? "good" : ""), moved(stream))],
    },
    {
      title: "Worker", version: (stream) => stream.worker,
      fill: (stream) => (stream.worker ? idCell(stream.worker) : ["–"]),
    },
    { title: "Tokens", kind: "number", text: (stream) => count(stream.num_tokens) },
    { title: "Age", kind: "number", text: (stream) => duration(since(stream.created_at)) },
    {
      title: "Actions", kind: "act", version: (stream) => stream.state,
      fill: (stream) => (stream.state === "ended" ? [] : [cancelButton(stream)]),
    },
  ],
});

const tenants = new Table($("#tenants"), {
  label: "Usage by tenant",
  key: (tenant) => tenant.tenant,
  empty: "No tenant has sent a request since the gateway's start.",
  columns: [
    { title: "Tenant", kind: "name", text: (tenant) => name(tenant.tenant) },
    { title: "Requests", kind: "number", text: (tenant) => count(tenant.num_requests) },
    { title: "In flight", kind: "number", text: (tenant) => count(tenant.num_in_flight) },
    { title: "Failed", kind: "number", text: (tenant) => count(tenant.num_failed) },
    { title: "Cancelled", kind: "number", text: (tenant) => count(tenant.num_cancelled ?? 0) }, // an older gateway counts none
    { title: "Prompt tokens", kind: "number", text: (tenant) => count(tenant.num_prompt_tokens) },
    { title: "Of them cached", kind: "number", text: (tenant) => count(tenant.num_cached_tokens) },
    { title: "Generated tokens", kind: "number", text: (tenant) => count(tenant.num_generated_tokens) },
  ],
});

// A key is listed for what it may use and what it uses, at all gateways.
const keys = new Table($("#keys"), {
  label: "API keys",
  key: (key) => key.id,
  empty: "This gateway needs no API keys.",
  columns: [
    {
      title: "Key", kind: "name", version: (key) => key.label,
      fill: (key) => [el("span", {}, el("span", { className: "id", textContent: key.id }), el("span", { className: "sub", textContent: key.label }))],
    },
    { title: "Tenant", kind: "name", text: (key) => key.tenant },
    limit("Requests a minute", (key) => [key.num_requests, key.requests_per_minute]),
    limit("Tokens a minute", (key) => [key.num_tokens, key.tokens_per_minute]),
    limit("At the same time", (key) => [key.num_running, key.max_concurrent]),
    { title: "Expires", text: (key) => (key.expires_at === null ? "never" : day(key.expires_at)) },
  ],
});

// A column with the use of a limit; `read` returns the use and the limit.
function limit(title, read) {
  const fill = (key) => {
    const [used, most] = read(key);
    return [el("span", {}, ...(most === null ? ["no limit"] : bar(used / most, `${count(used)} of ${count(most)}`)))];
  };
  return { title, version: (key) => read(key).join(), fill };
}

function moved({ num_workers: all, num_crashes: lost }) {
  if (all < 2) return null;
  return el("span", { className: "sub", textContent: lost ? `${plural(lost, "worker")} lost` : "moved" });
}

// Why a worker leaves. An older gateway does not say.
function reasonOf({ end_notice: notice }) {
  return notice ? el("span", { className: "sub", textContent: `Its machine ends: ${notice}` }) : null;
}

function drainButton(worker) {
  const isLeaving = worker.state === "leaving";
  const button = el("button", {
    type: "button", className: "quiet", textContent: isLeaving ? "Move requests now" : "Drain",
    "aria-label": `${isLeaving ? "Move the requests of" : "Drain"} worker ${shortId(worker.id)}`,
    onclick: () => drain(worker, button),
  });
  return button;
}

async function drain(worker, button) {
  const id = shortId(worker.id);
  const answers = [{ label: "Move requests now", value: "now", kind: worker.state === "leaving" ? "strong" : "quiet" }];
  if (worker.state === "serving") answers.push({ label: "Let requests finish", value: "gently", kind: "strong" });
  const choice = await ask(`Drain worker ${id}?`,
    "It takes no more requests and exits. Running requests finish within its grace period or move to other " +
    "workers, where they continue without a gap. Whoever started the worker may start it again.", answers);
  if (!choice) return;
  await attempt(button, async () => {
    const query = choice === "now" ? "?immediate=true" : "";
    await request(`/admin/v1/workers/${encodeURIComponent(worker.id)}/drain${query}`, { method: "POST" });
    show(`Worker ${id} is draining.`);
  });
}

function cancelButton(stream) {
  const id = shortId(stream.id);
  const button = el("button", {
    type: "button", className: "danger", textContent: "Cancel", "aria-label": `Cancel stream ${id}`,
    onclick: async () => {
      const text = `Its tenant is ${name(stream.tenant)}. The client gets an error after the tokens that it has, and nothing can be resumed.`;
      const answers = [{ label: "Cancel the stream", value: "cancel", kind: "danger" }];
      if (!(await ask(`Cancel stream ${id}?`, text, answers, "Let it run"))) return;
      await attempt(button, async () => {
        await request(`/admin/v1/streams/${encodeURIComponent(stream.id)}`, { method: "DELETE" });
        show(`Stream ${id} was cancelled.`);
      });
    },
  });
  return button;
}

// The last status of each gateway: behind a proxy, each answer may come from another one.
const heard = new Map();
const FORGOTTEN_AFTER_MS = 15_000;

function remember(status) {
  heard.set(status.gateway.id, { status, at: performance.now() });
  for (const [id, { at }] of heard) if (performance.now() - at > FORGOTTEN_AFTER_MS) heard.delete(id);
  return [...heard.values()].map((one) => one.status);
}

function allStreams(statuses) {
  const byId = new Map(statuses.flatMap((status) => status.streams).map((stream) => [stream.id, stream]));
  return [...byId.values()].sort((one, other) => one.created_at - other.created_at);
}

function allTenants(statuses) {
  const byName = new Map();
  for (const { tenant, ...counts } of statuses.flatMap((status) => status.tenants)) {
    const sums = byName.get(tenant) ?? { tenant };
    for (const [name, number] of Object.entries(counts)) sums[name] = (sums[name] ?? 0) + number;
    byName.set(tenant, sums);
  }
  return [...byName.values()].sort((one, other) => (one.tenant < other.tenant ? -1 : 1));
}

// Throws ApiError; with status 403 if the key is not an operator's.
export async function showStatus() {
  const status = await json("/admin/v1/status");
  const statuses = remember(status);
  workers.show(status.workers);
  queues.show(status.queues.filter(({ lane, num_waiting: ready }) => lane !== "suspect" || ready));
  streams.show(allStreams(statuses));
  tenants.show(allTenants(statuses));
  showRuns(statuses);
  showDeadlines(statuses);
  keys.show(status.keys ?? []); // an older gateway lists none
  $("#problems").replaceChildren(...problemsOf(status).map(({ state, text }) => el("li", { className: state, textContent: text })));
  const numRequests = statuses.reduce((sum, { gateway }) => sum + gateway.num_requests, 0);
  const uptime = duration(since(status.gateway.started_at));
  const isAlone = statuses.length === 1;
  $("#fleet-lead").textContent = `Warren ${status.gateway.version}. ` +
    (isAlone ? `This gateway has run for ${uptime} and serves ` : `${statuses.length} gateways serve `) +
    `${plural(numRequests, "request")} now.`;
  $("#usage-lead").textContent = isAlone
    ? `Generations at this gateway since its start ${uptime} ago.`
    : `Generations at ${statuses.length} gateways, of each since its start.`;
  return status;
}
