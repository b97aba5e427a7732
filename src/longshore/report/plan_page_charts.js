/* Bars and tables: lengths, policies and caps. A chart is SVG made for the width it finds; its numbers also stand in a
   table. */

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function fillTable(table, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const line = (cells) => element("tr", {}, ...cells.map((cell, i) => (
    i ? element("td", {}, cell) : element("th", { scope: "row" }, cell))));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows.map(line)));
}

function seriesLegend(...names) {
  return element("ul", { class: "legend" }, ...names.map((name, i) => (
    element("li", {}, element("span", { class: `swatch ${["one", "two"][i]}` }), name))));
}

/* A frame with a percent scale from 0 to `top` (a share) and `above` pixels over it: {node, plot, y(share)}. */
function percentChart(width, height, { top, above, label }) {
  const plot = { left: 42, top: above, width: width - 56, height: height - above - 26 };
  const y = (share) => plot.top + plot.height * (1 - share / top);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const step = nice(top, 4);
  for (let i = 0; i * step <= top * 1.0001; i++) {
    const at = Math.round(y(i * step)) + 0.5;
    node.append(svg("line", { class: "grid", x1: plot.left, x2: plot.left + plot.width, y1: at, y2: at }));
    node.append(svg("text", { x: plot.left - 6, y: at + 4, "text-anchor": "end" }, `${number(i * step * 100, 1)} %`));
  }
  return { node, plot, y };
}

function svgBar(chart, series, x, width, share, title) {
  const y = chart.y(share);
  const height = Math.max(share > 0 ? 1 : 0, chart.plot.top + chart.plot.height - y);
  const bar = svg("rect", { class: series, x, y: chart.plot.top + chart.plot.height - height, width, height });
  bar.append(svg("title", {}, title));
  chart.node.append(bar);
}

/* A top for a percent scale that holds every share. */
function scaleTop(shares) {
  const largest = Math.max(...shares, 0.01);
  const step = nice(largest, 4);
  return Math.min(1, Math.ceil(largest / step - 1e-9) * step);
}

function drawHistogram(host, step, capacity) {
  const { edges, counts, tokens } = step.histogram;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const [allCounts, allTokens] = [sum(counts), sum(tokens)];
  const shares = counts.map((count, i) => [count / allCounts, tokens[i] / allTokens]);
  const chart = percentChart(host.clientWidth, 260,
    { top: scaleTop(shares.flat()), above: 30, label: "Share of sequences and of tokens by length" });
  const low = Math.log2(edges[0]), span = Math.log2(edges.at(-1)) - low;
  const x = (length) => chart.plot.left + ((Math.log2(length) - low) / span) * chart.plot.width;
  shares.forEach(([ofCounts, ofTokens], i) => {
    const from = x(edges[i]), half = (x(edges[i + 1]) - from) * 0.42, gap = (x(edges[i + 1]) - from) * 0.08;
    const lengths = lengthClass(edges, i);
    svgBar(chart, "one", from + gap, half, ofCounts, `${lengths}: ${plural(counts[i], "sequence")}, ${percent(ofCounts)}`);
    svgBar(chart, "two", from + gap + half, half, ofTokens, `${lengths}: ${plural(tokens[i], "token")}, ${percent(ofTokens)}`);
  });
  nameLengths(chart, edges, x);
  if (capacity > edges[0] && capacity < edges.at(-1)) markCapacity(chart, x(capacity), capacity);
  host.replaceChildren(seriesLegend("share of sequences", "share of tokens"), chart.node);
}

function lengthClass(edges, i) {
  const last = edges[i + 1] - 1;
  return last === edges[i] ? number(last) : `${number(edges[i])}–${number(last)}`;
}

/* Edges along the axis, leaving out those that would touch; the powers of two alone where there are a few. */
function nameLengths(chart, edges, x) {
  const taken = [];
  const powers = edges.filter((edge) => Number.isInteger(Math.log2(edge)));
  for (const edge of powers.length > 2 ? powers : edges) {
    if (taken.some((at) => Math.abs(at - x(edge)) < 40)) continue;
    taken.push(x(edge));
    const bottom = chart.plot.top + chart.plot.height;
    chart.node.append(svg("line", { class: "grid", x1: x(edge), x2: x(edge), y1: bottom, y2: bottom + 5 }));
    chart.node.append(svg("text", { x: x(edge), y: bottom + 19, "text-anchor": "middle" }, short(edge)));
  }
}

function markCapacity(chart, x, capacity) {
  const { left, top, width, height } = chart.plot;
  const anchor = x > left + width - 70 ? "end" : x < left + 70 ? "start" : "middle";
  chart.node.append(svg("line", { class: "mark", x1: x, x2: x, y1: top - 10, y2: top + height }));
  chart.node.append(svg("text", { class: "strong", x, y: top - 15, "text-anchor": anchor }, `capacity ${short(capacity)}`));
}

function histogramNote(step, capacity) {
  const long = step.lengths.filter((length) => length > capacity);
  const share = long.reduce((a, b) => a + b, 0) / step.stats.tokens;
  const split = long.length
    ? `${plural(long.length, "sequence")} with ${percent(share)} of the tokens ${long.length === 1 ? "is" : "are"} longer ` +
      `than a lane's capacity of ${number(capacity)} tokens and must be split over several lanes.`
    : `Every sequence fits into a lane's capacity of ${number(capacity)} tokens.`;
  return "How long the sequences are, on a logarithmic axis (k is 1,024 tokens). " + split;
}

function histogramTable(table, { edges, counts, tokens }) {
  const all = tokens.reduce((a, b) => a + b, 0);
  fillTable(table, ["Length", "Sequences", "Tokens", "Share of tokens"], counts.map((count, i) => (
    [lengthClass(edges, i), number(count), number(tokens[i]), percent(tokens[i] / all)])));
}

function policiesTable(table, { policies, about, setting }, stepIndex) {
  const shown = setting.policy;
  const planned = policies.filter((policy) => policy.steps)
    .sort((a, b) => a.steps[stepIndex].predicted - b.steps[stepIndex].predicted);
  const times = planned.map((policy) => policy.steps[stepIndex].predicted);
  const base = planned.find((policy) => policy.name === shown).steps[stepIndex].predicted;
  const heads = ["Policy", "Predicted time", "Against this plan", "Efficiency", "Padding", "Rounds"];
  const several = planned[0].steps.length > 1;
  if (several) heads.push("All steps");
  const rows = planned.map((policy) => policyRow(policy, { stepIndex, shown, base, about, longest: barLimit(times), several }));
  const refused = policies.filter((policy) => policy.refused).map((policy) => refusedRow(policy, heads.length - 1, about));
  const head = heads.map((text, i) => element("th", { scope: "col", role: "columnheader", class: i === 1 ? "time" : null }, text));
  table.setAttribute("role", "table");
  table.replaceChildren(
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...head)),
    element("tbody", { role: "rowgroup" }, ...rows, ...refused));
}

function policyHead(name, about, shown) {
  const note = element("small", {}, about[name]);
  return element("th", { scope: "row", role: "rowheader" }, name + (shown ? " (this plan)" : ""), note);
}

/* One policy that takes many times as long would make all other bars dots: beyond four times the
   fastest a bar is cut off, and its end says so. */
function barLimit(times) {
  return Math.min(Math.max(...times), 4 * Math.min(...times));
}

function policyRow(policy, { stepIndex, shown, base, about, longest, several }) {
  const stats = policy.steps[stepIndex];
  const cut = stats.predicted > longest;
  const width = cut ? 100 : (stats.predicted / longest) * 100;
  const bar = element("span", { class: cut ? "bar cut" : "bar", style: `width: ${width}%` });
  const time = element("td", { class: "time", role: "cell" }, element("div", {}, seconds(stats.predicted), element("span", {}, bar)));
  const cell = (label, text) => element("td", { role: "cell", "data-label": label }, text);
  const row = element("tr", { role: "row", class: policy.name === shown ? "shown" : null },
    policyHead(policy.name, about, policy.name === shown), time,
    cell("against this plan", `${number(stats.predicted / base, 2)} ×`),
    cell("efficiency", percent(stats.efficiency)), cell("padding", percent(stats.padding)),
    cell("rounds", number(stats.rounds)));
  if (several) row.append(cell("all steps", seconds(policy.steps.reduce((sum, step) => sum + step.predicted, 0))));
  return row;
}

function refusedRow(policy, columns, about) {
  return element("tr", { role: "row", class: "refused" }, policyHead(policy.name, about, false),
    element("td", { role: "cell", colspan: columns }, `not possible here: ${policy.refused}`));
}

function drawCaps(host, rows) {
  host.hidden = !rows.length;
  if (!rows.length) return;
  const above = 12 + 12 * Math.max(...rows.map((row) => row.marks.length));
  const chart = percentChart(host.clientWidth, 240 + above,
    { top: 1, above, label: "Share of micro-batches covered and of slots left empty, by cap" });
  const slot = chart.plot.width / rows.length, bar = Math.min(34, slot * 0.38);
  const bottom = chart.plot.top + chart.plot.height;
  rows.forEach((row, i) => {
    const middle = chart.plot.left + slot * (i + 0.5);
    svgBar(chart, "one", middle - bar, bar, row.covered, `cap ${row.cap}: ${percent(row.covered)} covered`);
    svgBar(chart, "two", middle, bar, row.empty_share, `cap ${row.cap}: ${percent(row.empty_share)} of slots empty`);
    chart.node.append(svg("text", { x: middle, y: bottom + 16, "text-anchor": "middle" }, number(row.cap)));
    row.marks.forEach((mark, place) => chart.node.append(svg("text", {
      class: "strong", x: middle, y: chart.plot.top - 6 - 12 * (row.marks.length - 1 - place), "text-anchor": "middle",
    }, mark)));
  });
  host.replaceChildren(seriesLegend("micro-batches covered", "slots left empty"), chart.node);
}

function capsTable(table, rows) {
  const heads = ["Cap", "Mark", "Covered", "Empty slots", "Empty share"];
  table.hidden = !rows.length;
  fillTable(table, heads, rows.map((row) => [
    number(row.cap), row.marks.join(", "), percent(row.covered),
    row.covered ? number(row.empty_slots, 2) : "–", row.covered ? percent(row.empty_share) : "–"]));
}
