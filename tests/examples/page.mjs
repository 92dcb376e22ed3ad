// Runs the script of a page without a browser: PAGE URL MODEL. Writes the answer as it comes.

import { readFile } from "node:fs/promises";

const [page, url, model] = process.argv.slice(2);
const html = await readFile(page, "utf8");
const [, script] = html.match(/<script type="module">(.*)<\/script>/s);

const fields = { url, key: "none", model, question: "one two three four" };
let submit;
const elements = {
  form: { addEventListener: (_, handler) => { submit = handler; } },
  output: { textContent: "", append: (piece) => process.stdout.write(piece) },
  "#status": { textContent: "" },
};
globalThis.document = { querySelector: (selector) => elements[selector] };
globalThis.FormData = class { [Symbol.iterator]() { return Object.entries(fields)[Symbol.iterator](); } };

await import(`data:text/javascript,${encodeURIComponent(script)}`);
await submit({ preventDefault() {} });
console.log(`\n${elements["#status"].textContent}`);
