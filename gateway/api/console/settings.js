// The settings of the chat: what the next request asks for. The tab keeps them.

import { json } from "./api.js";
import { $, el } from "./dom.js";
import { parseTools } from "./tools.js";

const STORE = "warren.settings";
const DEFAULT_MAX_TOKENS = 2048;
const form = $("#parameters");
const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
let lengths = new Map(); // of the models' contexts

export function readSettings() {
  const { model, temperature, max_tokens, seed, system, tools } = Object.fromEntries(new FormData(form));
  return {
    model,
    temperature: Number(temperature),
    max_tokens: Number(max_tokens) || null,
    seed: seed === "" ? null : Number(seed),
    system: system.trim(),
    tools: tools.trim(),
    receipt: !$("#receipt-option").hidden && $("#receipt").checked,
  };
}

// Offers to ask for receipts.
export function offerReceipts() {
  $("#receipt-option").hidden = false;
}

// Shows what was kept, and calls `onMarkdown` when answers are to be shown differently.
export function startSettings(onMarkdown) {
  const { isMarkdown = true, isReceipt = false, model, ...values } = kept;
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value ?? "";
  $("#markdown").checked = isMarkdown;
  $("#receipt").checked = isReceipt;
  showTemperature();
  form.addEventListener("input", () => {
    showTemperature();
    keep();
  });
  form.addEventListener("change", () => limitTokens());
  form.addEventListener("submit", (event) => event.preventDefault());
  $("#tools").addEventListener("change", checkTools);
  $("#receipt").addEventListener("change", keep);
  $("#markdown").addEventListener("change", () => {
    keep();
    onMarkdown();
  });
}

export const isMarkdown = () => $("#markdown").checked;

function keep() {
  const { max_tokens, receipt, ...settings } = readSettings();
  if (isChosen()) settings.max_tokens = max_tokens;
  sessionStorage.setItem(STORE, JSON.stringify({ ...settings, isMarkdown: isMarkdown(), isReceipt: $("#receipt").checked }));
}

function showTemperature() {
  $("#temperature-value").textContent = $("#temperature").value;
}

const isChosen = () => $("#max-tokens").value !== ($("#max-tokens").dataset.default ?? "");

// Until the user chooses a limit, an answer gets 2,048 tokens, and no more than half of the model's context.
function limitTokens() {
  const field = $("#max-tokens");
  const before = field.dataset.default;
  const length = lengths.get($("#model").value);
  if (length === undefined) return;
  field.dataset.default = Math.min(DEFAULT_MAX_TOKENS, Math.ceil(length / 2));
  const isUntouched = before === undefined ? !("max_tokens" in kept) && field.value === "" : field.value === before;
  if (isUntouched) field.value = field.dataset.default;
}

// Says what is wrong with the declared tools; returns whether nothing is.
export function checkTools() {
  const field = $("#tools");
  let problem = "";
  try {
    parseTools(field.value);
  } catch (error) {
    problem = error.message;
  }
  $("#tools-error").textContent = problem;
  field.setAttribute("aria-invalid", String(problem !== ""));
  return problem === "";
}

// Lists the models that have a worker, as { id, max_model_len }; keeps the chosen one.
export function showModels(models) {
  const select = $("#model");
  const names = models.map(({ id }) => id);
  const chosen = select.value || kept.model;
  const listed = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
  lengths = new Map(models.map(({ id, max_model_len: length }) => [id, length]));
  if (listed.join() !== [...select.options].map((option) => option.value).join()) {
    select.replaceChildren(...listed.map((name) => el("option", { value: name, textContent: name })));
    if (chosen) select.value = chosen;
  }
  limitTokens();
}

// Asks the gateway for its models; returns how many there are. Throws ApiError.
export async function listModels() {
  const { data } = await json("/v1/models");
  showModels(data);
  return data.length;
}
