// Tools in the chat: what the user declares, and the calls of an answer, whose results the user writes.

import { el } from "./dom.js";

// The tools of a JSON text, in the form of OpenAI's API; a function alone is a tool, too. Throws Error.
export function parseTools(text) {
  if (!text.trim()) return [];
  let declared;
  try {
    declared = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not valid JSON: ${error.message}`);
  }
  const tools = (Array.isArray(declared) ? declared : [declared]).map((tool) =>
    tool?.type === undefined && tool?.name ? { type: "function", function: tool } : tool);
  if (!tools.every((tool) => typeof tool?.function?.name === "string")) {
    throw new Error("The tools must be a list of functions, each with a name.");
  }
  return tools;
}

// Adds a piece of a streamed message to its calls.
export function collect(calls, pieces) {
  for (const { index, id, function: called = {} } of pieces) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }
}

// The calls of an answer and, while they wait for it, a form for their results.
export class CallsView {
  constructor(onResults) {
    this.list = el("ol", { className: "call-list" });
    this.send = el("button", { type: "submit", className: "strong", textContent: "Send the results", hidden: true });
    this.element = el("form", { className: "calls", "aria-label": "Tool calls", hidden: true }, this.list, this.send);
    this.fields = [];
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults(this.calls.map(({ id, name }, k) => ({ id, name, content: this.fields[k].value })));
    });
  }

  show(calls) {
    this.calls = calls;
    this.element.hidden = calls.length === 0;
    this.fields = calls.map(({ name }, k) =>
      el("textarea", { rows: 2, required: true, spellcheck: false, "aria-label": `Result ${k + 1}, of ${name}`, placeholder: "Result" }));
    this.list.replaceChildren(...calls.map((call, k) => el("li", {},
      el("p", { className: "call-name" }, "Calls ", el("code", { textContent: call.name })),
      el("pre", { textContent: indented(call.arguments), tabIndex: 0, "aria-label": `Arguments of ${call.name}` }),
      this.fields[k])));
    this.ask(false);
  }

  // Shows or hides what the user answers with.
  ask(isAsked) {
    for (const field of this.fields) field.hidden = !isAsked;
    this.send.hidden = !isAsked;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete, or not JSON
  }
}
