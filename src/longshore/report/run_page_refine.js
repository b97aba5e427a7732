/* What plan.refine did: measured against predicted time of each kind of round over steps, and the factors of each change. */

class RefineView {
  constructor(runs) {
    this.runs = runs.filter((run) => run.refined);
    this.several = runs.length > 1;
  }

  start() {
    byId("refine-section").hidden = !this.runs.length;
    byId("refined").replaceChildren(...this.runs.flatMap((run) => {
      run.figure = element("figure", { class: "plot" });
      return [...(this.several ? [element("h3", {}, run.name)] : []), run.figure, this.legend(run.refined), this.table(run.refined)];
    }));
    this.draw();
  }

  legend({ kinds }) {
    return element("ul", { class: "legend" }, ...kinds.map(({ kind }, i) => element("li", {}, swatch(i), `CP size ${kind}`)));
  }

  table({ parts, rows }) {
    const table = element("table");
    fillTable(table, ["From step", "By steps", "Rounds", "Left out", ...parts, "Typical error"], rows.map((row) => [
      number(row.step), `${number(row.window[0])}–${number(row.window[1])}`, number(row.rounds), number(row.left_out),
      ...row.factors.map((factor) => (factor === null ? "–" : times(factor))),
      `${percent(row.errors[1])} → ${percent(row.errors[2])}`]));
    return element("div", { class: "scroll" }, table);
  }

  /* A kind has one colour; the profile that the run began with is dashed. */
  draw() {
    const caption = "Seconds measured for each second predicted, on a logarithmic scale; 1 × is a perfect prediction. " +
      "Dashed: under the profile the run began with.";
    for (const { figure, refined } of this.runs) {
      const lines = refined.kinds.flatMap(({ kind, step, first, before }, i) => [
        { x: step, y: before, name: `CP size ${kind}, refined`, colour: colour(i) },
        { x: step, y: first, name: `CP size ${kind}, first profile`, colour: colour(i), dash: DASHES[1] }]);
      drawOverSteps(figure, lines, { title: "Ratio of each kind of round", caption, format: times, log: true, height: 300 });
    }
  }
}
