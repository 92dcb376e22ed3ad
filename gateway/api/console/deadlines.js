// Deadlines of the requests that no worker has started, by model and class.

import { $, Table, count, duration, el, tag } from "./dom.js";

const CLASSES = { interactive: "Interactive", batch: "Batch" };

const due = (title, within) => ({ title, kind: "number", text: (one) => count(one.due_tokens[within] ?? 0) });

const deadlines = new Table($("#deadlines"), {
  label: "Deadlines",
  key: (one) => `${one.model} ${one.class}`,
  empty: "No request waits for a worker.",
  columns: [
    { title: "Model", kind: "name", text: (one) => one.model },
    { title: "Class", text: (one) => CLASSES[one.class] },
    {
      title: "Least slack", kind: "number", version: ({ slack_s: slack }) => (slack > 0 ? duration(slack) : "passed"),
      fill: ({ slack_s: slack }) => [slack > 0 ? el("span", { textContent: duration(slack) }) : tag("passed", "warn")],
    },
    due("Tokens due in 10 s", "10"),
    due("Tokens due in 1 min", "60"),
    due("Tokens due in 10 min", "600"),
  ],
});

// Shows the nearest deadline of all gateways, and the tokens that are due at all of them. An older gateway says nothing.
export function showDeadlines(statuses) {
  const found = new Map();
  for (const one of statuses.flatMap((status) => status.deadlines ?? [])) {
    const key = `${one.model} ${one.class}`;
    const known = found.get(key);
    found.set(key, known ? joined(known, one) : one);
  }
  deadlines.show([...found.entries()].sort(([one], [other]) => (one < other ? -1 : 1)).map(([, value]) => value));
}

function joined(one, other) {
  const due_tokens = { ...one.due_tokens };
  for (const [within, number] of Object.entries(other.due_tokens)) due_tokens[within] = (due_tokens[within] ?? 0) + number;
  return { ...one, slack_s: Math.min(one.slack_s, other.slack_s), due_tokens };
}
