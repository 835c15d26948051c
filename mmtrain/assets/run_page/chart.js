// ---------------------------------------------------------------------------------------------- helpers

const dark = matchMedia("(prefers-color-scheme: dark)");
const themed = (pair) => pair[dark.matches ? 1 : 0];
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A new element: its attributes (`text` is its text, `on...` a listener) and children. */
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** A number in few characters. */
function brief(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

/** The least of 1, 2, 5 x a power of ten that is not below `rough`. */
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * (1 - 1e-9));
}

/** Round numbers between two bounds, about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const step = roundStep((high - low) / count);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step + 0); // no -0
  return found;
}

const tip = {
  /** Shows words (or nodes) beside the pointer. */
  show(event, ...content) {
    const box = document.getElementById("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const right = event.clientX + 16 + width < innerWidth;
    const below = event.clientY + 16 + height < innerHeight;
    box.style.left = `${Math.max(4, right ? event.clientX + 16 : event.clientX - 12 - width)}px`;
    box.style.top = `${Math.max(4, below ? event.clientY + 16 : event.clientY - 12 - height)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

// ----------------------------------------------------------------------------------------------- charts

const MARGIN = { left: 52, right: 12, top: 8, bottom: 22 };
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

/** Curves over steps: a card with title, legend and an SVG that is drawn anew when anything changes. */
class Chart {
  /** Args: spec: of run_page/charts.py. board: the charts that share one range and one cursor. starts: resumed steps. */
  constructor(spec, board, starts) {
    this.spec = spec;
    this.board = board;
    this.starts = starts;
    this.log = false;
    this.hidden = new Set();
    this.svg = make("svg", {
      role: "img",
      "aria-label": spec.title,
      onpointermove: (event) => this.point(event),
      onpointerdown: (event) => this.grab(event),
      onpointerup: (event) => this.release(event),
      onpointerleave: () => board.setCursor(null),
      onpointercancel: () => this.letGo(),
    });
    const unit = spec.unit ? make("span", { class: "soft", text: spec.unit }) : "";
    const header = make("header", {}, make("h3", { text: spec.title }), unit);
    if (spec.log) {
      const box = make("input", { type: "checkbox", class: "log", onchange: () => this.setLog(box.checked) });
      header.append(make("label", {}, box, " logarithmic"));
    }
    this.legend = make("div", { class: "legend" });
    this.labels = spec.series.map((series, index) => this.label(series, index));
    this.legend.append(...this.labels.map(({ button }) => button));
    const note = make("p", { class: "note", text: spec.note });
    this.element = make("div", { class: "card chart" }, header, note, this.legend, this.svg);
  }

  label(series, index) {
    const line = { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": DASHES[series.dash % 4] };
    const dot = make("svg", { class: "swatch", width: series.dash ? 22 : 10, height: 10 }, make("line", line));
    const value = make("span", { class: "value" });
    const button = make("button", { title: "show or hide" }, dot, series.label, value);
    button.addEventListener("click", () => {
      this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
      this.draw();
    });
    return { button, dot, value };
  }

  setLog(on) {
    this.log = on;
    this.draw();
  }

  /** The series that are shown, each with its lower edge where they are stacked. */
  shown() {
    const floor = new Map();
    return this.spec.series.flatMap((series, index) => {
      if (this.hidden.has(index)) return [];
      if (!this.spec.stacked) return [{ series, index, y: series.y, base: null }];
      const base = series.x.map((x) => floor.get(x) ?? 0);
      const y = series.y.map((value, i) => base[i] + Math.max(0, value ?? 0));
      series.x.forEach((x, i) => floor.set(x, y[i]));
      return [{ series, index, y, base }];
    });
  }

  /** Values of a curve in the range of steps that is looked at. */
  visible({ series, y }) {
    const [first, last] = this.board.range;
    return y.filter((v, i) => v !== null && series.x[i] >= first && series.x[i] <= last && !(this.log && v <= 0));
  }

  scales(shown) {
    const [first, last] = this.board.range;
    const values = shown.flatMap((curve) => this.visible(curve));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = this.log ? [1, 10] : [0, 1];
    if (!this.log && (this.spec.zero || this.spec.stacked)) [low, high] = [Math.min(0, low), Math.max(0, high)];
    const highest = high;
    if (!this.log && this.spec.unit !== "%") high = usual(low, high, shown.map((curve) => this.visible(curve)));
    const cut = high < highest ? highest : null;
    if (low === high) [low, high] = this.log ? [low / 2, high * 2] : [Math.min(low, 0), high || 1];
    const place = this.log ? Math.log : (v) => v;
    const pad = this.log || !(this.spec.zero || this.spec.stacked) ? 0.05 : 0;
    const size = place(high) - place(low);
    const [a, b] = [place(low) - pad * size, place(high) + 0.05 * size];
    const span = Math.max(last - first, 1);
    const inner = [this.width - MARGIN.left - MARGIN.right, this.height - MARGIN.top - MARGIN.bottom];
    return {
      x: (step) => MARGIN.left + ((step - first) / span) * inner[0],
      step: (x) => first + ((x - MARGIN.left) / inner[0]) * span,
      y: (v) => MARGIN.top + inner[1] * (1 - (place(v) - a) / (b - a)),
      cut,
      marks: this.log ? logTicks(Math.exp(a), Math.exp(b)) : ticks(a, b, 5),
    };
  }

  draw() {
    this.width = this.svg.clientWidth || 430;
    this.height = this.svg.clientHeight || 230;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const shown = this.shown();
    this.scale = this.scales(shown);
    const { x, y, marks, cut } = this.scale;
    const [first, last] = this.board.range;
    const parts = [];
    for (const mark of marks) {
      parts.push(make("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(mark), y2: y(mark) }));
      parts.push(make("text", { x: MARGIN.left - 7, y: y(mark) + 4, "text-anchor": "end", text: brief(mark) }));
    }
    for (const step of ticks(first, last, Math.max(2, Math.min(8, this.width / 70))).filter(Number.isInteger)) {
      parts.push(make("text", { x: x(step), y: this.height - 5, "text-anchor": "middle", text: step.toLocaleString("en") }));
    }
    for (const step of this.starts.filter((s) => s > first && s < last)) {
      const line = make("line", { class: "start", x1: x(step), x2: x(step), y1: MARGIN.top, y2: this.height - MARGIN.bottom });
      line.append(make("title", { text: `resumed after step ${step}` }));
      parts.push(line);
    }
    const frame = { x: 0, y: MARGIN.top - 4, width: this.width, height: this.height - MARGIN.top - MARGIN.bottom + 8 };
    const inside = make("svg", { ...frame, viewBox: Object.values(frame).join(" "), class: "inside" });
    for (const curve of shown) inside.append(...this.curve(curve));
    parts.push(inside);
    if (cut !== null) {
      const place = { x: this.width - MARGIN.right, y: MARGIN.top + 4, "text-anchor": "end", class: "cut" };
      parts.push(make("text", { ...place, text: `cut off: values up to ${brief(cut)}` }));
    }
    this.cursor = make("g");
    this.chosen = make("rect", { class: "chosen", y: MARGIN.top, height: this.height - MARGIN.top - MARGIN.bottom, width: 0 });
    this.svg.replaceChildren(...parts, this.chosen, this.cursor);
    this.labels.forEach(({ button, dot }, index) => {
      const { colour, dash } = this.spec.series[index];
      dot.style.background = dash ? "none" : themed(colour);
      dot.firstChild.setAttribute("stroke", dash ? themed(colour) : "none");
      button.classList.toggle("off", this.hidden.has(index));
    });
    this.drawCursor();
  }

  curve({ series, y: values, base }) {
    const { x, y } = this.scale;
    const [first, last] = this.board.range;
    const colour = themed(series.colour);
    const points = series.x.flatMap((step, i) => {
      const value = values[i];
      const there = value !== null && step >= first && step <= last && !(this.log && value <= 0);
      return there ? [[x(step), y(value), base && y(base[i])]] : [];
    });
    if (!points.length) return [];
    const path = (list) => list.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
    const parts = [];
    if (base) {
      const back = points.map(([px, , pb]) => [px, pb]).reverse();
      parts.push(make("path", { class: "area", d: `M${path(points)}L${path(back)}Z`, fill: colour, opacity: 0.55 }));
    }
    const style = { fill: "none", stroke: colour, "stroke-width": base ? 1 : 1.7, "stroke-linejoin": "round" };
    parts.push(make("path", { class: "curve", d: `M${path(points)}`, "stroke-dasharray": DASHES[series.dash % 4], ...style }));
    if (series.dots || points.length === 1) {
      parts.push(...points.map(([cx, cy]) => make("circle", { cx, cy, r: 3, fill: colour })));
    }
    return parts;
  }

  // ---- pointer: the cursor of all charts, and a range by dragging

  point(event) {
    const left = this.svg.getBoundingClientRect().left;
    const inside = Math.min(Math.max(event.clientX - left, MARGIN.left), this.width - MARGIN.right);
    this.board.setCursor(this.scale.step(inside));
    if (this.from === undefined) return;
    this.to = inside;
    this.chosen.setAttribute("x", Math.min(this.from, this.to));
    this.chosen.setAttribute("width", Math.abs(this.to - this.from));
  }

  grab(event) {
    if (event.button || event.pointerType === "touch") return; // a finger scrolls the page
    this.svg.setPointerCapture(event.pointerId);
    this.point(event);
    const left = this.svg.getBoundingClientRect().left;
    this.from = this.to = Math.min(Math.max(event.clientX - left, MARGIN.left), this.width - MARGIN.right);
  }

  release() {
    const { from, to } = this;
    this.letGo();
    if (from === undefined || Math.abs(to - from) < 8) return;
    const steps = [from, to].map(this.scale.step).sort((a, b) => a - b);
    this.board.setRange([Math.floor(steps[0]), Math.ceil(steps[1])]);
  }

  letGo() {
    this.from = this.to = undefined;
    this.chosen.setAttribute("width", 0);
  }

  drawCursor() {
    const at = this.board.cursor;
    this.cursor.replaceChildren();
    this.spec.series.forEach((series, index) => {
      const { value } = this.labels[index];
      value.textContent = at === null || this.hidden.has(index) ? "" : brief(series.y[nearest(series, at)]);
    });
    if (at === null) return;
    const x = this.scale.x(at);
    this.cursor.append(make("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    const flip = x > this.width - 90;
    const label = make("text", { x: flip ? x - 5 : x + 5, y: MARGIN.top + 9, "text-anchor": flip ? "end" : "start" });
    label.textContent = `step ${at.toLocaleString("en")}`;
    this.cursor.append(label);
    for (const { series, y } of this.shown()) {
      const i = nearest(series, at);
      if (y[i] === null || (this.log && y[i] <= 0)) continue;
      this.cursor.append(make("circle", { cx: this.scale.x(series.x[i]), cy: this.scale.y(y[i]), r: 3.5, fill: themed(series.colour) }));
    }
  }
}

/**
 * The greatest value of an axis from `low`: the greatest of all, `high`, unless the highest 5 % of each curve (at least
 * one value of two) would take more than two thirds of the axis.
 */
function usual(low, high, curves) {
  const most = curves.map((values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return sorted[sorted.length - 1 - (sorted.length > 1 ? Math.ceil(0.05 * sorted.length) : 0)];
  });
  const limit = Math.max(...most.filter((value) => value !== undefined));
  return limit > low && high - low > 3 * (limit - low) ? limit : high;
}

/** Index of the point of a series that is next to a step; those without a value do not count. */
function nearest(series, step) {
  let best = 0;
  let distance = Infinity;
  series.x.forEach((x, i) => {
    if (series.y[i] !== null && Math.abs(x - step) < distance) [best, distance] = [i, Math.abs(x - step)];
  });
  return best;
}

/** Powers of ten between two bounds; where they are few, twice and five times these as well. */
function logTicks(low, high) {
  const wide = high / low > 300;
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) {
    for (const factor of wide ? [1] : [1, 2, 5]) {
      const value = factor * 10 ** k;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 5);
}

/** All charts of a page, with their common range of steps and cursor. */
class Board {
  constructor(specs, starts) {
    const steps = specs.flatMap((spec) => spec.series.flatMap((series) => [series.x[0], series.x[series.x.length - 1]]));
    this.all = [Math.min(...steps), Math.max(...steps)];
    this.range = this.all;
    this.cursor = null;
    this.steps = [...new Set(specs.flatMap((spec) => spec.series.flatMap((series) => series.x)))].sort((a, b) => a - b);
    this.charts = specs.map((spec) => new Chart(spec, this, starts));
  }

  setCursor(step) {
    const at = step === null ? null : this.steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    if (at === this.cursor) return;
    this.cursor = at;
    for (const chart of this.charts) chart.drawCursor();
  }

  setRange(range) {
    this.range = [Math.max(this.all[0], range[0]), Math.min(this.all[1], range[1])];
    const whole = this.range[0] === this.all[0] && this.range[1] === this.all[1];
    document.getElementById("range-all").hidden = whole;
    document.getElementById("range").textContent = whole
      ? "Drag over a chart to look at a part of the run."
      : `Steps ${this.range[0].toLocaleString("en")} to ${this.range[1].toLocaleString("en")}.`;
    this.draw();
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }
}

