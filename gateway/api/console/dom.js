// Elements, tables, dialogs, and how numbers are written.

export const $ = (selector, root = document) => root.querySelector(selector);

// An element with properties, attributes ("aria-..." and "data-...") and children.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A table whose rows and cells stay the same elements while their content changes, so that neither
// focus nor selection is lost. `columns` are { title, kind, fill(cell, row) } or { title, kind, text(row) };
// a cell with `fill` is filled anew only if what `text` or `version` returns has changed.
export class Table {
  constructor(place, { label, columns, key, empty }) {
    this.place = place;
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    const titles = columns.map(({ title, kind }) =>
      el("th", { scope: "col", role: "columnheader", className: kind ?? "" },
        kind === "act" ? el("span", { className: "hidden", textContent: title }) : title));
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...titles));
    this.table = el("table", { role: "table", "aria-label": label, hidden: true }, head, this.body);
    this.empty = el("p", { className: "empty", textContent: empty, hidden: true });
    place.append(this.table, this.empty);
  }

  show(items) {
    this.table.hidden = items.length === 0;
    this.empty.hidden = items.length > 0;
    const keys = new Set(items.map(this.key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    items.forEach((item, place) => {
      const key = this.key(item);
      const row = this.rows.get(key) ?? this.#newRow(key);
      this.columns.forEach((column, k) => update(row.cells[k], column, item, row.seen, k));
      if (this.body.children[place] !== row.element) {
        this.body.insertBefore(row.element, this.body.children[place] ?? null);
      }
    });
  }

  #newRow(key) {
    const cells = this.columns.map(({ title, kind }) =>
      el("td", { role: "cell", className: kind ?? "", "data-label": title }));
    const row = { cells, seen: [], element: el("tr", { role: "row" }, ...cells) };
    this.rows.set(key, row);
    return row;
  }
}

function update(cell, column, item, seen, k) {
  const now = String(column.text ? column.text(item) : (column.version?.(item) ?? ""));
  if (seen[k] === now) return;
  seen[k] = now;
  if (column.fill) cell.replaceChildren(...column.fill(item));
  else cell.textContent = now;
}

// A share from 0 to 1 as a bar, and in words beside it. The bar of what is used up warns when little is left.
export function bar(share, words, { isLimited = true } = {}) {
  const fill = el("span");
  fill.style.width = `${share ? Math.min(100, Math.max(4, 100 * share)).toFixed(1) : 0}%`;
  return [el("span", { className: isLimited && share > 0.9 ? "bar full" : "bar", "aria-hidden": "true" }, fill), words];
}

export const tag = (text, kind = "") => el("span", { className: `tag ${kind}`, textContent: text });

const dialog = $("#ask-dialog");

// Asks a question with several answers, { label, value, kind }; resolves to a value, or to "" after the first
// button, which is labelled `leave` and does nothing.
export function ask(title, text, answers, leave = "Cancel") {
  $("#ask-label").hidden = true;
  return open(title, text, answers, leave);
}

// Asks for a line of text; resolves to it, or to "".
export async function askForText(title, label, value, verb) {
  const field = $("#ask-field");
  $("#ask-label").hidden = false;
  $("#ask-label span").textContent = label;
  field.value = value;
  const asking = open(title, "", [{ label: verb, value: "given", kind: "strong" }]);
  field.select();
  return (await asking) ? field.value.trim() : "";
}

function open(title, text, answers, leave = "Cancel") {
  $("#ask-title").textContent = title;
  $("#ask-text").textContent = text;
  const buttons = [{ label: leave, value: "", kind: "quiet" }, ...answers].map(({ label, value, kind }) =>
    el("button", { type: "button", className: kind, textContent: label, onclick: () => dialog.close(value) }));
  $("#ask-actions").replaceChildren(...buttons);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}

$("#ask-field").addEventListener("keydown", (event) => {
  if (event.key === "Enter") dialog.close("given");
});

const TOAST_MS = 6000;

// Shows a notice for a while.
export function show(text) {
  const toast = el("p", { textContent: text });
  $("#toasts").append(toast);
  setTimeout(() => toast.remove(), TOAST_MS);
}

// Says something to screen readers alone.
export function speak(text) {
  $("#spoken").textContent = text;
}

const NUMBER = new Intl.NumberFormat("en");
export const count = (number) => NUMBER.format(number);
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
export const percent = (share) => `${Math.round(100 * share)} %`;

// The first characters of an id of random ones; other ids, such as those that publishers choose, as they are.
export function shortId(id) {
  const random = id.match(/(?:^|[-_.])([0-9a-f]{8})[0-9a-f]{4,}$/);
  return random ? random[1] : id.replace(/^(?:chatcmpl|cmpl|resp|msg)[-_]/, "");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const day = (unixSeconds) => new Date(1000 * unixSeconds).toISOString().slice(0, 10);

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit ? number.toFixed(1) : number} ${units[unit]}`;
}

export const since = (unixSeconds) => (unixSeconds ? Math.max(0, Date.now() / 1000 - unixSeconds) : null);

// Offers a file to the user.
export function download(name, content) {
  const url = URL.createObjectURL(content);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// Puts text on the clipboard; pages that were not loaded from this machine or over TLS have none.
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    show(`${what} copied.`);
  } catch {
    const area = el("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    show(isCopied ? `${what} copied.` : "The browser does not permit copying.");
  }
}
