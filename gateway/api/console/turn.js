// A turn of the conversation: a question, or the results of tools, and the answer to it.

import { $, copy, el, plural, speak } from "./dom.js";
import { CallsView, collect } from "./tools.js";

const MOVED = {
  worker_lost: "Worker lost, continued on another",
  handed_over: "Worker left, continued on another",
};

// What a turn has before it is sent. It is kept as JSON.
export const NEW = {
  question: "", results: null, id: null, place: "", text: "", reasoning: "", calls: [], moves: [], state: "running",
  error: "", usage: null, finish: null, firstAt: null, seconds: null,
};

export const isRunning = (turn) => turn.state === "running";

// Whether the answer says or calls anything.
export const isTold = (turn) => turn.text !== "" || turn.calls.length > 0;

// One question and its answer on the page.
export class TurnView {
  constructor(turn, { curlOf, onResults }) {
    this.turn = turn;
    this.text = null;
    this.unspoken = "";
    this.answer = el("div", { className: "answer" });
    this.thoughts = el("div");
    this.reasoning = el("details", { className: "reasoning", hidden: true },
      el("summary", { textContent: "Reasoning" }), this.thoughts);
    this.calls = new CallsView(onResults);
    this.notes = el("ul", { className: "notes", hidden: true });
    this.remark = el("span");
    this.problem = el("span", { className: "error", role: "alert" });
    const button = (textContent, onclick) => el("button", { type: "button", className: "plain", textContent, onclick });
    this.actions = el("span", {},
      button("Copy", () => copy(turn.text, "Answer")), " ",
      button("Copy as curl", () => copy(curlOf(turn), "Command")));
    this.element = el("li", {},
      el("p", { className: "asked" }, el("span", { className: "hidden", textContent: "You: " }), asked(turn)),
      this.reasoning, this.answer, this.calls.element, this.notes,
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
    this.calls.show(this.turn.calls);
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

  call(pieces) {
    collect(this.turn.calls, pieces);
    this.calls.show(this.turn.calls);
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
    const isWaiting = isRunning(turn) && !turn.reasoning && !isTold(turn);
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

function asked({ question, results }) {
  return results ? results.map(({ name, content }) => `${name}: ${content}`).join("\n") : question;
}

function remarkOf(turn) {
  const { state: now, usage, seconds, finish } = turn;
  const parts = [];
  if (now === "running") return "";
  if (now === "stopped") parts.push("Stopped");
  if (finish === "length") parts.push("Cut off at the maximum of tokens");
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  if (usage && seconds) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  if (!isTold(turn) && now === "done") parts.unshift("The answer is empty");
  return parts.join(" · ");
}
