/* The curves over steps, tokens or time, of one run or of several laid over each other.

   A chart is [key, title, sentence, [[metric, name], …], format, options]; options: large, steady (not smoothed),
   ifItVaries (left out where every step has the same value), most (where the vertical axis ends at the latest). */

const CHARTS = [
  ["loss", "Loss", "Training loss of each step", [["loss", "training"]], figureText, { large: true }],
  ["depths", "Multi-token prediction loss", "By depth", "depths", figureText, {}],
  ["balance", "Balance loss", "Penalty for uneven use of experts", [["balance_loss", "balance"]], figureText, {}],
  ["index", "Index loss", "How far indexers are from what attention reads", [["index_loss", "index"]], figureText, {}],
  ["grad", "Gradient norm", "Before clipping", [["grad_norm", "gradient norm"]], figureText, {}],
  ["lr", "Learning rate", "", [["lr", "learning rate"]], figureText, { steady: true }],
  ["speed", "Tokens per second", "Real tokens, over all lanes", [["tokens_per_s", "tokens/s"]], compact, {}],
  ["time", "Time of a step", "From the end of the previous step to the end of this one", [["elapsed_s", "time"]], seconds, {}],
  ["efficiency", "Plan efficiency", "Share of the lanes' time spent on real tokens", [["efficiency", "efficiency"]], percent, { most: 1 }],
  ["padding", "Padding", "Share of tokens that are padding", [["padding", "padding"]], percent, { ifItVaries: true, most: 1 }],
  ["rounds", "Rounds", "Micro-batches of each lane in a step", [["rounds", "rounds"]], (value) => number(value, 1), { ifItVaries: true }],
  ["wait", "Waiting for data, planning", "", [["data_wait_s", "waiting for data"], ["plan_s", "planning, mostly in the background"]], seconds, {}],
  ["memory", "Memory", "Peak memory of a rank so far", [["memory_gib", "memory"]], gib, { steady: true }],
  ["mfu", "MFU", "Share of the vendor's dense peak", [["mfu", "MFU"]], percent, { most: 1 }],
];

const AXES = {
  step: ["Steps", "Step", (value) => (value < 1e4 ? number(value) : compact(value))],
  tokens: ["Tokens", "Tokens", compact],
  seconds: ["Time", "Time", duration],
};
const SMOOTH_FROM = 40;

class Curves {
  /* `pick(run, step)` is called when a reader chooses a step in a curve. */
  constructor(runs, pick) {
    Object.assign(this, { runs, pick, axis: "step", log: false, smooth: true, hidden: new Set(), chosen: null });
    const [loss, ...others] = CHARTS;
    this.charts = [loss, ...this.own(), ...others].map((chart) => this.prepare(chart)).filter((chart) => chart.series.length);
  }

  /* A chart for each metric that the loss function returns. */
  own() {
    return this.named("own_").map((metric) => {
      const name = metric.replace("own_", "").replaceAll("_", " ");
      return [metric, name[0].toUpperCase() + name.slice(1), "Metric of the loss", [[metric, name]], figureText, {}];
    });
  }

  named(prefix) {
    const names = this.runs.flatMap(({ points }) => Object.keys(points.curves)).filter((name) => name.startsWith(prefix));
    return [...new Set(names)];
  }

  /* A chart with the series that a run has. */
  prepare([key, title, note, wanted, format, options]) {
    const names = wanted === "depths" ? this.depths() : wanted;
    const series = names.filter(([metric]) => this.runs.some(({ points }) => metric in points.curves));
    const host = element("figure", { class: options.large ? "plot large" : "plot", id: `chart-${key}` });
    const shown = options.ifItVaries ? series.filter(([metric]) => this.varies(metric)) : series;
    return { key, title, note, series: shown, format, options, host };
  }

  varies(metric) {
    const values = this.runs.flatMap(({ points }) => (points.curves[metric] || { y: [] }).y).filter((y) => y !== null);
    return values.some((value) => value !== values[0]);
  }

  depths() {
    return this.named("depth_").map((name) => [name, name.replace("_", " ")]);
  }

  start() {
    byId("curves").replaceChildren(...this.charts.map(({ host }) => host));
    byId("curves-note").textContent = curvesNote(this.runs);
    this.controls();
    this.draw();
  }

  controls() {
    const press = (text, isOn, act) => {
      const node = element("button", { type: "button", "aria-pressed": String(isOn()) }, text);
      node.addEventListener("click", () => { act(); this.controls(); this.draw(); });
      return node;
    };
    const axes = Object.entries(AXES).map(([axis, [name]]) => press(name, () => this.axis === axis, () => { this.axis = axis; }));
    const looks = ["log", "smooth"].map((look) => press({ log: "Logarithmic", smooth: "Smooth" }[look],
      () => this[look], () => { this[look] = !this[look]; }));
    const groups = [element("span", { role: "group", "aria-label": "Horizontal axis" }, ...axes),
      element("span", { role: "group", "aria-label": "Look" }, ...looks)];
    if (this.runs.length > 1) groups.push(element("span", { role: "group", "aria-label": "Runs" }, ...this.runButtons()));
    byId("controls").replaceChildren(...groups);
  }

  runButtons() {
    return this.runs.map(({ name }, i) => {
      const node = element("button", { type: "button", class: "run", title: name, "aria-pressed": String(!this.hidden.has(i)) },
        swatch(i), element("span", {}, name));
      node.addEventListener("click", () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        this.controls();
        this.draw();
      });
      return node;
    });
  }

  draw() {
    this.charts.forEach((chart) => this.drawChart(chart));
  }

  /* Shows where the step of the timeline lies. */
  choose(run, step) {
    this.chosen = { run, step };
    this.draw();
  }

  /* The lines of a chart: the colour tells the run if there are several, else the series. */
  lines(chart) {
    const several = this.runs.length > 1;
    return this.runs.flatMap((run, i) => {
      if (this.hidden.has(i)) return [];
      const found = chart.series.filter(([metric]) => metric in run.points.curves).map(([metric, name], s) => ({
        ...run.points.curves[metric], run: i, name: several ? run.name : name, x: run.points[this.axis], points: run.points,
        colour: colour(several ? i : s), dash: several ? DASHES[s % DASHES.length] : "",
      }));
      return chart.key === "loss" ? [...found, ...this.evaluations(run, i, several)] : found;
    });
  }

  evaluations(run, i, several) {
    return run.evals.map((evaluation, e) => ({
      run: i, name: several ? `${run.name}, ${evaluation.name}` : evaluation.name, x: evaluation[this.axis], y: evaluation.y,
      steps: evaluation.step, colour: colour(several ? i : e + 1), dash: DASHES[1], dots: true,
    }));
  }

  drawChart(chart) {
    const lines = this.lines(chart).filter((line) => line.y.length);
    const values = lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
    const log = this.log && values.some((value) => value > 0);
    const xs = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
    const low = this.axis === "step" && xs.length ? Math.min(...xs) : 0, high = Math.max(...xs, low + 1e-9);
    const plot = new Plot(chart.host, {
      height: chart.options.large ? 280 : 190, label: chartLabel(chart, lines, chart.format),
      formats: [AXES[this.axis][2], chart.format], ranges: [[low, high > low ? high : low + 1], spanOf(values, log, chart.options.most)], logs: [false, log],
      whole: this.axis === "step",
    });
    lines.forEach((line) => this.drawLine(plot, line, chart));
    this.mark(plot, lines);
    const tip = element("div", { class: "tip", hidden: "" });
    chart.host.replaceChildren(...chartHead(chart, lines, this.runs.length), plot.node, tip);
    this.listen(chart, plot, lines, tip);
  }

  drawLine(plot, line, chart) {
    if (line.low) plot.band(line);
    const soften = this.smooth && !line.low && !line.dots && !chart.options.steady && line.y.length >= SMOOTH_FROM;
    if (soften) plot.line(line, { opacity: 0.35, width: 1 });
    plot.line(line, soften ? { y: smoothed(line.y) } : {});
    if (line.dots || line.y.length === 1) plot.dots(line, { width: 6, opacity: 1 });
  }

  mark(plot, lines) {
    if (!this.chosen) return;
    const line = lines.find(({ run, points }) => run === this.chosen.run && points);
    if (line) plot.vertical(plot.x.at(line.x[nearestPlace(line.points.step, this.chosen.step)]), "chosen");
  }

  listen(chart, plot, lines, tip) {
    const hair = plot.vertical(0, "hair");
    hair.style.display = "none";
    const place = (event) => plot.x.value(((event.clientX - plot.node.getBoundingClientRect().left) * plot.width) / plot.node.clientWidth);
    const show = (event) => {
      const rows = lines.map((line) => [line.colour, line.name, pointText(line, nearestPlace(line.x, place(event)), chart.format)]);
      const main = lines.find((line) => line.points) || lines[0];
      if (!main) return;
      const at = nearestPlace(main.x, place(event));
      hair.style.display = "";
      hair.setAttribute("x1", plot.x.at(main.x[at]));
      hair.setAttribute("x2", plot.x.at(main.x[at]));
      placeTip(tip, chart.host, { title: this.pointTitle(main, at), rows, x: plot.x.at(main.x[at]), y: plot.node.offsetTop || 40 });
    };
    const hide = () => { tip.hidden = true; hair.style.display = "none"; };
    plot.node.classList.add("pick");
    plot.node.addEventListener("pointermove", show);
    plot.node.addEventListener("pointerleave", hide);
    plot.node.addEventListener("click", (event) => {
      const main = lines.find((line) => line.points);
      if (main) this.pick(main.run, main.points.step[nearestPlace(main.x, place(event))]);
    });
  }

  pointTitle(line, i) {
    const title = this.axis === "step" ? "" : `, ${AXES[this.axis][2](line.x[i])}`;
    if (!line.points) return `Step ${number(line.steps[i])}${title}`;
    const { step, first } = line.points, from = i ? step[i - 1] + 1 : first;
    return (line.low && from < step[i] ? `Steps ${number(from)}–${number(step[i])}` : `Step ${number(step[i])}`) + title;
  }
}

function pointText(line, i, format) {
  if (line.y[i] === null) return "none";
  const several = line.low && line.low[i] !== line.high[i];
  return several ? `${format(line.y[i])} (${format(line.low[i])} to ${format(line.high[i])})` : format(line.y[i]);
}

function chartHead(chart, lines, runs) {
  const head = [element("h3", {}, chart.title)];
  if (chart.note) head.push(element("p", { class: "caption" }, chart.note));
  const names = runs > 1
    ? chart.series.map(([, name], s) => [name, "var(--muted)", DASHES[s % DASHES.length]])
    : lines.map((line) => [line.name, line.colour, line.dash]);
  if (runs > 1 && lines.some((line) => line.dots)) names.push(["evaluation", "var(--muted)", DASHES[1]]);
  if (names.length > 1) head.push(element("ul", { class: "legend" }, ...names.map((name) => lineKey(...name))));
  return head;
}

function chartLabel(chart, lines, format) {
  const ends = lines.slice(0, 8).map((line) => {
    const known = line.y.filter((y) => y !== null);
    return known.length ? `${line.name} from ${format(known[0])} to ${format(known.at(-1))}` : `${line.name}: none`;
  });
  return `${chart.title}: ${ends.join("; ")}`;
}

function curvesNote(runs) {
  const thinned = runs.filter(({ figures, points }) => figures.steps > points.step.length);
  const smoothing = "Pale lines are single steps, strong ones a running mean. ";
  const few = thinned.length
    ? `To keep the page small, neighbouring steps share a point: the line is their mean, the pale band reaches ` +
      `from the lowest to the highest of them, so that no spike is lost. `
    : "";
  return (thinned.length < runs.length ? smoothing : "") + few + "Point at a curve for its numbers; click it to see that step below.";
}
