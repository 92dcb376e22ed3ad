// The text of an answer, which grows while it is read: as Markdown, or as it is.

import { el } from "./dom.js";
import { blocksOf, show } from "./markdown.js";

const DRAW_MS = 50;
const NUM_OPEN = 2; // blocks at the end that the text to come may still change

const mark = (words) => el("span", { className: "seam", title: words });

// Text as it is. A seam marks where another worker went on.
export class PlainText {
  constructor(place) {
    this.place = place;
    this.text = null;
  }

  write(piece) {
    if (this.text === null) {
      this.text = document.createTextNode("");
      this.place.append(this.text);
    }
    this.text.appendData(piece);
  }

  seam(words) {
    if (this.place.firstChild) this.place.append(mark(words));
    this.text = null;
  }

  finish() {}
}

// Markdown. Blocks that are complete stay the same elements while the text grows, so that they neither
// flicker nor lose what the user has selected in them.
export class MarkdownText {
  constructor(place) {
    this.place = place;
    this.text = "";
    this.blocks = []; // { start, raw, type, lang, node }
    this.numSettled = 0;
    this.links = {};
    this.seams = []; // { at, words }
    this.drawnAt = -Infinity;
    this.timer = null;
  }

  write(piece) {
    this.text += piece;
    const wait = this.drawnAt + DRAW_MS - performance.now();
    if (wait <= 0) this.#draw();
    else this.timer ??= setTimeout(() => this.#draw(), wait);
  }

  seam(words) {
    if (!this.text) return;
    const seam = { at: this.text.length, words };
    this.#draw();
    this.seams.push(seam);
    for (const block of this.blocks) this.#place(seam, block);
  }

  // The text is complete: it is read as a whole, with links that are defined at its end.
  finish() {
    this.numSettled = 0;
    this.#draw();
  }

  #draw() {
    clearTimeout(this.timer);
    this.timer = null;
    let start = this.blocks[this.numSettled]?.start ?? (this.numSettled ? this.text.length : 0);
    const tokens = blocksOf(this.text.slice(start), this.links);
    const open = [];
    tokens.forEach((token, k) => {
      const place = this.numSettled + k;
      this.blocks[place] = this.#drawn(token, start, this.blocks[place]);
      start += token.raw.length;
      if (token.type !== "space") open.push(place);
    });
    for (const gone of this.blocks.splice(this.numSettled + tokens.length)) gone.node.remove();
    if (open.length > NUM_OPEN) this.numSettled = open.at(-NUM_OPEN);
    this.drawnAt = performance.now();
  }

  // The block of a token, in the place of the one before.
  #drawn(token, start, old) {
    const block = { start, raw: token.raw, type: token.type, lang: token.lang };
    if (old && old.raw === block.raw) return { ...block, node: old.node };
    const isGrowing = old?.type === "code" && block.type === "code" && old.lang === block.lang;
    if (isGrowing) {
      block.node = old.node;
      old.node.block.update(token.text);
    } else {
      block.node = show(token);
      if (old) old.node.replaceWith(block.node);
      else this.place.append(block.node);
    }
    for (const seam of this.seams) this.#place(seam, block);
    return block;
  }

  // Marks the seam in the block that has it: after as many characters as the text before it shows.
  #place({ at, words }, { start, raw, node }) {
    if (at <= start || at > start + raw.length || !(node instanceof Element)) return;
    const before = el("div", {}, ...blocksOf(raw.slice(0, at - start), { ...this.links }).map(show));
    insertAfter(node, lengthOf(before), mark(words));
  }
}

// The texts that are the model's, not the page's.
function textsOf(node) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest(".code-bar")) texts.push(walker.currentNode);
  return texts;
}

const lengthOf = (node) => textsOf(node).reduce((sum, { length }) => sum + length, 0);

function insertAfter(node, numCharacters, element) {
  let rest = numCharacters;
  for (const text of textsOf(node)) {
    if (rest <= text.length) {
      text.splitText(rest).before(element);
      return;
    }
    rest -= text.length;
  }
  node.append(element);
}
