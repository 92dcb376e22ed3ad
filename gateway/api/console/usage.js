// What requests have used and cost: a tenant's own, or everybody's for operators.

import { json } from "./api.js";
import { $, Table, count, duration, el } from "./dom.js";

const DAY_S = 24 * 3600;
const NUMBERS = [
  { title: "Requests", kind: "number", text: (row) => count(row.requests) },
  { title: "Completed", kind: "number", text: (row) => count(row.completed) },
  { title: "Prompt tokens", kind: "number", text: (row) => count(row.input_tokens) },
  { title: "Of them cached", kind: "number", text: (row) => count(row.cached_tokens) },
  { title: "Generated tokens", kind: "number", text: (row) => count(row.output_tokens) },
  { title: "Cached answers", kind: "number", text: (row) => count(row.cached_answers) },
  { title: "Compute time", kind: "number", text: (row) => duration(row.compute_seconds) },
];
const COST = { title: "Cost", kind: "number", text: ({ cost, currency }) => (cost === null ? "no price" : money(cost, currency)) };
const tables = new Map();

function money(amount, currency) {
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency, maximumFractionDigits: amount < 1 ? 4 : 2 }).format(amount);
  } catch {
    return `${amount.toFixed(4)} ${currency}`; // not a currency that the browser knows
  }
}

// A table appears with its first rows: only then it is known whether there are prices.
function table(place, label, names, hasCost) {
  const id = `${place} ${names.map(({ title }) => title)} ${hasCost}`;
  if (!tables.has(id)) {
    $(place).replaceChildren();
    tables.set(id, new Table($(place), {
      label, key: (row) => names.map(({ text }) => text(row)).join(" "), empty: "Nothing in this time.",
      columns: [...names, ...NUMBERS, ...(hasCost ? [COST] : [])],
    }));
  }
  return tables.get(id);
}

const TENANT = { title: "Tenant", kind: "name", text: (row) => row.tenant || "anonymous" };
const MODEL = { title: "Model", kind: "name", text: (row) => row.model };
const DAY = { title: "Day", text: (row) => row.day };

// Shows the usage of the chosen time; throws ApiError.
export async function showUsage(isOperator) {
  const path = isOperator ? "/admin/v1/usage" : "/v1/usage";
  const start = Math.floor(Date.now() / 1000 - DAY_S * Number($("#usage-days").value));
  const [byName, byDay] = await Promise.all([isOperator ? "tenant,model" : "model", "day"].map((groups) =>
    json(`${path}?start_time=${start}&group_by=${groups}`)));
  const hasCost = byName.currency !== null;
  const priced = ({ data, currency }) => data.map((row) => ({ ...row, currency }));
  const total = byDay.data.reduce((sum, row) => (sum === null || row.cost === null ? null : sum + row.cost), 0);
  const { budget, currency } = byName;
  $("#usage-total").replaceChildren(
    ...(hasCost && total !== null ? [el("strong", { textContent: money(total, currency) }), " in this time"] : []),
    ...(budget ? [` · ${money(budget.spent, currency)} of the budget of ${money(budget.monthly_budget, currency)} in this month`] : []),
  );
  table("#usage-names", "Usage by model", isOperator ? [TENANT, MODEL] : [MODEL], hasCost).show(priced(byName));
  table("#usage-by-day", "Usage by day", [DAY], hasCost).show(priced(byDay).sort((one, other) => (one.day < other.day ? 1 : -1)));
}
