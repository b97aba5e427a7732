/* How evenly experts are used: a map of one layer, experts × steps, and the busiest expert of all layers over steps.

   The map's colours run from a quarter of an even share to four times it, evenly in the logarithm. */

const HEAT_STEPS = 65;
const HEAT_REACH = 2;  // in powers of two, both ways

class ExpertsView {
  constructor(runs) {
    this.runs = runs.map((run, i) => ({ ...run, i })).filter((run) => run.experts);
    this.several = runs.length > 1;
    this.run = this.runs[0];
    this.layer = 0;
    this.colours = Array.from({ length: HEAT_STEPS }, (_, i) => rampColour(i, HEAT_STEPS).fill);
  }

  start() {
    byId("experts-section").hidden = !this.runs.length;
    if (!this.runs.length) return;
    byId("experts-run").hidden = this.runs.length < 2;
    byId("experts-run").replaceChildren(...this.runs.map(({ name }, i) => element("option", { value: i }, name)));
    byId("experts-run").addEventListener("change", (event) => this.show(this.runs[Number(event.target.value)], 0));
    byId("experts-layer").addEventListener("change", (event) => this.show(this.run, Number(event.target.value)));
    this.show(this.run, 0);
  }

  show(run, layer) {
    Object.assign(this, { run, layer });
    byId("experts-layer").replaceChildren(...run.experts.rows.map(({ most }, i) => element("option", { value: i },
      `MoE layer ${i}: busiest ${times(most)} an even share`)));
    byId("experts-layer").value = layer;
    fillTable(byId("layers"), ["Layer", "Experts", "Busiest", "Its share", "Idlest", "Its share", "Below a tenth"],
      run.experts.rows.map((row, i) => [number(i), number(run.experts.experts[i]), `expert ${row.busiest}`, times(row.most),
        `expert ${row.idlest}`, times(row.least), number(row.starved)]));
    this.draw();
  }

  draw() {
    if (!this.runs.length) return;
    this.drawHeat();
    const lines = this.runs.map(({ i, name, experts }) => ({ ...experts.peak, x: experts.peak.step, name, colour: colour(i) }));
    drawOverSteps(byId("peak"), lines, {
      title: "Busiest expert against the mean", format: times, log: false, height: 280,
      caption: "1 × is perfectly even. The line is the mean over layers, the band reaches from the evenest layer to the least even.",
    });
  }

  drawHeat() {
    const host = byId("heat"), { experts } = this.run, map = experts.maps[this.layer];
    const plot = new Plot(host, {
      height: 280, label: `Shares of ${plural(map.length, "expert")} in MoE layer ${this.layer}`,
      formats: [AXES.step[2], number], ranges: [[experts.first - 0.5, experts.step.at(-1) + 0.5], [0, map.length]], whole: true,
    });
    const picture = this.paint(map, experts.step.length);
    plot.node.append(svg("image", {
      href: picture.toDataURL(), x: PLOT.left, y: PLOT.top, width: plot.right - PLOT.left, height: plot.bottom - PLOT.top,
      preserveAspectRatio: "none", style: "image-rendering: pixelated",
    }));
    const tip = element("div", { class: "tip", hidden: "" });
    host.replaceChildren(element("h3", {}, "Shares of experts over steps"),
      element("p", { class: "caption" }, "Experts upwards, steps to the right."), plot.node, this.legend(), tip);
    this.listen(host, plot, tip);
  }

  /* A picture with one pixel for each expert and column, expert 0 at the bottom. */
  paint(map, columns) {
    const canvas = element("canvas", { width: columns, height: map.length });
    const ctx = canvas.getContext("2d");
    map.forEach((row, expert) => row.forEach((hundredths, column) => {
      ctx.fillStyle = this.fill(hundredths / 100);
      ctx.fillRect(column, map.length - 1 - expert, 1, 1);
    }));
    return canvas;
  }

  fill(share) {
    const power = Math.max(-HEAT_REACH, Math.min(HEAT_REACH, Math.log2(Math.max(share, 1e-9))));
    return this.colours[Math.round(((power + HEAT_REACH) / (2 * HEAT_REACH)) * (HEAT_STEPS - 1))];
  }

  legend() {
    const stops = [0, 16, 32, 48, 64].map((i) => this.colours[i]).join(", ");
    return element("p", { class: "ramp" }, element("span", {}, "¼ × or less"),
      element("span", { style: `background: linear-gradient(to right, ${stops})` }), element("span", {}, "4 × or more"));
  }

  listen(host, plot, tip) {
    const { experts } = this.run, map = experts.maps[this.layer];
    plot.node.addEventListener("pointermove", (event) => {
      const box = plot.node.getBoundingClientRect();
      const px = ((event.clientX - box.left) * plot.width) / box.width, py = event.clientY - box.top;
      const share = (px - PLOT.left) / (plot.right - PLOT.left);
      const column = Math.floor(share * experts.step.length), expert = Math.floor(plot.y.value(py));
      const inside = column >= 0 && column < experts.step.length && expert >= 0 && expert < map.length;
      tip.hidden = !inside;
      if (!inside) return;
      const from = column ? experts.step[column - 1] + 1 : experts.first, to = experts.step[column];
      placeTip(tip, host, {
        title: `Expert ${expert}`, x: px, y: py + (plot.node.offsetTop || 40),
        rows: [[null, from < to ? "Steps" : "Step", from < to ? `${number(from)}–${number(to)}` : number(to)],
          [null, "Gets", `${times(map[expert][column] / 100)} an even share`]],
      });
    });
    plot.node.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}
