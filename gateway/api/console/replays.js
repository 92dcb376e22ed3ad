// The reports of `warren replay`: how the answers of another model compare with stored answers.

import { ApiError, json } from "./api.js";
import { $, Table, bar, count, day, duration, el, since } from "./dom.js";

const FINGERPRINT_CHARS = 8; // as many as warren replay needs

const known = (number) => (number === null || number === undefined ? "–" : count(number));

const replays = new Table($("#replays"), {
  label: "Replays",
  key: (replay) => replay.id,
  empty: "No stored answers were compared with another model's: warren replay compares them.",
  columns: [
    {
      title: "Model", kind: "name", version: ({ report }) => report.model + report.fingerprint,
      fill: ({ report: { model, fingerprint } }) => [el("span", { title: fingerprint }, model,
        el("span", { className: "sub", textContent: (fingerprint ?? "").slice(0, FINGERPRINT_CHARS) }))],
    },
    { title: "Tenant", kind: "name", text: ({ tenant }) => tenant || "anonymous" },
    {
      title: "Requests", version: () => "",
      fill: ({ report }) => [el("span", {}, `${Number((100 * report.share).toPrecision(3))} %`,
        el("span", { className: "sub", textContent: `since ${day(report.since)}` }))],
    },
    { title: "Drawn", kind: "number", text: ({ report }) => count(report.drawn) },
    { title: "No answer", kind: "number", text: ({ report }) => count(report.failed) },
    {
      title: "Equal", version: () => "",
      fill: ({ report: { equal, compared } }) => [el("span", {},
        ...bar(compared ? equal / compared : 0, `${count(equal)} of ${count(compared)}`, { isLimited: false }))],
    },
    { title: "Median token", kind: "number", text: ({ report }) => known(report.median_token) },
    { title: "Median margin", kind: "number", text: ({ report }) => margin(report) },
    { title: "Age", kind: "number", text: (replay) => duration(since(replay.created_at)) },
  ],
});

// How sure the model was where the answers part, as the command writes it.
function margin({ median_margin: value, median_margin_is_at_least: isAtLeast }) {
  if (value === null || value === undefined) return "–";
  return (isAtLeast ? "≥ " : "") + value.toFixed(3);
}

// Shows the newest reports. A gateway that cannot say them says why, and the rest of the view is shown.
export async function showReplays() {
  let problem = "";
  try {
    replays.show((await json("/admin/v1/replays")).data);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    problem = error.message;
  }
  const place = $("#replays-problem");
  if (place.textContent !== problem) place.textContent = problem; // once, because screen readers read it out
}
