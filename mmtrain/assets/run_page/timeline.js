// -------------------------------------------------------------------------------------------- timelines

const KINDS = { F: "forward", B: "backward", I: "backward, input half", W: "backward, weight half" };
const LABEL_WIDTH = 62;
const AXIS_HEIGHT = 26;
const HEAD_HEIGHT = 22;
const STRIP = 5;

/** Seconds with the unit that suits them. */
function seconds(value) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e3]]) {
    if (Math.abs(value) * factor >= 1) return `${Number((value * factor).toPrecision(4))} ${unit}`;
  }
  return value === 0 ? "0 s" : `${Number((value * 1e6).toPrecision(4))} us`;
}

/** One action of a timeline's file (step_files.py names the columns). */
function readAction(row, data) {
  const [stage, kind, microbatch, sub, start, end, plannedStart, plannedEnd, rows, flops, part = 0, parts = 1] = row;
  const [module, rank, first, last] = data.stages[stage];
  const times = { measured: [start, end], planned: [plannedStart, plannedEnd] };
  const deferred = (data.deferred || []).some(([of, m, s]) => of === module && m === microbatch && s === sub);
  const mark = deferred ? ">" : ""; // of a work that the next microbatch reads
  return { stage, kind, microbatch, sub, mark, rows, flops, module, rank, layers: [first, last], times, part, parts };
}

/** The measured timeline of a step above the planned one, on a canvas that zooms. */
class TimelineView {
  constructor(canvas, colours) {
    this.canvas = canvas;
    this.colours = colours;
    this.pointers = new Map();
    this.data = null;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", () => this.fit());
  }

  load(data) {
    this.data = data;
    this.actions = data.actions.map((row) => readAction(row, data));
    this.length = { measured: 0, planned: 0 };
    for (const { times } of this.actions) {
      for (const name of ["measured", "planned"]) this.length[name] = Math.max(this.length[name], times[name][1]);
    }
    this.pitch = data.num_ranks > 16 ? 20 : data.num_ranks > 8 ? 26 : 34;
  }

  /** Whether one timeline is more than twice as long as the other: plans have costs of another machine. */
  get apart() {
    const { measured, planned } = this.length;
    return Math.max(measured / planned, planned / measured) > 2;
  }

  setStretch(on) {
    this.factor = { measured: 1, planned: on ? this.length.measured / this.length.planned : 1 };
    this.end = Math.max(this.length.measured, this.length.planned * this.factor.planned);
    this.under = null;
    this.fit();
  }

  fit() {
    this.view = [0, this.end];
    this.draw();
  }

  get inner() {
    return this.canvas.clientWidth - LABEL_WIDTH - 8;
  }

  x(time) {
    return LABEL_WIDTH + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.inner;
  }

  time(x) {
    return this.view[0] + ((x - LABEL_WIDTH) / this.inner) * (this.view[1] - this.view[0]);
  }

  top(name, rank) {
    const block = HEAD_HEIGHT + this.data.num_ranks * this.pitch;
    return (name === "measured" ? 0 : block + 10) + HEAD_HEIGHT + rank * this.pitch;
  }

  draw() {
    if (!this.data) return;
    const { canvas, pitch } = this;
    const ranks = this.data.num_ranks;
    const width = canvas.clientWidth;
    const height = this.top("planned", ranks) + AXIS_HEIGHT;
    const ratio = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    const ink = cssColour("--ink");
    const soft = cssColour("--soft");
    this.drawAxis(pen, height, soft);
    for (const name of ["measured", "planned"]) {
      pen.font = "600 12.5px system-ui, sans-serif";
      pen.fillStyle = ink;
      pen.textAlign = "left";
      const drawn = this.factor[name] === 1 ? "" : `, drawn ${brief(this.factor[name])} times as long`;
      pen.fillText(`${name}: ${seconds(this.length[name])}${drawn}`, 0, this.top(name, 0) - HEAD_HEIGHT / 2);
      pen.font = "12px system-ui, sans-serif";
      for (let rank = 0; rank < ranks; rank++) {
        pen.fillStyle = soft;
        pen.fillText(`rank ${rank}`, 0, this.top(name, rank) + (pitch - 6) / 2);
        pen.fillStyle = cssColour("--idle");
        pen.fillRect(LABEL_WIDTH, this.top(name, rank), this.inner, pitch - 6);
      }
      pen.save();
      pen.beginPath();
      pen.rect(LABEL_WIDTH, 0, this.inner, height);
      pen.clip();
      this.drawWaits(pen, name, soft);
      for (const action of this.actions) this.drawAction(pen, name, action);
      pen.restore();
    }
    canvas.dataset.view = this.view.map((t) => t.toFixed(6)).join(" "); // for those who look at the page from outside
  }

  drawAxis(pen, height, soft) {
    const bottom = height - AXIS_HEIGHT;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const mark of ticks(this.view[0], this.view[1], Math.max(2, this.inner / 110))) {
      pen.fillStyle = cssColour("--line");
      pen.fillRect(this.x(mark), HEAD_HEIGHT - 4, 1, bottom - HEAD_HEIGHT + 6);
      pen.fillStyle = soft;
      const x = Math.min(this.x(mark), this.canvas.clientWidth - 24);
      pen.fillText(seconds(mark), x, bottom + 14);
    }
  }

  drawWaits(pen, name, soft) {
    const factor = this.factor[name];
    for (const [rank, start, end, action] of this.data.waits[name]) {
      const [low, high] = [this.x(start * factor), this.x(end * factor)];
      if (high < LABEL_WIDTH || low > LABEL_WIDTH + this.inner) continue;
      pen.fillStyle = action < 0 ? soft : this.hue(this.actions[action].module).I;
      pen.globalAlpha = action < 0 ? 0.35 : 0.9;
      pen.fillRect(low, this.top(name, rank) + this.pitch - 6 - STRIP, high - low, STRIP);
    }
    pen.globalAlpha = 1;
  }

  drawAction(pen, name, action) {
    const [start, end] = action.times[name].map((t) => this.x(t * this.factor[name]));
    if (end < LABEL_WIDTH || start > LABEL_WIDTH + this.inner) return;
    const [height, width] = [(this.pitch - 6) / action.parts, Math.max(end - start - 0.7, 0.7)];
    const y = this.top(name, action.rank) + action.part * height; // the parts of a block lie above each other
    pen.fillStyle = this.hue(action.module)[action.kind] || "#7b8794";
    pen.fillRect(start, y, width, height);
    if (action === this.under) {
      pen.strokeStyle = cssColour("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(start + 1, y + 1, Math.max(width - 2, 1), height - 2);
    }
    const { microbatch, sub, mark } = action;
    const whole = sub ? `${microbatch}.${sub}${mark}` : `${microbatch}${mark}`;
    const seen = [Math.max(start, LABEL_WIDTH), Math.min(end, LABEL_WIDTH + this.inner)];
    const text = [whole, `${microbatch}${mark}`].find((t) => t.length * 7 + 3 <= seen[1] - seen[0]);
    if (!text) return;
    pen.fillStyle = action.kind === "B" || action.kind === "I" ? "#ffffff" : "#1f2933";
    pen.font = "11.5px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText(text, (seen[0] + seen[1]) / 2, y + height / 2 + 0.5);
  }

  hue(module) {
    return this.colours[module % this.colours.length];
  }

  // ---- pointer

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  zoom(factor, x) {
    const at = this.time(Math.max(x, LABEL_WIDTH));
    const length = Math.min(this.end, Math.max(this.end / 5000, (this.view[1] - this.view[0]) * factor));
    const share = (at - this.view[0]) / (this.view[1] - this.view[0]);
    this.setView(at - share * length, length);
  }

  setView(start, length) {
    const low = Math.min(Math.max(0, start), this.end - length);
    this.view = [low, low + length];
    this.draw();
  }

  wheel(event) {
    const whole = this.view[1] - this.view[0] >= this.end * (1 - 1e-9);
    if (event.deltaY > 0 && whole) return; // the page scrolls on
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const length = this.view[1] - this.view[0];
      this.setView(this.view[0] + (event.deltaX / this.inner) * length, length);
    } else {
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.place(event)[0]);
    }
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.place(event)[0]);
    this.canvas.classList.add("moving");
  }

  move(event) {
    const [x] = this.place(event);
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) return this.hover(event);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    this.pointers.set(event.pointerId, x);
    if (others.length) {
      this.zoom(Math.max(8, Math.abs(before - others[0])) / Math.max(8, Math.abs(x - others[0])), (x + others[0]) / 2);
    } else {
      const length = this.view[1] - this.view[0];
      this.setView(this.view[0] - ((x - before) / this.inner) * length, length);
    }
    if (event.pointerType !== "mouse") this.hover(event);
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    if (!this.pointers.size) this.canvas.classList.remove("moving");
    if (event.pointerType !== "mouse" && event.type === "pointerup") this.hover(event);
  }

  /** The name of the timeline and the rank at a height, and the share of the rank's row above it; null between them. */
  row(y) {
    for (const name of ["measured", "planned"]) {
      const rank = Math.floor((y - this.top(name, 0)) / this.pitch);
      const share = (y - this.top(name, rank)) / (this.pitch - 6);
      if (rank >= 0 && rank < this.data.num_ranks) return { name, rank, share };
    }
    return null;
  }

  hover(event) {
    const [x, y] = event ? this.place(event) : [-1, -1];
    const row = event && this.data && x >= LABEL_WIDTH ? this.row(y) : null;
    const time = row && this.time(x) / this.factor[row.name];
    const near = row && (1.5 / this.inner) * (this.view[1] - this.view[0]);
    const on = (low, high) => low - near <= time && time <= high + near;
    const best = (found) => found.sort((a, b) => a.off - b.off)[0];
    const hit = row && best(
      this.actions
        .filter(({ rank, times }) => rank === row.rank && on(...times[row.name]))
        .filter(({ part, parts }) => part === Math.min(parts - 1, Math.floor(row.share * parts)))
        .map((action) => ({ action, off: Math.max(action.times[row.name][0] - time, time - action.times[row.name][1]) })),
    );
    const under = hit ? hit.action : null;
    if (under !== this.under) {
      this.under = under;
      this.draw();
    }
    const wait = row && !under && this.data.waits[row.name].find(([rank, low, high]) => rank === row.rank && low <= time && time <= high);
    if (under) tip.show(event, ...this.actionTip(under));
    else if (wait) tip.show(event, this.waitTip(wait));
    else tip.hide();
  }

  title({ kind, microbatch, sub, mark, module, stage }) {
    return `${kind}${microbatch}.${sub}${mark} ${this.data.modules[module]} s${stage}`;
  }

  actionTip(action) {
    const [measured, planned] = ["measured", "planned"].map((name) => action.times[name][1] - action.times[name][0]);
    const lines = [
      `${this.data.modules[action.module]} ${KINDS[action.kind] || action.kind}, rank ${action.rank}`,
      `microbatch ${action.microbatch}, sub-microbatch ${action.sub}; layers ${action.layers.join(" to ")}`,
      ...(action.mark ? ["its images are read by the next microbatch"] : []),
      ...(action.parts > 1 ? ["in one block with another action; the times are the block's"] : []),
      `measured ${seconds(measured)} from ${seconds(action.times.measured[0])}`,
      `planned ${seconds(planned)} from ${seconds(action.times.planned[0])}` +
        (planned > 0 ? ` (measured / planned ${brief(measured / planned)})` : ""),
      ...(this.apart ? ["planned with costs that are not of this machine and its load: run mmtrain profile"] : []),
      `${action.rows.toLocaleString("en")} rows, ${brief(action.flops / 1e9)} GFLOP` +
        (measured > 0 ? `, ${brief(action.flops / measured / 1e9)} GFLOP/s` : ""),
    ];
    return [make("b", { text: this.title(action) }), `\n${lines.join("\n")}`];
  }

  waitTip([rank, start, end, index]) {
    const what = index < 0 ? "transfers and starts of actions" : `waits for ${this.title(this.actions[index])} on rank ${this.actions[index].rank}`;
    return `rank ${rank} idle for ${seconds(end - start)}\n${what}`;
  }

  /** Of each timeline: how long, how much of it idle, and what was waited for. */
  summary() {
    return ["measured", "planned"].map((name) => {
      const total = this.length[name] * this.data.num_ranks;
      const busy = this.actions.reduce((sum, { times, parts }) => sum + (times[name][1] - times[name][0]) / parts, 0);
      const parts = this.data.modules.map(() => 0);
      let other = 0;
      for (const [, start, end, action] of this.data.waits[name]) {
        if (action < 0) other += end - start;
        else parts[this.actions[action].module] += end - start;
      }
      return { name, length: this.length[name], bubble: 1 - busy / total, parts: parts.map((p) => p / total), other: other / total };
    });
  }
}

