// Whoever has signed in with the OpenID provider of the gateway, if it has one.

import { $, show } from "./dom.js";

const PREFIX = "#sign-in-";
const PROBLEMS = {
  denied: "You were not signed in: your account has no role here, or its provider refused.",
  expired: "Signing in took too long, or it was begun in another browser. Try again.",
  failed: "The answer of the provider is no proof of who you are. Try again.",
  unavailable: "The provider cannot be reached now. Try again later, or use an API key.",
  busy: "Too many people are signing in. Try again in a moment.",
};
let session = { sign_in_url: null, person: null };

if (location.hash.startsWith(PREFIX)) {
  $("#sign-in-error").textContent = PROBLEMS[location.hash.slice(PREFIX.length)] ?? "";
  history.replaceState(null, "", "/");
}

// Asks the gateway who has signed in, and shows it.
export async function showSession() {
  const response = await fetch("/console/session").catch(() => null); // the next request says what is wrong
  if (response?.ok) session = await response.json();
  $("#person").hidden = session.person === null;
  $("#person-name").textContent = session.person ?? "";
  offerSignIn();
}

// Shows in the dialog that asks for a key how else to get in, if there is a way.
export function offerSignIn() {
  $("#sign-in").hidden = session.sign_in_url === null;
  const view = encodeURIComponent(location.hash.slice(1) || "chat");
  if (session.sign_in_url !== null) $("#sign-in-link").href = `${session.sign_in_url}?view=${view}`;
}

$("#sign-out").addEventListener("click", async () => {
  const response = await fetch("/console/sign-out", { method: "POST" }).catch(() => null);
  if (response?.ok) location.reload();
  else show("You were not signed out, because the gateway cannot be reached.");
});
