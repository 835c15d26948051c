// ------------------------------------------------------------------------------------------------- page

const DATA = JSON.parse(document.getElementById("data").textContent);
const several = DATA.runs.length > 1;
const byId = (id) => document.getElementById(id);

function showHeader() {
  const lines = DATA.runs.flatMap((run) => {
    const start = run.starts[run.starts.length - 1];
    const facts = start
      ? [
          start.commit ? `commit ${start.commit}` : `mmtrain ${start.mmtrain}`,
          `torch ${start.torch}`,
          `${start.ranks} rank${start.ranks === 1 ? "" : "s"} on ${start.device}`,
          `started ${start.time.replace("T", " ").replace("+00:00", " UTC")}` + (start.step ? ` (resumed after step ${start.step})` : ""),
        ]
      : [];
    const dot = several ? [dotOf(themed(run.colour))] : [];
    return [
      make("h1", {}, ...dot, run.description || run.name),
      make("p", { class: "soft", text: [run.name, ...facts].join(" \u00b7 ") }),
    ];
  });
  byId("header").replaceChildren(...lines);
}

function dotOf(colour) {
  const dot = make("span", { class: "dot" });
  dot.style.background = colour;
  return dot;
}

function showNumbers() {
  const labels = [...new Set(DATA.runs.flatMap((run) => run.numbers.map((number) => number.label)))];
  const tiles = labels.map((label) => {
    const lines = DATA.runs.flatMap((run) => {
      const number = run.numbers.find((n) => n.label === label);
      if (!number) return [];
      const value = make("div", { class: "value" }, ...(several ? [dotOf(themed(run.colour))] : []), number.value);
      return [value, make("div", { class: "note", text: number.note })];
    });
    const off = DATA.runs.some((run) => run.numbers.some((n) => n.label === label && n.advice));
    return make("div", { class: off ? "card tile off" : "card tile" }, make("div", { class: "label", text: label }), ...lines);
  });
  const advice = DATA.runs.flatMap((run) =>
    run.numbers
      .filter((number) => number.advice)
      .map((number) => make("li", {}, ...(several ? [dotOf(themed(run.colour))] : []), make("b", { text: `${number.label} ${number.value}` }), ` ${number.advice}`)),
  );
  byId("numbers").replaceChildren(make("div", { class: "tiles" }, ...tiles), make("ul", { class: "advice" }, ...advice));
}

function showFacts() {
  const sections = DATA.runs.flatMap((run) => {
    const name = several ? ` of ${run.name}` : "";
    const made = [];
    if (run.starts.length) made.push(make("details", {}, make("summary", { text: `Environment${name}` }), environment(run.starts)));
    if (run.config) {
      made.push(make("details", { class: "config" }, make("summary", { text: `Config${name}` }), make("pre", { class: "card", text: run.config })));
    }
    return made;
  });
  byId("facts").replaceChildren(...(sections.length ? [make("h2", { text: "What ran" })] : []), ...sections);
}

function environment(starts) {
  const words = (value) =>
    value === null || value === undefined ? "-" : typeof value === "object" ? Object.entries(value).map((pair) => pair.join(" ")).join(", ") : String(value);
  const keys = [...new Set(starts.flatMap(Object.keys))];
  const rows = keys.map((key) =>
    make("tr", {}, make("th", { text: key === "step" ? "after step" : key.replaceAll("_", " ") }), ...starts.map((start) => make("td", { text: words(start[key]) }))),
  );
  return make("div", { class: "card scroll" }, make("table", {}, ...rows));
}

// ---- answers to held-out questions

function showAnswers() {
  const sections = DATA.runs.filter((run) => run.answers.answers).flatMap((run) => {
    const { step, answers } = run.answers;
    const right = answers.filter((answer) => answer.right).length;
    const title = `Answers to held-out questions after step ${step.toLocaleString("en")}: ${right} of ${answers.length} right`;
    return [
      make("h2", {}, ...(several ? [dotOf(themed(run.colour))] : []), title),
      make("div", { class: "answers" }, ...answers.map(answerCard)),
    ];
  });
  byId("answers").replaceChildren(...sections);
}

// ---- clips for held-out prompts

function showSamples() {
  const sections = DATA.runs.filter((run) => run.samples.image).flatMap((run) => {
    const { step, image } = run.samples;
    const title = `Samples for held-out prompts after step ${step.toLocaleString("en")}`;
    return [
      make("h2", {}, ...(several ? [dotOf(themed(run.colour))] : []), title),
      make("div", { class: "card scroll" }, make("img", { src: `data:image/png;base64,${image}`, alt: "frames of each clip under its prompt" })),
    ];
  });
  byId("samples").replaceChildren(...sections);
}

function answerCard({ question, reference, answer, right, images }) {
  const shown = images.map((data, index) => make("img", { src: `data:image/png;base64,${data}`, alt: `image ${index + 1} of the question` }));
  return make(
    "div",
    { class: right ? "card answer" : "card answer wrong" },
    make("div", { class: "images" }, ...shown),
    make("p", { class: "soft", text: question.replace(/^(<image>\s*)+/, "") }), // the images are above
    make("p", {}, make("b", { text: right ? "\u2713 right: " : "\u2717 wrong: " }), answer || "(nothing)"),
    ...(answer === reference ? [] : [make("p", { class: "soft", text: `the record's answer: ${reference}` })]),
  );
}

// ---- timelines: which run and step

const view = new TimelineView(byId("timeline"), DATA.colours);

function setUpTimelines() {
  const runs = DATA.runs.filter((run) => run.timelines.length);
  if (!runs.length) return;
  byId("timelines").hidden = false;
  byId("run-choice").hidden = runs.length < 2;
  const [runChoice, stepChoice, stretch] = ["timeline-run", "timeline-step", "timeline-stretch"].map(byId);
  let chosen = false; // until the reader says otherwise, a timeline is stretched where it would be a sliver
  runChoice.append(...runs.map((run, index) => make("option", { value: index, text: run.name })));
  const listSteps = () => {
    const steps = runs[runChoice.value].timelines.map((timeline) => timeline.step);
    stepChoice.replaceChildren(...steps.map((step, index) => make("option", { value: index, text: step.toLocaleString("en") })));
    stepChoice.value = steps.length - 1;
    showStep();
  };
  const showStep = () => {
    view.load(runs[runChoice.value].timelines[stepChoice.value]);
    if (!chosen) stretch.checked = view.apart;
    view.setStretch(stretch.checked);
    showLegend();
    showSummary();
  };
  const go = (offset) => () => {
    const index = Number(stepChoice.value) + offset;
    if (index < 0 || index >= stepChoice.options.length) return;
    stepChoice.value = index;
    showStep();
  };
  runChoice.addEventListener("change", listSteps);
  stepChoice.addEventListener("change", showStep);
  stretch.addEventListener("change", () => {
    chosen = true;
    view.setStretch(stretch.checked);
  });
  byId("timeline-before").addEventListener("click", go(-1));
  byId("timeline-after").addEventListener("click", go(1));
  byId("timeline-fit").addEventListener("click", () => view.fit());
  listSteps();
}

function showLegend() {
  const present = new Set(view.actions.map(({ module, kind }) => `${module} ${kind}`));
  const items = view.data.modules.flatMap((name, module) =>
    Object.keys(KINDS)
      .filter((kind) => present.has(`${module} ${kind}`))
      .map((kind) => make("span", {}, dotOf(view.hue(module)[kind]), `${name} ${KINDS[kind]}`)),
  );
  byId("timeline-legend").replaceChildren(...items);
}

function showSummary() {
  const percent = (part) => `${(100 * part).toFixed(1)} %`;
  const head = ["", "makespan", "bubble", ...view.data.modules.map((name) => `for ${name}`), "transfers, starts"];
  const rows = view.summary().map(({ name, length, bubble, parts, other }) => [name, seconds(length), percent(bubble), ...parts.map(percent), percent(other)]);
  const table = make("table", {}, make("tr", {}, ...head.map((text) => make("th", { text }))));
  table.append(...rows.map((row) => make("tr", {}, ...row.map((text) => make("td", { text })))));
  byId("timeline-words").replaceChildren(make("div", { class: "scroll" }, table));
}

// ---- all of it

const starts = DATA.runs.flatMap((run) => run.starts.map((start) => start.step)).filter((step) => step > 0);
const board = new Board(DATA.charts, starts);
byId("range-all").addEventListener("click", () => board.setRange(board.all));

function showAll() {
  showHeader();
  showNumbers();
  showAnswers();
  showSamples();
  board.draw();
  view.draw();
}

byId("charts").append(...board.charts.map((chart) => chart.element));
byId("footer").textContent = `Made by mmtrain ${DATA.version}. Curves of long runs show means of neighbouring steps.`;
showFacts();
setUpTimelines();
showAll();
dark.addEventListener("change", showAll);
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => {
    board.draw();
    view.draw();
  });
});
