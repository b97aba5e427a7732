/* Puts the data of runs into the page. `data-ready` on the root says that everything is drawn; what went wrong is shown
   at the top and kept in `data-errors`. */

class RunPage {
  constructor(data) {
    this.data = data;
    this.runs = data.runs;
    this.curves = new Curves(this.runs, (run, step) => this.pick(run, step));
    this.cost = new CostView(this.runs, (run, step) => this.pick(run, step));
    this.refine = new RefineView(this.runs);
    this.pipeline = new PipelineView(this.runs);
    this.experts = new ExpertsView(this.runs);
    this.graphs = new GraphsView(this.runs);
    this.step = new StepView(data, (run, step) => this.curves.choose(run, step));
  }

  start() {
    this.showHead();
    this.showWarnings();
    this.showFigures();
    this.showDifferences();
    this.curves.start();
    this.cost.start();
    this.refine.start();
    this.pipeline.start();
    this.experts.start();
    this.graphs.start();
    this.step.start();
    this.showSlowest();
    this.showConfig();
    this.width = document.body.clientWidth;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.step.chart && this.step.chart.repaint());
    new ResizeObserver(() => requestAnimationFrame(() => this.resize())).observe(document.body);
    document.documentElement.dataset.ready = "yes";
  }

  resize() {
    if (this.width === document.body.clientWidth) return;
    this.width = document.body.clientWidth;
    const views = [this.curves, this.cost, this.refine, this.experts, this.graphs, this.step];
    views.forEach((view) => view.draw());
  }

  /* A step that was clicked: its timeline, brought into view. */
  pick(run, step) {
    if (!this.runs[run].steps.length) return;
    this.step.choose(run, step);
    byId("step-section").scrollIntoView({ behavior: "smooth", block: "start" });
  }

  get several() { return this.runs.length > 1; }

  showHead() {
    const { runs } = this;
    const title = this.several ? `${number(runs.length)} runs side by side` : `Run ${runs[0].name}`;
    byId("title").textContent = title;
    document.title = `Longshore: ${title}`;
    byId("summary").textContent = this.several ? runs.map(({ name }) => name).join(", ") : runSummary(runs[0]);
    const facts = this.several ? [] : chips(runs[0].config);
    byId("setting").replaceChildren(...facts.map(([name, value]) => (
      element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
    const words = Object.entries(RUN_WORDS).flatMap(([word, text]) => [element("dt", {}, word), element("dd", {}, text)]);
    byId("words").replaceChildren(...words);
  }

  showWarnings() {
    const warnings = this.runs.flatMap(({ name, warnings: own }) => own.map(({ text }) => (
      `Warning: ${this.several ? `${name}: ` : ""}${text}`)));
    byId("warnings").hidden = !warnings.length;
    byId("warnings").replaceChildren(...warnings.map((text) => element("li", {}, text)));
  }

  showFigures() {
    const figures = shownFigures(this.runs);
    byId("figures").hidden = this.several;
    byId("compared").hidden = !this.several;
    if (this.several) {
      this.compare(figures);
      return;
    }
    const values = this.runs[0].figures;
    byId("figures").replaceChildren(...figures.map(([key, label, text, note]) => element("div", { "data-figure": key, title: note },
      element("dt", {}, label), element("dd", { class: "value" }, values[key] === null ? "unknown" : text(values[key])),
      element("dd", { class: "small" }, note))));
  }

  /* A row for each figure, a column for each run; the best is bold. */
  compare(figures) {
    const rows = figures.map(([key, label, text, note, better]) => {
      const values = this.runs.map((run) => run.figures[key]);
      const known = values.filter((value) => value !== null);
      const best = better && new Set(known).size > 1 ? better * Math.max(...known.map((value) => value * better)) : null;
      return element("tr", { "data-figure": key }, element("th", { scope: "row", title: note }, label), ...values.map((value) => (
        element("td", { class: value !== null && value === best ? "best" : null }, value === null ? "–" : text(value)))));
    });
    byId("compared").replaceChildren(this.runHeads(), element("tbody", {}, ...rows));
  }

  runHeads() {
    const names = this.runs.map(({ name }, i) => element("th", { scope: "col" }, swatch(i), name));
    return element("thead", {}, element("tr", {}, element("th", { scope: "col" }), ...names));
  }

  showDifferences() {
    const { differences } = this.data;
    byId("differences-section").hidden = !this.several;
    if (!this.several) return;
    byId("differences-note").textContent = differences.length
      ? `${plural(differences.length, "key")} of the configuration ${differences.length === 1 ? "differs" : "differ"}; all others are the same.`
      : "The configurations are the same in every key.";
    const partly = differences.filter(({ everywhere }) => !everywhere);
    this.fillDifferences("differences", differences.filter(({ everywhere }) => everywhere));
    this.fillDifferences("partly", partly);
    byId("partly-details").hidden = !partly.length;
    byId("partly-summary").textContent = `${plural(partly.length, "key")} that not every run has`;
  }

  fillDifferences(id, rows) {
    byId(id).hidden = !rows.length;
    byId(id).replaceChildren(this.runHeads(), element("tbody", {}, ...rows.map(({ key, values }) => (
      element("tr", {}, element("th", { scope: "row", class: "mono" }, key), ...values.map((value) => element("td", {}, value)))))));
  }

  showSlowest() {
    byId("slowest-note").textContent = "The steps that took longest, and how they differ from others. " +
      "Click a step's number for its timeline.";
    byId("slowest").replaceChildren(...this.runs.flatMap((run, i) => [
      ...(this.several ? [element("h3", {}, swatch(i), ` ${run.name}`)] : []), this.slowTable(run, i)]));
  }

  slowTable(run, i) {
    const heads = ["Step", "Time", "Against usual", "Data wait", "Rounds", "Efficiency", "Padding", "Tokens", "Why"];
    const maybe = (value, text) => (value === null ? "–" : text(value));
    const rows = run.slowest.map((row) => {
      const button = element("button", { type: "button", "aria-label": `Timeline of step ${row.step}` }, number(row.step));
      button.disabled = !run.steps.some(({ step }) => step === row.step);
      button.addEventListener("click", () => this.pick(i, row.step));
      const cells = [seconds(row.elapsed), maybe(row.times, times), maybe(row.data_wait_s, seconds), maybe(row.rounds, number),
        maybe(row.efficiency, percent), maybe(row.padding, percent), maybe(row.tokens, number)];
      return element("tr", {}, element("th", { scope: "row" }, button),
        ...cells.map((text, c) => element("td", { "data-label": heads[c + 1].toLowerCase() }, text)),
        element("td", { class: "why" }, row.why.join("; ")));
    });
    const head = heads.map((text, c) => element("th", { scope: "col", style: c === 8 ? "text-align: left" : null }, text));
    return element("table", { class: "slow" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  showConfig() {
    byId("config").replaceChildren(...this.runs.map(({ name, config }) => {
      const table = element("table");
      fillTable(table, ["Key", "Value"], Object.entries(config));
      table.querySelectorAll("th[scope=row], td").forEach((cell) => cell.classList.add("mono"));
      const title = Object.keys(config).length ? `${name}: ${plural(Object.keys(config).length, "key")}` : `${name} has no config.toml`;
      return element("details", {}, element("summary", {}, title), element("div", { class: "scroll" }, table));
    }));
  }
}

function runSummary({ figures }) {
  const { steps, tokens, seconds: time, loss, tokens_per_s: speed } = figures;
  const ended = loss === null ? "" : ` The loss of the last step is ${figureText(loss)}.`;
  return `${plural(steps, "step")} on ${plural(tokens, "token")} in ${duration(time)}` +
    `${speed === null ? "" : `, ${compact(speed)} tokens per second`}.${ended}`;
}

new RunPage(JSON.parse(byId("run-data").textContent)).start();
