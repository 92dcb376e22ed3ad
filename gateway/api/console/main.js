// The page: its views, and the status that they share.

import { ApiError, askForKey } from "./api.js";
import { listBatches, showBatchesOfAll, startBatches } from "./batches.js";
import { startChat } from "./chat.js";
import { showCharts } from "./charts.js";
import { $, el } from "./dom.js";
import { showStatus } from "./fleet.js";
import { countLetters, listSoon } from "./letters.js";
import { summary } from "./problems.js";
import { showReplays } from "./replays.js";
import { showSession } from "./session.js";
import { listModels, showModels } from "./settings.js";
import { showUsage } from "./usage.js";

const OFTEN_MS = 1000;
const SELDOM_MS = 5000;
const SLOWLY_MS = 15_000; // charts and reports change as often
const WATCHED = new Set(["fleet", "usage", "dead-letters"]);
const OPERATORS = ["fleet", "dead-letters"];
const links = [...document.querySelectorAll("nav a")];
let view = "chat";
let timer = null;
let isOperator = true;
let shownAt = -Infinity; // when the chart or the report was shown last

function open(name) {
  const known = links.find((link) => link.dataset.view === name && !link.hidden);
  view = known ? name : "chat";
  for (const section of document.querySelectorAll(".view")) section.hidden = section.id !== `view-${view}`;
  for (const link of links) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "chat" ? "Warren" : `${$(`#view-${view} h2`).textContent} · Warren`;
  if (view === "chat") $("#question").focus();
  if (view === "dead-letters") listSoon();
  shownAt = -Infinity;
  look();
}

function pulse(state, text) {
  $("#pulse").dataset.state = state;
  $("#pulse-text").textContent = text;
}

// The models of the workers as /v1/models lists them.
function modelsOf(workers) {
  const lengths = new Map();
  for (const { model, max_seq_len: length } of workers) {
    lengths.set(model, Math.min(length, lengths.get(model) ?? Infinity));
  }
  return [...lengths].sort().map(([id, max_model_len]) => ({ id, max_model_len }));
}

// Asks for the status again and again, more often while somebody watches it.
async function look() {
  clearTimeout(timer);
  try {
    if (!isOperator && !document.hidden) {
      pulse(...((await listModels()) ? ["ok", "Ready"] : ["warn", "No workers"]));
    } else if (!document.hidden) {
      const status = await showStatus();
      pulse(...summary(status));
      showModels(modelsOf(status.workers));
      if (view === "fleet") await showBatchesOfAll();
      await countLetters(status.num_dead_letters, view === "dead-letters");
    }
    if (!document.hidden && performance.now() - shownAt > SLOWLY_MS) await showSlowly();
    if (view === "batches" && !document.hidden) await listBatches();
  } catch (error) {
    if (error.status === 403 && isOperator) {
      refuse(error);
      return void look();
    }
    if (error.code === "unreachable") pulse("bad", "Gateway unreachable");
    else pulse("bad", error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(look, WATCHED.has(view) || view === "batches" ? OFTEN_MS : SELDOM_MS);
}

// What is asked for less often, because it changes less often.
async function showSlowly() {
  if (view === "fleet" && isOperator) await Promise.all([showCharts(), showReplays()]);
  if (view === "usage") await showUsage(isOperator);
  shownAt = performance.now();
}

// The key is not an operator's: the chat, the batches and its own usage work, and the other views say what they
// need.
function refuse(error) {
  isOperator = false;
  $("#usage-operators").hidden = true;
  $("#usage-lead").textContent = "What the requests of your tenant have used.";
  for (const name of OPERATORS) {
    const place = $(`#view-${name}`);
    $(".content", place).hidden = true;
    const button = el("button", { type: "button", className: "quiet", textContent: "Use another key", onclick: changeKey });
    $(".refusal", place).replaceChildren(
      el("p", { textContent: error.message }),
      el("p", { textContent: "Whoever runs this gateway can add one: warren keys add NAME --scopes generate,cancel,operator." }),
      el("p", {}, button),
    );
    $(".refusal", place).hidden = false;
  }
}

async function changeKey() {
  if (await askForKey()) location.reload();
}

$("#usage-days").addEventListener("change", () => {
  shownAt = -Infinity;
  look();
});
addEventListener("hashchange", () => open(location.hash.slice(1)));
document.addEventListener("visibilitychange", look);

showSession();
const starting = startChat();
open(location.hash.slice(1));
try {
  await starting;
} catch (error) {
  if (!(error instanceof ApiError)) throw error;
  pulse("bad", error.message);
}
$("nav [data-view=batches]").hidden = !(await startBatches());
if (location.hash === "#batches") open("batches");
