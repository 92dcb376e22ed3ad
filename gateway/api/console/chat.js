// The chat. A conversation is kept in the tab's session, with the place in the stream of an answer that
// is not complete: after a reload, or when the connection breaks, its stream is resumed from there.

import { ApiError, events, json, postJson, request } from "./api.js";
import { $, el, show, speak } from "./dom.js";
import { parseTools } from "./tools.js";
import { NEW, TurnView, isRunning, isTold } from "./turn.js";

const STORE = "warren.chat";
const SAVE_MS = 400;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;
const PASSING = new Set(["unreachable", "service_unavailable", "broker_unavailable", "rate_limit_exceeded"]);
const ELSEWHERE = "Another tab reads this answer now.";

const conversation = $("#conversation");
const question = $("#question");
const parameters = $("#parameters");
const state = { turns: [], parameters: {}, isMarkdown: true, ...JSON.parse(sessionStorage.getItem(STORE) ?? "{}") };
state.turns = state.turns.map((turn) => ({ ...NEW, ...turn }));
let views = [];
let savedAt = 0;

// A turn is saved with its answer so far and the id of the last event together, so that both always fit.
function save() {
  savedAt = performance.now();
  try {
    sessionStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    show("This conversation is too long to survive a reload.");
  }
}

const current = () => views.find((view) => isRunning(view.turn));

// Follows the stream of a turn to its end, through lost connections.
async function follow(view) {
  const { turn } = view;
  let pauseMs = FIRST_PAUSE_MS;
  while (isRunning(turn)) {
    try {
      const response = await open(turn);
      if (!isRunning(turn)) return void discard(turn); // stopped before its id was known
      if (response.status === 204) return end(view, "done");
      save();
      view.update();
      pauseMs = FIRST_PAUSE_MS;
      if (await readAll(view, response)) return;
    } catch (error) {
      if (!isRunning(turn)) return;
      if (!PASSING.has(error.code)) return fail(view, error);
      pauseMs = Math.max(pauseMs, error.retryAfterMs);
    }
    view.update("Reconnecting …");
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
  }
}

// Sends the question, or goes on after the last event. A question that was sent and whose answer's id is
// not known yet is sent again: its Idempotency-Key leads to the same answer.
async function open(turn) {
  if (turn.id !== null) {
    const place = turn.place === "" ? {} : { "Last-Event-ID": turn.place };
    return request(`/v1/streams/${turn.id}`, { headers: { Accept: "text/event-stream", ...place } });
  }
  const headers = { Accept: "text/event-stream", "Idempotency-Key": turn.key };
  const response = await postJson("/v1/chat/completions", bodyOf(turn), { headers });
  turn.id = response.headers.get("x-request-id");
  return response;
}

// Reads events until the end of the answer; returns false if the connection ended before.
async function readAll(view, response) {
  const { turn } = view;
  for await (const event of events(response)) {
    if (!isRunning(turn)) return true;
    const isLow = isAtEnd();
    if (event.comment?.startsWith("continued ")) {
      view.move(JSON.parse(event.comment.slice("continued ".length)));
      view.update();
    }
    if (event.data === "[DONE]") {
      end(view, "done");
      return true;
    }
    if (event.data !== undefined) read(view, JSON.parse(event.data));
    turn.place = event.id ?? turn.place;
    if (isLow) scrollToEnd();
    if (performance.now() - savedAt > SAVE_MS) save();
  }
  return false;
}

function read(view, chunk) {
  const { turn } = view;
  if (chunk.error) throw new ApiError(0, chunk.error.code, chunk.error.message, 0);
  turn.usage = chunk.usage ?? turn.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  turn.finish = choice.finish_reason ?? turn.finish;
  const { content, reasoning_content: thought, tool_calls: pieces } = choice.delta;
  if (thought) view.think(thought);
  if (content) {
    turn.firstAt ??= Date.now();
    view.append(content);
  }
  if (pieces) view.call(pieces);
  if (content || thought || pieces) view.update();
}

function end(view, how) {
  const { turn } = view;
  turn.state = how;
  if (turn.firstAt && how === "done") turn.seconds = (Date.now() - turn.firstAt) / 1000;
  save();
  view.update();
  showButtons();
  if (turn.calls.length && how === "done") speak(`The model calls ${turn.calls.map(({ name }) => name).join(", ")}.`);
  if (turn.error !== ELSEWHERE) discard(turn);
}

function fail(view, error) {
  const words = { stream_expired: "The gateway no longer keeps this answer.", taken_over: ELSEWHERE };
  view.turn.error = words[error.code] ?? error.message;
  end(view, "failed");
}

// The answer is here, or is not wanted: its stream need not be kept any longer.
function discard(turn) {
  if (turn.id !== null) request(`/v1/streams/${turn.id}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

// Sends a question, or the results of the tools that the last answer called.
function send(asked) {
  const turn = { ...structuredClone(NEW), ...asked, settings: readParameters(), key: randomKey() };
  state.turns.push(turn);
  save();
  const view = newView(turn);
  views.push(view);
  showButtons();
  scrollToEnd();
  follow(view);
}

function newView(turn) {
  return new TurnView(turn, {
    isMarkdown: state.isMarkdown,
    curlOf: (one) => curl(bodyOf(one)),
    onResults: (results) => send({ results }),
  });
}

// The request of a turn: the turns before it that have an answer, and what it asks itself.
function bodyOf(turn) {
  const { model, temperature, max_tokens, seed, system, tools } = turn.settings;
  const messages = system ? [{ role: "system", content: system }] : [];
  const told = state.turns.slice(0, state.turns.indexOf(turn)).filter(isTold);
  told.forEach((one, k) => messages.push(...asking(one), answering(one, (told[k + 1] ?? turn).results !== null)));
  messages.push(...asking(turn));
  const body = { model, messages, temperature, stream: true, stream_options: { include_usage: true }, detach: true };
  if (max_tokens !== null) body.max_tokens = max_tokens;
  if (seed !== null) body.seed = seed;
  const declared = parseTools(tools ?? "");
  if (declared.length) body.tools = declared;
  return body;
}

const asking = ({ question: content, results }) =>
  results ? results.map(({ id, content: result }) => ({ role: "tool", tool_call_id: id, content: result }))
    : [{ role: "user", content }];

// Calls without results are left out: a conversation may not go on after them.
function answering({ text: content, calls }, areAnswered) {
  if (!areAnswered) return { role: "assistant", content };
  const tool_calls = calls.map(({ id, name, arguments: given }) =>
    ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content, tool_calls };
}

function stop() {
  const view = current();
  if (view) end(view, "stopped");
}

function clear() {
  stop();
  state.turns = [];
  views = [];
  save();
  $("#turns").replaceChildren();
  showButtons();
  question.focus();
}

function showButtons() {
  const isBusy = current() !== undefined;
  $("#send").hidden = isBusy;
  $("#stop").hidden = !isBusy;
  $("#welcome").hidden = state.turns.length > 0;
  const last = views.findLast(({ turn }) => isRunning(turn) || isTold(turn));
  for (const view of views) view.calls.ask(view === last && view.turn.state === "done");
}

function readParameters() {
  const { model, temperature, max_tokens, seed, system, tools } = Object.fromEntries(new FormData(parameters));
  return {
    model,
    temperature: Number(temperature),
    max_tokens: Number(max_tokens) || null,
    seed: seed === "" ? null : Number(seed),
    system: system.trim(),
    tools: tools.trim(),
  };
}

function randomKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The request as a command. The key is a variable of the shell, because commands are kept and shared.
function curl(body) {
  const { detach, ...plain } = body;
  const quoted = JSON.stringify(plain, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer ${location.origin}/v1/chat/completions`,
    "-H 'Content-Type: application/json'",
    '-H "Authorization: Bearer $OPENAI_API_KEY"',
    `-d '${quoted}'`,
  ].join(" \\\n  ");
}

const isAtEnd = () => conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 80;

function scrollToEnd() {
  conversation.scrollTop = conversation.scrollHeight;
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

// Says what is wrong with the declared tools; returns whether nothing is.
function checkTools() {
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

// Lists the models that have a worker; keeps the chosen one.
export function showModels(names) {
  const select = $("#model");
  const chosen = select.value || state.parameters.model;
  const kept = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
  if (kept.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...kept.map((name) => el("option", { value: name, textContent: name })));
  if (chosen) select.value = chosen;
}

// Asks the gateway for its models; returns their names. Throws ApiError.
export async function listModels() {
  const { data } = await json("/v1/models");
  const names = data.map((model) => model.id);
  showModels(names);
  return names;
}

export async function startChat() {
  for (const [name, value] of Object.entries(state.parameters)) {
    if (name !== "model" && value !== null) parameters.elements[name].value = value;
  }
  $("#temperature-value").textContent = $("#temperature").value;
  parameters.addEventListener("input", () => {
    state.parameters = readParameters();
    $("#temperature-value").textContent = $("#temperature").value;
    save();
  });
  $("#markdown").checked = state.isMarkdown;
  $("#markdown").addEventListener("change", () => {
    state.isMarkdown = $("#markdown").checked;
    for (const view of views) view.draw(state.isMarkdown);
    save();
  });
  $("#tools").addEventListener("change", checkTools);
  parameters.addEventListener("submit", (event) => event.preventDefault());
  const narrow = matchMedia("(max-width: 60rem)"); // there the settings fold
  narrow.addEventListener("change", () => { $("#settings").open = !narrow.matches; });
  $("#settings").open = !narrow.matches;

  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || current()) return;
    if (!$("#model").value) return void show("No worker serves a model yet.");
    if (!checkTools()) {
      $("#settings").open = true;
      return void $("#tools").focus();
    }
    question.value = "";
    fit();
    send({ question: text });
  });
  question.addEventListener("input", fit);
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("#composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("dialog[open]")) stop();
  });
  $("#stop").addEventListener("click", stop);
  $("#clear").addEventListener("click", clear);
  addEventListener("pagehide", save);

  views = state.turns.map(newView);
  showButtons();
  scrollToEnd();
  const unfinished = current();
  if (unfinished) follow(unfinished);
  await listModels();
}
