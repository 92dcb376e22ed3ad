// The chat: the conversation that is shown, and the message that is being written.

import {
  addTurn, branchesAt, choose, conversationOf, newConversation, randomId, remove, save, shownTurns,
} from "./conversations.js";
import { $, show } from "./dom.js";
import { Exchange, discard } from "./exchange.js";
import { History } from "./history.js";
import { bodyOf, curl, forkOf, pathOf } from "./messages.js";
import { signsReceipts } from "./receipts.js";
import { checkTools, isMarkdown, listModels, offerReceipts, readSettings, startSettings } from "./settings.js";
import { NEW, TurnView, isRunning, isTold } from "./turn.js";

const OPEN = "warren.open"; // the conversation of this tab
const stage = $("#conversation");
const question = $("#question");
const running = new Map(); // exchanges by the keys of their turns, of this conversation and of others
let conversation = conversationOf(sessionStorage.getItem(OPEN)) ?? newConversation();
let views = [];

const history = new History({
  current: () => conversation,
  open: (one) => open(one),
  remove(one) {
    for (const turn of one.turns) {
      const exchange = running.get(turn.key);
      if (exchange) exchange.end("stopped");
      else discard(turn);
    }
    remove(one);
    open(newConversation());
  },
});

const current = () => views.find((view) => isRunning(view.turn));

function open(one) {
  conversation = one;
  sessionStorage.setItem(OPEN, one.id);
  draw();
  foldOnPhones();
  question.focus();
}

// Shows the conversation. An answer that is not complete is read on.
function draw() {
  views = shownTurns(conversation).map((turn) => {
    const reading = running.get(turn.key);
    if (reading) return reading.view;
    const view = newView(turn);
    if (isRunning(turn)) follow(view);
    return view;
  });
  for (const view of views) {
    const branches = branchesAt(conversation, view.turn);
    view.showBranches(branches.indexOf(view.turn), branches.length);
  }
  $("#turns").replaceChildren(...views.map((view) => view.element));
  refresh();
  scrollToEnd();
}

function newView(turn) {
  return new TurnView(turn, {
    isMarkdown: isMarkdown(),
    curlOf: () => curl(pathOf(turn), bodyOf(conversation, turn)),
    onResults: (results) => send({ results }, turn.key),
    onAgain: () => send({ question: turn.question, results: turn.results }, turn.parent),
    onEdit: (text) => send({ question: text }, turn.parent),
    onFork(kept) {
      const settings = { ...readSettings(), model: turn.settings.model };
      send({ question: turn.question, results: turn.results, fork: forkOf(turn, kept), settings }, turn.parent);
    },
    onBranch(step) {
      const branches = branchesAt(conversation, turn);
      choose(conversation, branches[branches.indexOf(turn) + step]);
      save(conversation);
      draw();
    },
  });
}

function follow(view) {
  const { key } = view.turn;
  const exchange = new Exchange(conversation, view, {
    onWrite(write) {
      const isLow = isAtEnd();
      write();
      if (isLow && view.element.isConnected) scrollToEnd();
    },
    onEnd() {
      running.delete(key);
      refresh();
    },
  });
  running.set(key, exchange);
  exchange.follow();
}

// Asks something after the turn `parent`, or at the beginning. If there is a branch already, this is another.
function send(asked, parent) {
  const turn = { ...structuredClone(NEW), settings: readSettings(), ...asked, parent, key: randomId() };
  addTurn(conversation, turn);
  save(conversation);
  sessionStorage.setItem(OPEN, conversation.id);
  draw();
}

function stop() {
  const view = current();
  if (view) running.get(view.turn.key).end("stopped");
}

function refresh() {
  const isBusy = current() !== undefined;
  $("#send").hidden = isBusy;
  $("#stop").hidden = !isBusy;
  $("#welcome").hidden = views.length > 0;
  const last = views.findLast(({ turn }) => isRunning(turn) || isTold(turn));
  for (const view of views) view.calls.ask(view === last && view.turn.state === "done");
  for (const view of views) view.allowBranches(!isBusy);
  history.show();
}

const isAtEnd = () => stage.scrollHeight - stage.scrollTop - stage.clientHeight < 80;

function scrollToEnd() {
  stage.scrollTop = stage.scrollHeight;
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function submit() {
  const text = question.value.trim();
  if (!text || current()) return;
  if (!$("#model").value) return void show("No worker serves a model yet.");
  if (!checkTools()) {
    $("#settings").open = true;
    return void $("#tools").focus();
  }
  question.value = "";
  fit();
  send({ question: text }, conversation.leaf);
}

const narrow = matchMedia("(max-width: 60rem)"); // there the settings and the list of conversations fold

function foldOnPhones() {
  for (const details of [$("#settings"), $("#history")]) details.open = !narrow.matches;
}

export async function startChat() {
  startSettings(() => views.forEach((view) => view.draw(isMarkdown())));
  narrow.addEventListener("change", foldOnPhones);
  foldOnPhones();

  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  question.addEventListener("input", fit);
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("dialog[open]")) stop();
  });
  $("#stop").addEventListener("click", stop);
  $("#clear").addEventListener("click", () => open(newConversation()));
  addEventListener("pagehide", () => running.forEach((exchange) => exchange.save()));

  draw();
  await listModels();
  if (await signsReceipts()) offerReceipts();
}
