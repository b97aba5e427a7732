/* One step of a run: its lanes in time as planned, and its rounds as measured. */

const MOST_BARS = 64;

class StepView {
  /* `moved(run, step)` is called when another step is shown. */
  constructor({ runs, cp_sizes: sizes }, moved) {
    Object.assign(this, { runs, sizes, moved, run: runs.findIndex(({ steps }) => steps.length), index: 0, chart: null });
  }

  get steps() { return this.runs[this.run].steps; }
  get step() { return this.steps[this.index]; }

  start() {
    byId("step-view").hidden = this.run < 0;
    byId("step-note").textContent = stepsNote(this.runs);
    if (this.run < 0) return;
    const offered = this.runs.map(({ name, steps }, i) => [name, steps, i]).filter(([, steps]) => steps.length);
    byId("step-run").hidden = offered.length < 2;
    byId("step-run").replaceChildren(...offered.map(([name, , i]) => element("option", { value: i }, name)));
    byId("step-run").addEventListener("change", (event) => this.choose(Number(event.target.value), this.step.step));
    byId("step").addEventListener("change", (event) => this.show(Number(event.target.value)));
    byId("previous").addEventListener("click", () => this.show(this.index - 1));
    byId("next").addEventListener("click", () => this.show(this.index + 1));
    this.offer();
    this.show(this.steps.length - 1, () => {});
  }

  offer() {
    byId("step-run").value = this.run;
    byId("step").replaceChildren(...this.steps.map((step, i) => {
      const sum = (values) => values.reduce((a, b) => a + b, 0);
      const took = step.elapsed.length ? `${seconds(sum(step.elapsed))} measured` : `${seconds(sum(step.predicted))} predicted`;
      return element("option", { value: i }, `Step ${number(step.step)}: ${took}, ${plural(step.busy.length, "round")}`);
    }));
  }

  /* The step of a run, or the nearest that the page holds. */
  choose(run, step) {
    if (!this.runs[run].steps.length) return;
    const other = run !== this.run;
    this.run = run;
    if (other) this.offer();
    this.show(nearestPlace(this.steps.map((held) => held.step), step));
  }

  show(index, tell = this.moved) {
    this.index = index;
    byId("step").value = index;
    byId("previous").disabled = index === 0;
    byId("next").disabled = index === this.steps.length - 1;
    byId("step-summary").textContent = stepSummary(this.step);
    this.showTimeline();
    this.draw();
    fillTable(byId("rounds"), ...measuredRows(this.step, this.factor));
    tell(this.run, this.step.step);
  }

  get factor() {
    const { cost } = this.runs[this.run];
    return cost ? cost.factor : 1;
  }

  showTimeline() {
    const { step, sizes } = this;
    if (this.chart) this.chart.close();
    const model = new LaneModel(step, { lanes: step.lanes, sizes });
    const label = `Timeline of step ${step.step}: ${plural(step.lanes, "lane")} and ${plural(step.busy.length, "round")}; ` +
      `lanes are idle ${percent(step.idle)} of the time. Arrow keys go from pack to pack.`;
    this.chart = new Chart(byId("timeline"), model, label);
    byId("timeline").prepend(this.legend(model.colours));
  }

  legend(colours) {
    const entry = (mark, name) => element("li", {}, mark, name);
    const others = [["hatched", "idle"], ...(this.step.overhead ? [["overhead", "a round's own cost"]] : [])];
    return element("ul", { class: "legend", "aria-label": "Colours" },
      ...this.sizes.map((size, i) => entry(element("span", { class: "swatch", style: `background: ${colours[i].fill}` }), `CP ${size}`)),
      ...others.map(([style, name]) => entry(element("span", { class: `swatch ${style}` }), name)));
  }

  /* Bars: what each round should have taken on this machine, and what it took. */
  draw() {
    const host = byId("rounds-plot");
    const shown = this.step ? Math.min(this.step.elapsed.length, this.step.predicted.length, MOST_BARS) : 0;
    host.hidden = shown < 2;
    if (host.hidden) return;
    const { predicted, elapsed } = this.step, expected = predicted.map((value) => value * this.factor);
    const plot = new Plot(host, {
      height: 180, label: "Expected and measured time of each round", formats: [number, seconds], whole: true,
      ranges: [[-0.5, shown - 0.5], [0, Math.max(...expected.slice(0, shown), ...elapsed.slice(0, shown)) * 1.05]],
    });
    const slot = plot.x.at(1) - plot.x.at(0), width = Math.min(30, slot * 0.4);
    for (let round = 0; round < shown; round++) {
      [["one", expected, -width], ["two", elapsed, 0]].forEach(([style, values, shift]) => {
        const y = plot.y.at(values[round]);
        const bar = plot.add("rect", { class: style, x: plot.x.at(round) + shift, y, width, height: Math.max(1, plot.bottom - y) });
        bar.append(svg("title", {}, `round ${round}: ${seconds(values[round])}`));
      });
    }
    host.replaceChildren(element("h3", {}, "Rounds"), seriesLegend("expected: predicted × the run's factor", "measured"), plot.node);
  }
}

function stepsNote(runs) {
  const drawing = "Each line is a lane, time runs to the right as the plan predicted it, and each block is a pack, coloured by " +
    "the number of lanes that share it. Hatched time is idle. ";
  const missing = runs.filter(({ journal }) => !journal).map(({ name }) => name);
  const few = runs.filter(({ steps, journal }) => steps.length < journal);
  const held = few.length
    ? "To keep the page small, only some timelines are on it: " +
      few.map(({ name, steps, journal }) => `${number(steps.length)} of ${number(journal)} steps${runs.length > 1 ? ` of ${name}` : ""}`).join(", ") +
      " (the first, the last, the slowest, and others evenly spaced). For any other step the nearest is shown. "
    : "";
  const short = runs.filter(({ journal, figures }) => journal && journal < figures.steps)
    .map(({ name, journal }) => `${runs.length > 1 ? `${name}: ` : ""}only ${plural(journal, "step")} have a recorded plan. `).join("");
  if (missing.length === runs.length) return "There is no steps.jsonl, so no timeline can be drawn.";
  return drawing + held + short + (missing.length ? `No steps.jsonl: ${missing.join(", ")}.` : "");
}

function stepSummary(step) {
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const tokens = sum(step.lengths), longest = step.lengths.reduce((a, b) => Math.max(a, b), 0);
  const measured = step.elapsed.length ? `, measured ${seconds(sum(step.elapsed))}` : ", not measured";
  return `Step ${number(step.step)}: ${plural(step.lengths.length, "sequence")} with ${plural(tokens, "token")}, the longest ` +
    `${number(longest)}, on ${plural(step.lanes, "lane")} in ${plural(step.busy.length, "round")}. Predicted ` +
    `${seconds(sum(step.predicted))}${measured}; by the plan, lanes are idle ${percent(step.idle)} of the time.`;
}

function measuredRows({ busy, packs, predicted, elapsed, unit }, factor) {
  const counts = busy.map(() => 0);
  packs.round.forEach((round) => { counts[round] += 1; });
  const rows = busy.map((lanes, round) => {
    const most = lanes.reduce((a, b) => Math.max(a, b), 0);
    const mean = lanes.reduce((a, b) => a + b, 0) / lanes.length;
    const took = elapsed[round], expected = predicted[round];
    return [number(round), number(counts[round]), number(lanes.indexOf(most)), seconds(most * unit), seconds(mean * unit),
      took === undefined ? "–" : seconds(took), took === undefined || !expected ? "–" : times(took / expected / factor)];
  });
  return [["Round", "Packs", "Busiest lane", "Its time", "Mean time of a lane", "Measured", "Relative to expected"], rows];
}
