// The conversations that the browser keeps. Each is a tree of turns: a question that is asked again, or is
// asked differently, begins another branch, and `leaf` is the last turn of the branch that is shown.

import { show } from "./dom.js";

const PREFIX = "warren.conversation.";
const TITLE_LENGTH = 60;
const known = new Map(); // by id: { id, title, updatedAt, leaf, turns }

for (const key of Object.keys(localStorage)) read(key);
const listeners = [];
addEventListener("storage", ({ key }) => {
  if (key !== null && !key.startsWith(PREFIX)) return;
  if (key === null) known.clear();
  else read(key);
  for (const listener of listeners) listener();
});

function read(key) {
  if (!key.startsWith(PREFIX)) return;
  const text = localStorage.getItem(key);
  if (text === null) known.delete(key.slice(PREFIX.length));
  else known.set(key.slice(PREFIX.length), JSON.parse(text));
}

export const randomId = () =>
  [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const newConversation = () => ({ id: randomId(), title: "", updatedAt: Date.now(), leaf: null, turns: [] });

export const conversationOf = (id) => known.get(id);

// The latest first.
export const allConversations = () => [...known.values()].sort((one, other) => other.updatedAt - one.updatedAt);

// Has the listener called when another tab changes a conversation.
export const onOtherTabs = (listener) => listeners.push(listener);

export function save(conversation) {
  if (conversation.turns.length === 0 || conversation.isDeleted) return;
  known.set(conversation.id, conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    show("The browser's storage is full: this conversation will not survive a reload. Delete or export some.");
  }
}

export function remove(conversation) {
  conversation.isDeleted = true; // an answer that still ends does not bring it back
  known.delete(conversation.id);
  localStorage.removeItem(PREFIX + conversation.id);
}

export function addTurn(conversation, turn) {
  conversation.turns.push(turn);
  conversation.leaf = turn.key;
  conversation.updatedAt = Date.now();
}

const turnOf = ({ turns }, key) => turns.find((turn) => turn.key === key);

// The turns from the first one to this one.
export function pathTo(conversation, key) {
  const path = [];
  for (let turn = turnOf(conversation, key); turn; turn = turnOf(conversation, turn.parent)) path.unshift(turn);
  return path;
}

export const shownTurns = (conversation) => pathTo(conversation, conversation.leaf);

// The branches that begin where this turn does.
export const branchesAt = ({ turns }, { parent }) => turns.filter((turn) => turn.parent === parent);

// Shows the branch of this turn, to the end at which it was left last.
export function choose(conversation, turn) {
  let last = turn;
  for (let next = turn; next; next = conversation.turns.findLast(({ parent }) => parent === last.key)) last = next;
  conversation.leaf = last.key;
}

export function titleOf({ title, turns }) {
  if (title) return title;
  const line = (turns[0]?.question ?? "").trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()} …` : line || "New conversation";
}
