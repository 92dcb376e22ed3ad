// The chat. A conversation is kept in the tab's session, with the place in the stream of an answer that
// is not complete: after a reload, or when the connection breaks, its stream is resumed from there.

import { ApiError, events, json, postJson, request } from "./api.js";
import { $, copy, el, plural, show, speak } from "./dom.js";

const STORE = "warren.chat";
const SAVE_MS = 400;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 5000;
const PASSING = new Set(["unreachable", "service_unavailable", "broker_unavailable", "rate_limit_exceeded"]);
const ELSEWHERE = "Another tab reads this answer now.";
const MOVED = {
  worker_lost: "Worker lost, continued on another",
  handed_over: "Worker left, continued on another",
};

const conversation = $("#conversation");
const question = $("#question");
const parameters = $("#parameters");
const state = { turns: [], parameters: {}, ...JSON.parse(sessionStorage.getItem(STORE) ?? "{}") };
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

const isRunning = (turn) => turn.state === "running";
const current = () => views.find((view) => isRunning(view.turn));

// One question and its answer on the page.
class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.text = null;
    this.unspoken = "";
    this.answer = el("div", { className: "answer" });
    this.thoughts = el("div");
    this.reasoning = el("details", { className: "reasoning", hidden: true },
      el("summary", { textContent: "Reasoning" }), this.thoughts);
    this.notes = el("ul", { className: "notes", hidden: true });
    this.remark = el("span");
    this.problem = el("span", { className: "error", role: "alert" });
    const button = (textContent, onclick) => el("button", { type: "button", className: "plain", textContent, onclick });
    this.actions = el("span", {},
      button("Copy", () => copy(turn.text, "Answer")), " ",
      button("Copy as curl", () => copy(curl(bodyOf(turn)), "Command")));
    this.element = el("li", {},
      el("p", { className: "asked" }, el("span", { className: "hidden", textContent: "You: " }), turn.question),
      this.reasoning, this.answer, this.notes,
      el("div", { className: "after" }, this.remark, this.problem, this.actions));
    $("#turns").append(this.element);
    this.#restore();
    this.update();
  }

  // Draws what was saved, with a seam where another worker went on.
  #restore() {
    const { text, moves, reasoning } = this.turn;
    let place = 0;
    for (const move of moves) {
      this.#write(text.slice(place, move.at));
      this.#seam(move);
      place = move.at;
    }
    this.#write(text.slice(place));
    if (reasoning) this.#think(reasoning);
  }

  append(piece) {
    this.turn.text += piece;
    this.#write(piece);
    this.unspoken += piece;
    const sentences = this.unspoken.match(/^.*[.!?:\n](?=\s|$)/s);
    if (sentences) {
      speak(sentences[0]);
      this.unspoken = this.unspoken.slice(sentences[0].length);
    }
  }

  think(piece) {
    this.turn.reasoning += piece;
    this.#think(piece);
  }

  move({ attempt, reason }) {
    if (this.turn.moves.some((move) => move.attempt === attempt)) return; // told again after a reload
    const move = { attempt, reason, at: this.turn.text.length };
    this.turn.moves.push(move);
    this.#seam(move);
    speak(MOVED[reason]);
  }

  update(remark = null) {
    const { turn } = this;
    const isWaiting = isRunning(turn) && !turn.text && !turn.reasoning;
    this.answer.className = isRunning(turn) ? `answer ${isWaiting ? "waiting" : "streaming"}` : "answer";
    this.answer.setAttribute("aria-busy", String(isRunning(turn)));
    this.remark.textContent = remark ?? remarkOf(turn);
    this.problem.textContent = turn.error;
    this.actions.hidden = isRunning(turn);
    if (!isRunning(turn) && this.unspoken) {
      speak(this.unspoken);
      this.unspoken = "";
    }
  }

  #write(piece) {
    if (this.text === null) {
      this.text = document.createTextNode("");
      this.answer.append(this.text);
    }
    this.text.appendData(piece);
  }

  #think(piece) {
    this.reasoning.hidden = false;
    this.thoughts.append(piece);
  }

  #seam({ reason }) {
    const words = MOVED[reason];
    if (this.turn.text) this.answer.append(el("span", { className: "seam", title: words }));
    this.text = null;
    this.notes.hidden = false;
    this.notes.append(el("li", { textContent: words }));
  }
}

function remarkOf({ state: now, text, usage, seconds, finish }) {
  const parts = [];
  if (now === "running") return "";
  if (now === "stopped") parts.push("Stopped");
  if (finish === "length") parts.push("Cut off at the maximum of tokens");
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  if (usage && seconds) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  if (!text && now === "done") parts.unshift("The answer is empty");
  return parts.join(" · ");
}

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
  const { content, reasoning_content: thought } = choice.delta;
  if (thought) view.think(thought);
  if (content) {
    turn.firstAt ??= Date.now();
    view.append(content);
  }
  if (content || thought) view.update();
}

function end(view, how) {
  const { turn } = view;
  turn.state = how;
  if (turn.firstAt && how === "done") turn.seconds = (Date.now() - turn.firstAt) / 1000;
  save();
  view.update();
  showButtons();
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

function send(text) {
  const turn = {
    question: text, settings: readParameters(), key: randomKey(), id: null, place: "", text: "", reasoning: "", moves: [], state: "running",
    error: "", usage: null, finish: null, firstAt: null, seconds: null,
  };
  state.turns.push(turn);
  save();
  const view = new TurnView(turn);
  views.push(view);
  showButtons();
  scrollToEnd();
  follow(view);
}

// The request of a turn: the turns before it, and its question.
function bodyOf(turn) {
  const { model, temperature, max_tokens, seed, system } = turn.settings;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question: asked, text } of state.turns.slice(0, state.turns.indexOf(turn))) {
    if (text) messages.push({ role: "user", content: asked }, { role: "assistant", content: text });
  }
  messages.push({ role: "user", content: turn.question });
  const body = { model, messages, temperature, stream: true, stream_options: { include_usage: true }, detach: true };
  if (max_tokens !== null) body.max_tokens = max_tokens;
  if (seed !== null) body.seed = seed;
  return body;
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
}

function readParameters() {
  const { model, temperature, max_tokens, seed, system } = Object.fromEntries(new FormData(parameters));
  return {
    model,
    temperature: Number(temperature),
    max_tokens: Number(max_tokens) || null,
    seed: seed === "" ? null : Number(seed),
    system: system.trim(),
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

// Lists the models that have a worker; keeps the chosen one.
export function showModels(names) {
  const select = $("#model");
  const chosen = select.value || state.parameters.model;
  const kept = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
  if (kept.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...kept.map((name) => el("option", { value: name, textContent: name })));
  if (chosen) select.value = chosen;
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
  parameters.addEventListener("submit", (event) => event.preventDefault());
  const narrow = matchMedia("(max-width: 60rem)"); // there the settings fold
  narrow.addEventListener("change", () => { $("#settings").open = !narrow.matches; });
  $("#settings").open = !narrow.matches;

  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || current()) return;
    if (!$("#model").value) return void show("No worker serves a model yet.");
    question.value = "";
    fit();
    send(text);
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

  views = state.turns.map((turn) => new TurnView(turn));
  showButtons();
  scrollToEnd();
  const unfinished = current();
  if (unfinished) follow(unfinished);
  const { data } = await json("/v1/models");
  showModels(data.map((model) => model.id));
}
