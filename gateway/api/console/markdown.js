// Markdown as elements: marked parses it, DOMPurify leaves only harmless elements of it.

import { el } from "./dom.js";
import { CodeBlock } from "./code.js";
import { Lexer, Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;
const PLAIN_ATTRIBUTES = ["align", "data-depth", "data-language", "start", "title"];
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h3", "hr", "i", "kbd", "li", "mark", "ol", "p", "pre", "s",
    "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["href", ...PLAIN_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
// Models use these in the place of Markdown. All other HTML is shown as its text.
const INLINE_HTML = /^<\/?(?:b|br|del|em|i|kbd|mark|s|strong|sub|sup|u)\s*\/?>$/i;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (character) => ENTITIES[character]);

const marked = new Marked({
  gfm: true,
  renderer: {
    code: ({ text, lang }) => `<pre data-language="${escaped(lang ?? "")}"><code>${escaped(text)}</code></pre>`,
    heading({ tokens, depth }) {
      // All have one level for screen readers, because answers skip levels.
      return `<h3 data-depth="${depth}">${this.parser.parseInline(tokens)}</h3>`;
    },
    html: ({ text }) => (INLINE_HTML.test(text.trim()) ? text : escaped(text)),
    // An image would tell its server who reads the answer.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// The blocks of a text: { type, raw, ... }, whose `raw` together are the text. `links` has the targets
// that were defined so far, and gets those of this text.
export function blocksOf(text, links) {
  const lexer = new Lexer(marked.defaults);
  Object.assign(lexer.tokens.links, links);
  const blocks = lexer.lex(text);
  Object.assign(links, blocks.links);
  return blocks;
}

// A node that shows the block.
export function show(block) {
  if (block.type === "code") return new CodeBlock(block.text, block.lang).element;
  const fragment = DOMPurify.sanitize(marked.parser([block]), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const code of fragment.querySelectorAll("pre")) {
    code.replaceWith(new CodeBlock(code.textContent, code.dataset.language).element);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const place = el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(place);
    place.append(table);
  }
  const isOne = fragment.childElementCount === 1 && fragment.textContent.trim() === fragment.firstElementChild.textContent.trim();
  if (isOne) return fragment.firstElementChild;
  return fragment.hasChildNodes() ? el("div", {}, fragment) : document.createComment("");
}
