/* How busy the ranks of a pipeline were: for each a bar of its forwards, backwards and bubble, and one of the predicted
   bubble below it. Both bubbles end at the right, so their lengths compare. */

const PIPELINE_KINDS = [["forwards", "one"], ["backwards", "two"], ["bubble", "hatched"], ["predicted work", "rest"]];

class PipelineView {
  constructor(runs) {
    this.runs = runs.map((run, i) => ({ ...run, i })).filter((run) => run.pipeline);
    this.several = runs.length > 1;
  }

  start() {
    byId("pipeline-section").hidden = !this.runs.length;
    if (!this.runs.length) return;
    byId("pipeline-note").textContent = this.note();
    byId("pipeline-legend").replaceChildren(...PIPELINE_KINDS.map(([name, kind]) => (
      element("li", {}, element("span", { class: `swatch ${kind}` }), name))));
    byId("pipeline").replaceChildren(...this.runs.flatMap(({ name, i, pipeline }) => [
      ...(this.several ? [element("h3", {}, swatch(i), ` ${name}`)] : []), this.table(pipeline)]));
    this.fillStages();
  }

  note() {
    const missing = this.runs.filter(({ pipeline }) => pipeline.missing.length).map(({ name, pipeline }) => (
      `No times of pipeline ${pipeline.missing.length === 1 ? "rank" : "ranks"} ${pipeline.missing.join(", ")}` +
      `${this.several ? ` of ${name}` : ""}. `));
    const { skipped } = this.runs[0].pipeline;
    const first = this.several ? "The first step of a run is left out if it has five or more." :
      skipped === null ? "" : `Step ${number(skipped)}, in which memory and kernels warm up, is left out.`;
    return "How the ranks of lane 0 spent a step: medians over steps, which need not add up to 100 %. The upper bar is measured, " +
      "the lower predicted by the plan. The measured bubble is all of a step outside forwards and backwards, so it also has the " +
      "optimizer and the waiting for data; the predicted one is the waiting for other stages alone. " +
      missing.join("") + first;
  }

  table(pipeline) {
    const heads = ["Rank", "Stages", "A step", "Forwards", "Backwards", "Bubble", "Predicted bubble"];
    const rows = pipeline.rows.map((row) => {
      const cells = [row.forward, row.backward, row.bubble, row.predicted].map((share, c) => (
        element("td", { class: c > 1 ? "strong" : null, "data-label": heads[c + 3].toLowerCase() }, percent(share))));
      return element("tr", {}, element("th", { scope: "row" }, number(row.rank)),
        element("td", { class: "parts", "data-label": row.stages.length === 1 ? "stage" : "stages" }, ...stageNames(row.stages)),
        element("td", { class: "time" }, shareBar(measuredParts(row)),
          shareBar([["rest", 1 - row.predicted], ["hatched", row.predicted]], "thin")),
        ...cells);
    });
    const head = heads.map((text, c) => element("th", { scope: "col", class: c === 1 || c === 2 ? "left" : null }, text));
    return element("table", { class: "piped" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  fillStages() {
    const rows = this.runs.flatMap(({ name, pipeline }) => (
      pipeline.rows.flatMap(({ rank, stages }) => stages.map((stage) => ({ name, rank, ...stage })))
        .sort((a, b) => a.number - b.number)));
    const heads = [...(this.several ? ["Run"] : []), "Stage", "Parts", "Rank", "Forwards", "Backwards"];
    const parts = rows.some(({ text }) => text !== null);
    fillTable(byId("stages"), heads.filter((head) => parts || head !== "Parts"), rows.map((row) => [
      ...(this.several ? [row.name] : []), number(row.number), ...(parts ? [row.text === null ? "–" : row.text] : []),
      number(row.rank), percent(row.forward), percent(row.backward)]));
  }
}

/* "0 Ett", "2 ttm": the numbers of stages, with their parts where the layout is known. */
function stageNames(stages) {
  return stages.map(({ number: stage, text }) => element("span", {}, number(stage),
    ...(text === null ? [] : [" ", element("span", { class: "mono" }, text)])));
}

/* The bubble as long as it is, forwards and backwards in the rest: medians need not add up. */
function measuredParts({ forward, backward, bubble }) {
  const scale = (1 - bubble) / (forward + backward || 1);
  return [["one", forward * scale], ["two", backward * scale], ["hatched", bubble]];
}

function shareBar(parts, kind = "") {
  return element("span", { class: `shares ${kind}`, "aria-hidden": "true" }, ...parts.map(([name, share]) => (
    element("span", { class: name, style: `width: ${100 * share}%` }))));
}
