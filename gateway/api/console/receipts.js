// Receipts of answers: what they state, and whether a key of this gateway has signed them.

import { ApiError, attempt, json } from "./api.js";
import { $, copy, count, download, el, plural, shortId } from "./dom.js";

const dialog = $("#receipt-dialog");
let shown = { text: "", id: "" }; // the receipt in the dialog

const published = async () => (await json("/.well-known/jwks.json")).keys;

// Whether this gateway signs receipts. An older gateway has no such endpoint.
export async function signsReceipts() {
  try {
    return (await published()).length > 0;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return false;
  }
}

function bytesOf(base64url) {
  const text = atob(base64url.replaceAll("-", "+").replaceAll("_", "/"));
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

const read = (part) => JSON.parse(new TextDecoder().decode(bytesOf(part)));

// Says whether the signature of a compact JWS holds, as { text, state }; `state` is "good" or "warn".
async function checked(text) {
  const [header, payload, signature] = text.split(".");
  const { kid } = read(header);
  const key = (await published()).find((one) => one.kid === kid);
  if (!key) return { state: "warn", text: "Signed with a key that this gateway does not publish." };
  try {
    const { kty, crv, x } = key;
    const imported = await crypto.subtle.importKey("jwk", { kty, crv, x }, "Ed25519", false, ["verify"]);
    const signed = new TextEncoder().encode(`${header}.${payload}`);
    const holds = await crypto.subtle.verify("Ed25519", imported, bytesOf(signature), signed);
    if (!holds) return { state: "warn", text: "The signature does not hold: the receipt was changed." };
  } catch { // pages that were not loaded from this machine or over TLS have no crypto.subtle
    return { state: "warn", text: `Signed with the key ${kid}. This browser cannot check the signature here; warren verify can.` };
  }
  return { state: "good", text: `Signed with the key ${kid} of this gateway.` };
}

function executionsOf({ executions }) {
  return executions.map(({ worker, numerics, num_tokens_before: before }) =>
    el("li", { textContent: `Worker ${shortId(worker)} from token ${count(Math.max(...before))}: ${numerics || "numerics unknown"}` }));
}

function factsOf(receipt) {
  const { provenance } = receipt.executions.at(-1);
  const facts = [
    ["Request", receipt.id],
    ["Hash of the request", receipt.request_sha256],
    ["Model", receipt.model],
    ["Fingerprint", provenance?.fingerprint || "unknown"],
    ["Weights", provenance?.weight_format || "unknown"],
    ["Seed", receipt.seed],
    ["Answer", plural(receipt.usage.completion_tokens, "token")],
    ["Issued", new Date(1000 * receipt.issued_at).toISOString()],
  ];
  return [
    ...facts.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: value })]),
    el("dt", { textContent: plural(receipt.executions.length, "execution") }),
    el("dd", {}, el("ul", {}, ...executionsOf(receipt))),
  ];
}

// Shows the receipt that `button` stands for, a compact JWS.
export function showReceipt(text, button) {
  return attempt(button, async () => {
    const receipt = read(text.split(".")[1]);
    const signature = await checked(text);
    shown = { text, id: receipt.id };
    $("#receipt-signature").textContent = signature.text;
    $("#receipt-signature").className = signature.state;
    $("#receipt-facts").replaceChildren(...factsOf(receipt));
    dialog.showModal();
  });
}

$("#receipt-close").addEventListener("click", () => dialog.close());
$("#receipt-copy").addEventListener("click", () => copy(shown.text, "Receipt"));
$("#receipt-download").addEventListener("click", () =>
  download(`receipt-${shown.id}.jws`, new Blob([shown.text], { type: "application/jose" })));
