// A block of code: its language, a button that copies it, and its highlighted text.

import { copy, el } from "./dom.js";
import hljs from "./vendor/highlight.min.js";

const MAX_HIGHLIGHTED = 20_000; // characters: a longer text would delay each frame while it grows

export class CodeBlock {
  constructor(text, info = "") {
    const name = info.trim().split(/\s/)[0];
    this.language = hljs.getLanguage(name);
    this.name = name;
    const label = name || "Code";
    this.code = el("code");
    this.element = el("div", { className: "code" },
      el("div", { className: "code-bar" },
        el("span", { textContent: label }),
        el("button", {
          type: "button", className: "plain", textContent: "Copy", "aria-label": `Copy the ${name || "code"}`,
          onclick: () => copy(this.text, "Code"),
        })),
      el("pre", { tabIndex: 0, role: "region", "aria-label": `${label} block` }, this.code));
    this.element.block = this;
    this.update(text);
  }

  // Shows a text that has grown; the button and the place to which the user has scrolled stay.
  update(text) {
    if (text === this.text) return;
    this.text = text;
    if (this.language && text.length <= MAX_HIGHLIGHTED) this.code.replaceChildren(...highlighted(text, this.name));
    else this.code.textContent = text;
  }
}

function highlighted(text, language) {
  const html = hljs.highlight(text, { language, ignoreIllegals: true }).value;
  const parsed = new DOMParser().parseFromString(html, "text/html"); // highlight.js escapes the text
  return parsed.body.childNodes;
}
