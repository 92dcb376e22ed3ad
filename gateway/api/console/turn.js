// A turn of the conversation: a question, or the results of tools, and the answer to it.

import { MarkdownText, PlainText } from "./answer.js";
import { copy, el, plural, speak } from "./dom.js";
import { showReceipt } from "./receipts.js";
import { CallsView, collect } from "./tools.js";

const MOVED = {
  worker_lost: "Worker lost, continued on another",
  handed_over: "Worker left, continued on another",
};

const MARKUP = /[*_`#|~]/g; // of Markdown, which is not to be read out

// What a turn has before it is sent. It is kept as JSON. `key` is its Idempotency-Key, `parent` the key of the
// turn that it follows, `id` that of its stream, and `place` the id of the last event that was read. `fork` is what the answer continues, if it continues another
// answer, and `marks` has the lengths of the text after whole tokens, with the numbers of tokens.
export const NEW = {
  key: "", parent: null, question: "", results: null, settings: null, fork: null, marks: [], id: null, place: "", text: "", reasoning: "", calls: [], moves: [], state: "running",
  error: "", usage: null, receipt: null, finish: null, firstAt: null, seconds: null,
};

// Whether the answer can be continued at one of its tokens: the gateway may keep it still.
const canFork = ({ state: now, marks, calls }) => now === "done" && marks?.length > 0 && calls.length === 0;

export const isRunning = (turn) => turn.state === "running";

// Whether the answer says or calls anything.
export const isTold = (turn) => turn.text !== "" || turn.calls.length > 0;

// One question and its answer on the page. `onAgain` asks the question again, `onEdit` asks another one in its
// place, `onFork` continues the answer behind a text, and `onBranch` shows the next or previous branch.
export class TurnView {
  constructor(turn, { isMarkdown, curlOf, onResults, onAgain, onEdit, onFork, onBranch }) {
    this.turn = turn;
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
    this.again = button("Regenerate", onAgain);
    this.edit = button("Edit", () => this.#edit(onEdit));
    this.edit.hidden = turn.results !== null;
    this.change = button("Change answer", () => this.#change(onFork));
    this.receipt = button("Receipt", () => showReceipt(turn.receipt, this.receipt));
    this.actions = el("span", { className: "turn-tools" }, this.again, this.edit, this.change, this.receipt,
      button("Copy", () => copy(turn.text, "Answer")),
      button("Copy as curl", () => copy(curlOf(turn), "Command")));
    this.place = el("span");
    this.back = button("‹", () => onBranch(-1));
    this.next = button("›", () => onBranch(1));
    this.back.setAttribute("aria-label", "Previous branch");
    this.next.setAttribute("aria-label", "Next branch");
    this.branches = el("span", { className: "branches", hidden: true }, this.back, this.place, this.next);
    this.asked = el("p", { className: "asked" }, el("span", { className: "hidden", textContent: "You: " }), asked(turn));
    this.element = el("li", {},
      this.asked,
      this.reasoning, this.answer, this.calls.element, this.notes,
      el("div", { className: "after" }, this.branches, this.remark, this.problem, this.actions));
    this.thoughts.append(turn.reasoning);
    this.reasoning.hidden = !turn.reasoning;
    for (const move of turn.moves) this.#note(move);
    this.calls.show(turn.calls);
    this.draw(isMarkdown);
    this.update();
  }

  // Draws the text that there is, as Markdown or as it is, with a seam where another worker went on.
  draw(isMarkdown) {
    const { text, moves } = this.turn;
    this.answer.replaceChildren();
    this.answer.classList.toggle("markdown", isMarkdown);
    this.body = isMarkdown ? new MarkdownText(this.answer) : new PlainText(this.answer);
    let place = 0;
    for (const { at, reason } of moves) {
      this.body.write(text.slice(place, at));
      this.body.seam(MOVED[reason]);
      place = at;
    }
    this.body.write(text.slice(place));
    this.body.finish();
  }

  // Says which of the branches that begin here this is.
  showBranches(place, numBranches) {
    this.branches.hidden = numBranches < 2;
    this.place.textContent = `${place + 1} of ${numBranches}`;
    this.isFirst = place === 0;
    this.isLast = place === numBranches - 1;
  }

  // Another branch may begin here, or be shown: not while an answer is read.
  allowBranches(isAllowed) {
    this.again.disabled = this.edit.disabled = this.change.disabled = !isAllowed;
    this.back.disabled = !isAllowed || this.isFirst;
    this.next.disabled = !isAllowed || this.isLast;
  }

  #edit(onEdit) {
    const field = el("textarea", { rows: 3, required: true, value: this.turn.question, "aria-label": "The edited message" });
    this.#ask(field, this.asked, this.edit, "Ask this instead", () => onEdit(field.value.trim()));
  }

  #change(onFork) {
    const field = el("textarea", { rows: 8, required: true, value: this.turn.text, "aria-label": "The edited answer" });
    this.#ask(field, this.answer, this.change, "Continue this text", () => onFork(field.value),
      ["Regenerate from the cursor", () => onFork(field.value.slice(0, field.selectionStart))]);
    field.setSelectionRange(0, 0);
  }

  // Shows a form in the place of what it changes. `others` are more things to do with the field, as [label, action].
  #ask(field, place, opener, label, onSubmit, ...others) {
    const button = (textContent, act) => el("button", {
      type: "button", className: "quiet", textContent, onclick: () => {
        close();
        act();
      },
    });
    const form = el("form", { className: "edit" }, field, el("div", { className: "actions" },
      button("Cancel", () => {}), ...others.map(([words, act]) => button(words, act)),
      el("button", { type: "submit", className: "strong", textContent: label })));
    const close = () => {
      form.replaceWith(place);
      opener.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      onSubmit();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
    });
    place.replaceWith(form);
    field.focus();
  }

  append(piece) {
    this.turn.text += piece;
    this.body.write(piece);
    this.unspoken += piece.replace(MARKUP, "");
    const sentences = this.unspoken.match(/^.*[.!?:\n](?=\s|$)/s);
    if (sentences) {
      speak(sentences[0]);
      this.unspoken = this.unspoken.slice(sentences[0].length);
    }
  }

  think(piece) {
    this.turn.reasoning += piece;
    this.reasoning.hidden = false;
    this.thoughts.append(piece);
  }

  call(pieces) {
    collect(this.turn.calls, pieces);
    this.calls.show(this.turn.calls);
  }

  move({ attempt, reason }) {
    if (this.turn.moves.some((move) => move.attempt === attempt)) return; // told again after a reload
    const move = { attempt, reason, at: this.turn.text.length };
    this.turn.moves.push(move);
    this.body.seam(MOVED[reason]);
    this.#note(move);
    speak(MOVED[reason]);
  }

  update(remark = null) {
    const { turn } = this;
    const isWaiting = isRunning(turn) && !turn.reasoning && !isTold(turn);
    this.answer.classList.toggle("waiting", isWaiting);
    this.answer.classList.toggle("streaming", isRunning(turn) && !isWaiting);
    if (!isRunning(turn)) this.body.finish();
    this.answer.setAttribute("aria-busy", String(isRunning(turn)));
    this.remark.textContent = remark ?? remarkOf(turn);
    this.problem.textContent = turn.error;
    this.actions.hidden = isRunning(turn);
    this.change.hidden = !canFork(turn);
    this.receipt.hidden = !turn.receipt;
    if (!isRunning(turn) && this.unspoken) {
      speak(this.unspoken);
      this.unspoken = "";
    }
  }

  #note({ reason }) {
    this.notes.hidden = false;
    this.notes.append(el("li", { textContent: MOVED[reason] }));
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
