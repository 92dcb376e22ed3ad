// Hedges, audits and equal requests of each model, and the answers about which workers disagree.

import { $, Table, count, duration, el, shortId, since } from "./dom.js";

const number = (title, name) => ({ title, kind: "number", text: (model) => count(model[name]) });

const runs = new Table($("#runs"), {
  label: "Hedges, audits and equal requests",
  key: (model) => model.model,
  empty: "No request had a second worker, an audit or an equal request since the gateway's start.",
  columns: [
    { title: "Model", kind: "name", text: (model) => model.model },
    number("Hedges won", "num_hedges_won"),
    number("Hedges lost", "num_hedges_lost"),
    number("Hedges cancelled", "num_hedges_cancelled"),
    number("Audits equal", "num_audits_equal"),
    number("Audits different", "num_audits_different"),
    number("Audits skipped", "num_audits_skipped"),
    number("Answers from the cache", "num_exact_hit"),
    number("Shared executions", "num_exact_attached"),
  ],
});

const incidents = new Table($("#incidents"), {
  label: "Incidents",
  key: (found) => found.request_id,
  empty: "No audit has found a difference since the gateway's start.",
  columns: [
    { title: "Request", version: (found) => found.request_id, fill: (found) => [el("span", { className: "id", title: found.request_id, textContent: shortId(found.request_id) })] },
    { title: "Model", kind: "name", text: (found) => found.model },
    { title: "Workers", text: (found) => `${shortId(found.worker)} and ${shortId(found.other_worker)}` },
    { title: "Suspect", text: (found) => (found.suspect === null ? "unknown" : shortId(found.suspect)) },
    { title: "Token", kind: "number", text: (found) => count(found.at_token) },
    { title: "Age", kind: "number", text: (found) => duration(since(found.found_at)) },
  ],
});

// Shows what the gateways have counted, each since its start. An older gateway counts nothing of it.
export function showRuns(statuses) {
  const byModel = new Map();
  for (const { model, ...counts } of statuses.flatMap((status) => status.runs ?? [])) {
    const sums = byModel.get(model) ?? { model };
    for (const [name, more] of Object.entries(counts)) sums[name] = (sums[name] ?? 0) + more;
    byModel.set(model, sums);
  }
  runs.show([...byModel.values()].sort((one, other) => (one.model < other.model ? -1 : 1)));
  const found = statuses.flatMap((status) => status.disagreements ?? []);
  incidents.show(found.sort((one, other) => other.found_at - one.found_at));
}
