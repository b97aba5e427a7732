/* Predicted against measured time of rounds: dots on two even scales, and the ratio over steps. */

class CostView {
  constructor(runs, pick) {
    this.pick = pick;
    this.runs = runs.map((run, i) => ({ ...run, i })).filter((run) => run.cost);
    this.several = runs.length > 1;
  }

  start() {
    byId("cost").hidden = !this.runs.length;
    byId("cost-words").replaceChildren(this.words());
    this.draw();
  }

  words() {
    if (!this.runs.length) {
      return element("p", { class: "note" }, "No round has both a predicted and a measured time: there is no steps.jsonl, or it has no times.");
    }
    if (!this.several) return element("p", { class: "said" }, this.runs[0].cost.words);
    const table = element("table", { class: "compared" });
    fillTable(table, ["Run", "Cost model", "Typical error", "Nine of ten rounds", "Correlation", "Factor", "Rounds"],
      this.runs.map(({ name, cost }) => [name, cost.verdict, percent(cost.error), `${significant(cost.low, 2)} to ${times(cost.high)}`,
        cost.correlation === null ? "–" : significant(cost.correlation, 2), times(cost.factor), number(cost.rounds)]));
    table.querySelectorAll("th[scope=row]").forEach((cell, row) => cell.prepend(swatch(this.runs[row].i)));
    return element("div", {}, element("p", { class: "note" }, "A common factor between predicted and measured time does not change " +
      "plans, so it is removed first; the error is what remains."), element("div", { class: "scroll" }, table));
  }

  draw() {
    if (!this.runs.length) return;
    this.drawScatter();
    this.drawRatio();
  }

  drawScatter() {
    const host = byId("scatter");
    const xs = this.runs.flatMap(({ cost }) => cost.dots.predicted), ys = this.runs.flatMap(({ cost }) => cost.dots.elapsed);
    const plot = new Plot(host, {
      height: 300, label: "Predicted and measured seconds of rounds", formats: [seconds, seconds],
      ranges: [spanOf(xs, true), spanOf(ys, true)], logs: [true, true],
    });
    for (const { i, cost } of this.runs) {
      this.factorLine(plot, cost.factor, colour(i));
      plot.dots({ x: cost.dots.predicted, y: cost.dots.elapsed, colour: colour(i) }, { width: 6, opacity: 0.55 });
    }
    const tip = element("div", { class: "tip", hidden: "" });
    const caption = "Each dot is a round: predicted time to the right, measured time upwards, on logarithmic scales. " +
      "Dots on the line match the cost model except for one factor.";
    host.replaceChildren(element("h3", {}, "Rounds"), element("p", { class: "caption" }, caption), plot.node, tip);
    this.listen(host, plot, tip);
  }

  /* Measured = factor × predicted, where it crosses the picture. */
  factorLine(plot, factor, stroke) {
    const low = Math.max(plot.x.low, plot.y.low / factor), high = Math.min(plot.x.high, plot.y.high / factor);
    if (low < high) plot.line({ x: [low, high], y: [low * factor, high * factor], colour: stroke, dash: DASHES[1] }, { width: 1.4 });
  }

  /* The dot nearest to the pointer, if it is near. */
  nearest(plot, event) {
    const box = plot.node.getBoundingClientRect();
    const px = ((event.clientX - box.left) * plot.width) / box.width, py = event.clientY - box.top;
    let best = null, least = 24;
    for (const run of this.runs) {
      const { predicted, elapsed } = run.cost.dots;
      predicted.forEach((value, i) => {
        const x = plot.x.at(value), y = plot.y.at(elapsed[i]), far = Math.hypot(x - px, y - py);
        if (far < least) [best, least] = [{ run, i, x, y }, far];
      });
    }
    return best;
  }

  listen(host, plot, tip) {
    plot.node.classList.add("pick");
    plot.node.addEventListener("pointermove", (event) => {
      const found = this.nearest(plot, event);
      tip.hidden = !found;
      if (!found) return;
      const { run, i, x, y } = found, { step, predicted, elapsed } = run.cost.dots;
      placeTip(tip, host, {
        title: `${this.several ? run.name + ", " : ""}step ${number(step[i])}`, x, y: y + (plot.node.offsetTop || 40),
        rows: [[null, "Predicted", seconds(predicted[i])], [null, "Measured", seconds(elapsed[i])],
          [null, "Relative to expected", times(elapsed[i] / predicted[i] / run.cost.factor)]],
      });
    });
    plot.node.addEventListener("pointerleave", () => { tip.hidden = true; });
    plot.node.addEventListener("click", (event) => {
      const found = this.nearest(plot, event);
      if (found) this.pick(found.run.i, found.run.cost.dots.step[found.i]);
    });
  }

  drawRatio() {
    const lines = this.runs.map(({ i, name, cost }) => ({ ...cost.ratio, x: cost.ratio.step, name, colour: colour(i) }));
    const caption = "Seconds measured for each second predicted, all rounds of a step together, on a logarithmic scale. " +
      "A flat line, at any height, means a good cost model.";
    drawOverSteps(byId("ratio"), lines, { title: "Ratio over steps", caption, format: times, log: true, height: 300 });
  }
}

/* A small chart of lines over steps, with a tip. */
function drawOverSteps(host, lines, { title, caption, format, log, height, most }) {
  const values = lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
  const steps = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
  const low = Math.min(...steps), high = Math.max(...steps);
  const plot = new Plot(host, {
    height, label: title, formats: [AXES.step[2], format],
    ranges: [[low, high > low ? high : low + 1], spanOf(values, log, most)], logs: [false, log], whole: true,
  });
  lines.forEach((line) => {
    if (line.low) plot.band(line);
    plot.line(line);
    if (line.y.length === 1) plot.dots(line, { opacity: 1 });
  });
  const tip = element("div", { class: "tip", hidden: "" });
  host.replaceChildren(element("h3", {}, title), element("p", { class: "caption" }, caption), plot.node, tip);
  plot.node.addEventListener("pointermove", (event) => {
    const box = plot.node.getBoundingClientRect();
    const at = plot.x.value(((event.clientX - box.left) * plot.width) / box.width);
    const step = lines[0].x[nearestPlace(lines[0].x, at)];
    const rows = lines.map((line) => [line.colour, line.name, pointText(line, nearestPlace(line.x, at), format)]);
    placeTip(tip, host, { title: `Step ${number(step)}`, rows, x: plot.x.at(step), y: plot.node.offsetTop || 40 });
  });
  plot.node.addEventListener("pointerleave", () => { tip.hidden = true; });
}
