// A line over the last hour, with axes, and what it was at the place that the pointer or the arrow keys choose.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 3600;
const HEIGHT = 150;
const MARGIN = { top: 12, right: 8, bottom: 22, left: 54 };
const NUM_LINES = 2; // above the axis
const TICKS_MIN = [60, 45, 30, 15, 0];
const NARROW = 380; // pixels, in which only every other tick has room
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// `read` returns the value of a sample, or null; `write` says it with its unit.
export class Chart {
  constructor(place, { title, read, write, empty }) {
    this.read = read;
    this.write = write;
    this.title = title;
    this.samples = [];
    this.chosen = null;
    this.now = el("span", { className: "chart-now" });
    this.drawing = svg("svg", { class: "chart", role: "img", tabindex: "0" });
    this.empty = el("p", { className: "empty", textContent: empty });
    place.append(el("div", { className: "chart-card" },
      el("h4", {}, title, this.now), this.drawing, this.empty));
    this.drawing.addEventListener("pointermove", (event) => this.#point(event));
    this.drawing.addEventListener("pointerleave", () => this.#choose(null));
    this.drawing.addEventListener("blur", () => this.#choose(null));
    this.drawing.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.draw()).observe(this.drawing.parentElement);
  }

  // Shows samples, the oldest first: { at, ... }, with the Unix time of each.
  show(samples, at = Date.now() / 1000) {
    this.end = at;
    this.samples = samples.filter((sample) => sample.at > at - SPAN_S);
    if (this.chosen !== null && this.chosen >= this.samples.length) this.chosen = null;
    this.draw();
  }

  draw() {
    const values = this.samples.map(this.read).filter((value) => value !== null);
    const hasValues = values.length > 0;
    this.drawing.toggleAttribute("hidden", !hasValues);
    this.empty.hidden = hasValues;
    const width = this.drawing.parentElement.clientWidth;
    if (!hasValues || !width) {
      this.now.textContent = "";
      return;
    }
    const highest = niceAbove(Math.max(...values));
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    this.x = (at) => MARGIN.left + inner.width * (1 - (this.end - at) / SPAN_S);
    this.y = (value) => MARGIN.top + inner.height * (1 - value / highest);
    const bottom = MARGIN.top + inner.height;
    const lines = Array.from({ length: NUM_LINES + 1 }, (_, k) => (highest * k) / NUM_LINES);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.setAttribute("height", HEIGHT);
    this.drawing.setAttribute("aria-label",
      `${this.title} in the last hour: ${this.write(values.at(-1))} at the end, ${this.write(Math.max(...values))} at most.`);
    this.drawing.replaceChildren(
      ...lines.map((value) => svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(value), y2: this.y(value) })),
      ...lines.map((value) => svg("text", { x: MARGIN.left - 8, y: this.y(value) + 4, "text-anchor": "end" }, this.write(value))),
      ...TICKS_MIN.filter((_, k) => width >= NARROW || k % 2 === 0).map((minutes, k) => svg("text", {
        x: this.x(this.end - 60 * minutes), y: HEIGHT - 4,
        "text-anchor": k === 0 ? "start" : minutes === 0 ? "end" : "middle",
      }, minutes === 0 ? "now" : `−${minutes} min`)),
      ...this.#segments().flatMap((points) => this.#line(points, bottom)),
    );
    this.pointer = svg("g", { class: "pointer" });
    this.drawing.append(this.pointer);
    this.#choose(this.chosen);
  }

  // The points between which there are values.
  #segments() {
    const segments = [[]];
    for (const sample of this.samples) {
      const value = this.read(sample);
      if (value === null) segments.push([]);
      else segments.at(-1).push([this.x(sample.at), this.y(value)]);
    }
    return segments.filter((points) => points.length);
  }

  #line(points, bottom) {
    const [[x, y]] = points;
    if (points.length === 1) return [svg("circle", { class: "mark", cx: x, cy: y, r: 2 })];
    const path = points.map(([left, top]) => `${left.toFixed(1)},${top.toFixed(1)}`).join(" L");
    return [
      svg("path", { class: "area", d: `M${x.toFixed(1)},${bottom} L${path} L${points.at(-1)[0].toFixed(1)},${bottom} Z` }),
      svg("path", { class: "line", d: `M${path}` }),
    ];
  }

  #point(event) {
    const left = event.clientX - this.drawing.getBoundingClientRect().left;
    const distances = this.samples.map((sample) => Math.abs(this.x(sample.at) - left));
    this.#choose(distances.indexOf(Math.min(...distances)));
  }

  #step(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = this.chosen ?? this.samples.length - (step < 0 ? 0 : 1);
    this.#choose(Math.min(this.samples.length - 1, Math.max(0, from + step)));
  }

  #choose(place) {
    this.chosen = place;
    const sample = this.samples[place ?? this.samples.length - 1];
    const value = sample === undefined ? null : this.read(sample);
    const words = value === null ? "–" : this.write(value);
    this.now.textContent = place === null ? words : `${words} at ${CLOCK.format(1000 * sample.at)}`;
    if (!this.pointer) return;
    this.pointer.replaceChildren();
    if (place === null) return;
    const x = this.x(sample.at);
    this.pointer.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    if (value !== null) this.pointer.append(svg("circle", { class: "mark", cx: x, cy: this.y(value), r: 3.5 }));
  }
}

// The next of 1, 2, 4, 6, 10, 20, ... from a value on.
function niceAbove(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 6, 10].find((factor) => factor * unit >= value);
}
