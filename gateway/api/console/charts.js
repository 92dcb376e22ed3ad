// The last hour in charts, from the samples that the gateways keep.

import { json } from "./api.js";
import { Chart } from "./chart.js";
import { $, count } from "./dom.js";

const FORGOTTEN_AFTER_S = 60;
const heard = new Map(); // the last history of each gateway: behind a proxy, each answer may come from another

const seconds = (value) => (value === 0 ? "0 s" : value < 1 ? `${Math.round(1000 * value)} ms` : `${Number(value.toFixed(1))} s`);
const whole = (value) => count(Number(value.toFixed(value < 10 ? 1 : 0)));
const EMPTY = "No samples yet: a gateway takes them every 15 s.";

const charts = [
  new Chart($("#charts"), { title: "Tokens per second", read: (sample) => sample.tokens_per_s, write: whole, empty: EMPTY }),
  new Chart($("#charts"), {
    title: "Time to first token, 95 %", read: (sample) => sample.first_token_s, write: seconds,
    empty: "No first token in the last hour.",
  }),
  new Chart($("#charts"), { title: "Jobs that wait", read: (sample) => sample.num_waiting, write: whole, empty: EMPTY }),
];

// The samples of all gateways on one grid of times. The rate is their sum, the time to first token that of the
// slowest, and the queue is the same for all.
function merged(histories) {
  const byTime = new Map();
  for (const { interval_s: interval, data } of histories) {
    for (const sample of data) {
      const at = interval * Math.round(sample.at / interval);
      const sum = byTime.get(at) ?? { at, tokens_per_s: 0, first_token_s: null, num_waiting: 0 };
      sum.tokens_per_s += sample.tokens_per_s;
      if (sample.first_token_s !== null) sum.first_token_s = Math.max(sum.first_token_s ?? 0, sample.first_token_s);
      sum.num_waiting = Math.max(sum.num_waiting, sample.num_waiting);
      byTime.set(at, sum);
    }
  }
  return [...byTime.values()].sort((one, other) => one.at - other.at);
}

// Throws ApiError.
export async function showCharts() {
  const history = await json("/admin/v1/history");
  const now = performance.now() / 1000;
  heard.set(history.gateway, { history, at: now });
  for (const [id, { at }] of heard) if (now - at > FORGOTTEN_AFTER_S) heard.delete(id);
  const samples = merged([...heard.values()].map((one) => one.history));
  for (const chart of charts) chart.show(samples);
}
