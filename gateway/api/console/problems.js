// What is wrong with the deployment now: the conditions of the alerts that a gateway can see itself.

import { count, duration, plural, since } from "./dom.js";

const OLD_S = 30; // as in WarrenQueueOld
const RECENT_S = 3600; // as in WarrenWorkersDisagree

export const lacksConsumer = (queue) => queue.num_waiting > 0 && queue.num_consumers === 0;

// The problems as { state, text }, the worst first; `state` is "bad" or "warn".
export function problemsOf({ gateway, workers, queues, num_dead_letters: numDead, disagreements = [] }) {
  if (gateway.status === "broker_unavailable") return [{ state: "bad", text: "Broker unreachable" }];
  const problems = [];
  if (gateway.status === "broker_blocked") problems.push({ state: "bad", text: "The broker lacks memory or disk space, and takes no jobs" });
  for (const queue of queues.filter(lacksConsumer)) {
    problems.push({ state: "bad", text: `${plural(queue.num_waiting, "job")} of ${queue.model} and no worker that takes them` });
  }
  for (const { model, lane, oldest_s: age } of queues) {
    if (lane === "interactive" && age > OLD_S) problems.push({ state: "warn", text: `A job of ${model} has waited ${duration(age)}` });
  }
  const numRecent = disagreements.filter(({ found_at: at }) => since(at) < RECENT_S).length;
  if (numRecent) problems.push({ state: "bad", text: `Workers disagree about ${plural(numRecent, "answer")}` });
  if (gateway.status === "draining") problems.push({ state: "warn", text: "Gateway is draining" });
  if (!workers.some((worker) => worker.state === "serving")) problems.push({ state: "warn", text: "No workers" });
  if (numDead) problems.push({ state: "warn", text: plural(numDead, "dead letter") });
  return problems;
}

// The state of the whole and a line about it.
export function summary(status) {
  const [worst, ...more] = problemsOf(status);
  if (worst) return [worst.state, worst.text + (more.length ? `, and ${count(more.length)} more` : "")];
  const serving = status.workers.filter((worker) => worker.state === "serving").length;
  const waiting = status.queues.reduce((sum, queue) => sum + queue.num_waiting, 0);
  return ["ok", plural(serving, "worker") + (waiting ? `, ${plural(waiting, "job")} waiting` : "")];
}
