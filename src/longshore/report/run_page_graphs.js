/* How CUDA graphs served the layers: the share of each way over steps, and in all. Hidden without graphs. */

const GRAPH_WAYS = { whole: "whole layers", halves: "halves of layers", eager: "eagerly" };

class GraphsView {
  constructor(runs) {
    this.runs = runs.map((run, i) => ({ ...run, i })).filter((run) => run.graphs);
    this.several = runs.length > 1;
  }

  start() {
    byId("graphs-section").hidden = !this.runs.length;
    if (!this.runs.length) return;
    byId("graphs-note").textContent = "A graph replays the kernels of a layer without launching each. Whole layers need a " +
      "micro-batch with one pack of CP size 1 and at most graph.max_sequences sequences; in others only what works on " +
      "single tokens is replayed, where halves are possible, and the rest runs eagerly. Counted are forward passes of layers, as they ran on all lanes.";
    fillTable(byId("graphs-table"), [this.several ? "Run" : "", "Layers run", "Whole", "Halves", "Eagerly", "Memory"],
      this.runs.map(({ name, graphs }) => [this.several ? name : "All steps", number(graphs.layers), percent(graphs.whole),
        percent(graphs.halves), percent(graphs.eager), graphs.memory_gib === null ? "–" : gib(graphs.memory_gib)]));
    this.draw();
  }

  draw() {
    if (!this.runs.length) return;
    const lines = this.runs.flatMap(({ name, i, graphs }) => Object.entries(GRAPH_WAYS)
      .filter(([way]) => graphs[way] > 0)
      .map(([way, words], place) => ({
        ...graphs.curves[way], x: graphs.step, name: this.several ? `${name}: ${words}` : words,
        colour: colour(this.several ? i : place), dash: this.several ? DASHES[place] : "",
      })));
    drawOverSteps(byId("graphs"), lines, {
      title: "Share of layers", format: percent, log: false, height: 240, most: 1,
      caption: "Forward passes of layers in all lanes and rounds of a step, by how they ran.",
    });
    byId("graphs").append(element("ul", { class: "legend", "aria-label": "Ways" }, ...lines.map((line) => (
      element("li", {}, element("span", { class: "swatch", style: `background: ${line.colour}` }), line.name)))));
  }
}
