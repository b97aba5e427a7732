/* Puts the plan's data into the page. `data-ready` on the root says that everything is drawn; what went wrong is shown
   at the top and kept in `data-errors`. */

window.addEventListener("error", (event) => complain(event.message));
window.addEventListener("unhandledrejection", (event) => complain(String(event.reason)));

function complain(message) {
  const root = document.documentElement;
  root.dataset.errors = (root.dataset.errors ? root.dataset.errors + "\n" : "") + message;
  byId("trouble").textContent = `Part of this page could not be drawn: ${message}`;
  byId("trouble").hidden = false;
}

/* Each figure: a label, its text from (step, setting), and a plain sentence. */
const FIGURES = [
  ["predicted", "Predicted time", ({ stats }) => seconds(stats.predicted),
    "How long the step should take, by the cost profile."],
  ["lower_bound", "Lower bound", ({ stats }) => seconds(stats.lower_bound),
    "No plan for these sequences and lanes can be faster than this."],
  ["gap", "Gap", ({ stats }) => percent(stats.gap),
    "How much longer the plan takes than the lower bound. 0 % is perfect."],
  ["efficiency", "Efficiency", ({ stats }) => percent(stats.efficiency),
    "Share of the lanes' time that goes into arithmetic on real tokens."],
  ["imbalance", "Idle", ({ stats }) => percent(stats.imbalance),
    "Share of the lanes' time spent waiting for busier lanes (imbalance)."],
  ["bubble", "Bubble", ({ stats }, { pp }) => (pp > 1 ? percent(stats.bubble) : "none"),
    "Share of the time that pipeline ranks wait for their neighbours; 0 without a pipeline."],
  ["rounds", "Rounds", ({ stats }) => number(stats.rounds),
    "Micro-batches of each lane in the step. More rounds need less memory at a time."],
  ["fill", "Fill", ({ stats }) => percent(stats.fill),
    "How full the lanes are: tokens relative to the capacity. A low fill is not a problem in itself."],
  ["padding", "Padding", ({ stats }) => percent(stats.padding),
    "Share of all tokens that are padding and train nothing."],
  ["tokens", "Real tokens", ({ stats }) => number(stats.tokens),
    "Tokens of the step's sequences, without padding."],
  ["planning_seconds", "Planning time", ({ stats }) => seconds(stats.planning_seconds),
    "How long it took to make this plan."],
];

class Page {
  constructor(data) {
    this.data = data;
    this.index = 0;
    this.charts = [];
  }

  get step() { return this.data.steps[this.index]; }

  start() {
    this.showSetting();
    this.offerSteps();
    this.showCaps();
    this.showStep(0);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach((c) => c.repaint()));
    new ResizeObserver(() => requestAnimationFrame(() => this.redrawBars())).observe(document.body);
    document.documentElement.dataset.ready = "yes";
  }

  showSetting() {
    const { setting } = this.data;
    const facts = settingFacts(setting, this.data.about).map(([name, value, small]) => element("div", {},
      element("dt", {}, name), element("dd", {}, value), element("dd", { class: "small" }, small)));
    byId("setting").replaceChildren(...facts);
    const words = Object.entries(WORDS).flatMap(([word, text]) => [element("dt", {}, word), element("dd", {}, text)]);
    byId("words").replaceChildren(...words);
    byId("title").textContent = `Plan for ${plural(setting.lanes, "lane")}`;
    document.title = `Longshore plan: ${setting.policy}, ${plural(setting.lanes, "lane")}`;
    byId("profile").textContent = JSON.stringify(setting.profile, null, 2);
  }

  offerSteps() {
    const { steps } = this.data;
    byId("steps").hidden = steps.length < 2;
    byId("step").replaceChildren(...steps.map(({ stats }, i) => element("option", { value: i },
      `${i + 1} of ${steps.length}: ${seconds(stats.predicted)}, gap ${percent(stats.gap)}`)));
    byId("step").addEventListener("change", (event) => this.showStep(Number(event.target.value)));
    byId("previous").addEventListener("click", () => this.showStep(this.index - 1));
    byId("next").addEventListener("click", () => this.showStep(this.index + 1));
  }

  showStep(index) {
    this.index = index;
    byId("step").value = index;
    byId("previous").disabled = index === 0;
    byId("next").disabled = index === this.data.steps.length - 1;
    byId("summary").textContent = summary(this.step, this.data.setting);
    this.showFigures();
    this.showTimeline();
    this.showLengths();
    policiesTable(byId("policies"), this.data, index);
  }

  showFigures() {
    const { setting } = this.data;
    const figures = FIGURES.map(([name, label, text, note]) => figure(name, label, text(this.step, setting), note));
    const sizes = element("div", { class: "wide", "data-figure": "cp_histogram" },
      element("dt", {}, "CP sizes"), element("dd", {}, this.sizeBars()),
      element("dd", { class: "small" }, "Sequences at each CP size, the number of lanes a sequence is split over."));
    byId("figures").replaceChildren(...figures, sizes);
    byId("digest").replaceChildren("Digest of the plan, the same on all ranks: ", element("code", {}, this.step.digest));
  }

  sizeBars() {
    const { cp_sizes: sizes } = this.data;
    const { cp_histogram: histogram } = this.step.stats;
    const most = Math.max(...histogram.map(([, count]) => count));
    return element("div", { class: "sizes" }, ...histogram.flatMap(([size, count]) => {
      const { fill } = rampColour(Math.max(0, sizes.indexOf(size)), sizes.length);
      const bar = element("span", { class: "bar", style: `width: ${(count / most) * 100}%; background: ${fill}` });
      return [element("span", {}, `CP ${size}`), element("span", {}, bar), element("span", { class: "count" }, number(count))];
    }));
  }

  showTimeline() {
    const { setting, cp_sizes: sizes } = this.data;
    this.charts.forEach((chart) => chart.close());
    const model = new LaneModel(this.step, { lanes: setting.lanes, sizes });
    byId("timeline-note").textContent = timelineNote(setting);
    const label = `Timeline of ${plural(setting.lanes, "lane")} and ${plural(this.step.busy.length, "round")}; ` +
      `lanes are idle ${percent(this.step.idle)} of the time. Arrow keys go from pack to pack.`;
    this.charts = [new Chart(byId("timeline"), model, label)];
    const waiting = [["hatched", "idle"], ...(this.step.overhead ? [["overhead", "a round's own cost"]] : [])];
    byId("timeline").prepend(colourLegend(model.colours, sizes.map((size) => `CP ${size}`), waiting));
    fillTable(byId("rounds"), ...roundRows(this.step));
    this.showPipeline();
  }

  showPipeline() {
    const { pipeline } = this.step;
    byId("pipeline-section").hidden = !pipeline;
    if (!pipeline) return;
    const model = new PipelineModel(pipeline);
    this.charts.push(new Chart(byId("pipeline"), model, `Pipeline timeline of ${plural(model.rows, "rank")}`));
    byId("pipeline").prepend(colourLegend(model.colours, model.kinds, [["hatched", "bubble"]]));
    byId("pipeline-bubbles").textContent = bubbleNote(pipeline.bubbles);
  }

  showLengths() {
    const { capacity } = this.data.setting;
    byId("histogram-note").textContent = histogramNote(this.step, capacity);
    histogramTable(byId("histogram-table"), this.step.histogram);
    this.redrawBars(true);
  }

  showCaps() {
    const { caps, steps, micro_batches: count } = this.data;
    byId("caps-note").textContent = capsNote(count, steps.length);
    capsTable(byId("caps-table"), caps);
  }

  redrawBars(always = false) {
    const width = byId("histogram").clientWidth;
    if (!width || (width === this.barWidth && !always)) return;
    this.barWidth = width;
    drawHistogram(byId("histogram"), this.step, this.data.setting.capacity);
    drawCaps(byId("caps"), this.data.caps);
  }
}

function settingFacts(setting, about) {
  const facts = [
    ["Policy", setting.policy, about[setting.policy]],
    ["Lanes", number(setting.lanes), "data- and context-parallel ranks"],
    ["Capacity", `${number(setting.capacity)} tokens`, "the most a lane holds in a round"],
    ["Sync", setting.sync, SYNC[setting.sync] || ""],
    ["Pipeline", setting.pp > 1 ? `pp ${setting.pp}, vpp ${setting.vpp}` : "none",
      setting.pp > 1 ? "pipeline ranks, and stages on each" : "every lane holds all layers"],
  ];
  if (setting.align > 1) facts.push(["Align", number(setting.align), "a lane's tokens are rounded up to a multiple"]);
  if (setting.max_sequences) facts.push(["Cap", plural(setting.max_sequences, "sequence"), "the most in a lane's micro-batch"]);
  return facts;
}

function summary({ stats, lengths }, setting) {
  return `${plural(lengths.length, "sequence")} with ${plural(stats.tokens, "token")} on ${plural(setting.lanes, "lane")} ` +
    `in ${plural(stats.rounds, "round")}: predicted to take ${seconds(stats.predicted)}, ` +
    `${percent(stats.gap)} above the lower bound.`;
}

function figure(name, label, text, note) {
  return element("div", { "data-figure": name, title: note }, element("dt", {}, label),
    element("dd", { class: "value" }, text), element("dd", { class: "small" }, note));
}

function timelineNote(setting) {
  const wait = setting.sync === "round"
    ? "A round starts when the slowest lane has finished the round before."
    : "A lane continues as soon as it is done; only lanes that share a pack wait for each other.";
  const pipeline = setting.pp > 1
    ? " The picture shows the lanes of one pipeline rank with its rounds back to back; the predicted time adds the bubble."
    : "";
  return `Each line is a lane, time runs to the right, and each block is a pack, coloured by the number of lanes that ` +
    `share it. Hatched time is idle; a thin line marks where a round starts. ${wait}${pipeline}`;
}

/* `others` are [style, name] of what has no colour of its own. */
function colourLegend(colours, names, others) {
  const entry = (swatch, name) => element("li", {}, swatch, name);
  return element("ul", { class: "legend", "aria-label": "Colours" },
    ...names.map((name, i) => entry(element("span", { class: "swatch", style: `background: ${colours[i].fill}` }), name)),
    ...others.map(([style, name]) => entry(element("span", { class: `swatch ${style}` }), name)));
}

/* Heads and rows of the table of rounds. */
function roundRows({ busy, packs, unit }) {
  const counts = busy.map(() => 0);
  packs.round.forEach((round) => { counts[round] += 1; });
  const rows = busy.map((lanes, round) => {
    const most = lanes.reduce((a, b) => Math.max(a, b), 0);
    const mean = lanes.reduce((a, b) => a + b, 0) / lanes.length;
    return [number(round), number(counts[round]), seconds(most * unit), number(lanes.indexOf(most)), seconds(mean * unit)];
  });
  return [["Round", "Packs", "Time of the busiest lane", "Busiest lane", "Mean time of a lane"], rows];
}

function capsNote({ alone, others }, steps) {
  const batches = (count) => plural(count, "micro-batch").replace("batchs", "batches");
  const many = steps > 1 ? ` of all ${number(steps)} steps together` : "";
  const which = alone ? `${batches(others)} more` : `Its ${batches(others)}`;
  const rest = others ? ` ${which} ${others === 1 ? "has" : "have"} several packs, or one that lanes share: ` +
    "only the halves of layers that work on single tokens can be replayed there, which needs no cap." : "";
  const start = "A CUDA graph replays one fixed shape. ";
  if (!alone) return `${start}Whole layers can be replayed for a micro-batch with one pack of CP size 1; this plan has none.${rest}`;
  return `${start}Whole layers can be replayed for a micro-batch with one pack of CP size 1, up to a cap on its sequences. One ` +
    "with fewer is padded with empty slots: they add entries to the boundary array (cap + 1 in all), but no tokens. One with " +
    "more is served without such graphs. The padding that rounds a lane's tokens up to a bucket counts as a sequence. P50, P90 and P99 " +
    `are the smallest caps that cover 50 %, 90 % and 99 % of the ${batches(alone)}${many} with one pack of CP size 1.${rest}`;
}

new Page(JSON.parse(byId("plan-data").textContent)).start();
