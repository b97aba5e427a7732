/* A frame with two axes in SVG, made for the width it finds: lines, bands and dots go into it.

   A line is {name, colour, dash, x, y} with low and high where a point stands for several steps; null in y is a gap. */

const PLOT = { left: 58, right: 12, top: 8, bottom: 24 };
const DASHES = ["", "6 4", "2 3", "8 3 2 3"];

/* An axis from low to high over pixels: at(value), value(pixel) and ticks. */
class Axis {
  constructor([low, high], [from, to], { log = false, count = 4, whole = false } = {}) {
    Object.assign(this, { low, high, from, to, log });
    this.of = log ? Math.log : (value) => value;
    this.ticks = axisTicks(low, high, log, count).filter((value) => !whole || Number.isInteger(value));
  }
  at(value) {
    return this.from + ((this.of(value) - this.of(this.low)) / (this.of(this.high) - this.of(this.low))) * (this.to - this.from);
  }
  value(pixel) {
    const share = (pixel - this.from) / (this.to - this.from);
    const value = this.of(this.low) + share * (this.of(this.high) - this.of(this.low));
    return this.log ? Math.exp(value) : value;
  }
}

function axisTicks(low, high, log, count) {
  if (log && high / low >= 8) {
    const decades = Math.log10(high / low);
    const marks = decades > 4 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil(decades / 6));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % every === 0) found.push(...marks.map((mark) => mark * 10 ** power));
    }
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }
  const step = nice(high - low, count), found = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) found.push(i * step || 0);
  return found;
}

/* A range with a little air around the values; from 0 where they are not far from it, never above `most`. */
function spanOf(values, log, most = Infinity) {
  const [low, high] = airySpan(values, log);
  return [low, low < most ? Math.min(high, most) : high];
}

function airySpan(values, log) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 2), Math.max(0, low * 2)];
  const air = (high - low) * 0.06;
  return [low >= 0 && low < (high - low) * 0.6 ? 0 : low - air, high + air];
}

/* Axis texts with as many digits as neighbours need to differ. */
function tickText(format, ticks) {
  const texts = ticks.map(format);
  return new Set(texts).size === texts.length ? texts : ticks.map((value) => significant(value, 6));
}

class Plot {
  /* `formats` are [x, y]; `ranges` are [[low, high], [low, high]]; `logs` are [x, y]; `whole`: x counts things. */
  constructor(host, { height, label, formats, ranges, logs = [false, false], whole = false }) {
    this.host = host;
    const width = Math.max(200, host.clientWidth);
    Object.assign(this, { width, height, formats, right: width - PLOT.right, bottom: height - PLOT.bottom });
    this.node = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    this.x = new Axis(ranges[0], [PLOT.left, this.right], { log: logs[0], count: Math.max(2, Math.floor(width / 90)), whole });
    this.y = new Axis(ranges[1], [this.bottom, PLOT.top], { log: logs[1], count: Math.max(4, Math.floor(height / 38)) });
    this.grid();
  }

  add(tag, attributes, ...children) {
    const node = svg(tag, attributes, ...children);
    this.node.append(node);
    return node;
  }

  grid() {
    const { x, y, bottom, right } = this;
    const names = tickText(this.formats[1], y.ticks);
    y.ticks.forEach((value, i) => {
      const at = Math.round(y.at(value)) + 0.5;
      this.add("line", { class: "grid", x1: PLOT.left, x2: right, y1: at, y2: at });
      this.add("text", { x: PLOT.left - 6, y: at + 4, "text-anchor": "end" }, names[i]);
    });
    let last = -Infinity;
    const places = tickText(this.formats[0], x.ticks);
    x.ticks.forEach((value, i) => {
      const at = Math.round(x.at(value)) + 0.5;
      this.add("line", { class: "grid", x1: at, x2: at, y1: bottom, y2: bottom + 4 });
      const half = places[i].length * 3.4;
      if (at - half < last + 8) return;
      last = Math.min(at, this.right - half) + half;
      this.add("text", { x: Math.min(at, this.right - half + PLOT.right), y: bottom + 18, "text-anchor": "middle" }, places[i]);
    });
  }

  line(line, { opacity = 1, width = 1.8, y = line.y } = {}) {
    this.add("path", {
      d: pathOf(line.x, y, this), style: `stroke: ${line.colour}`, "stroke-width": width, "stroke-opacity": opacity,
      "stroke-dasharray": line.dash || "none", class: "curve",
    });
  }

  band(line) {
    this.add("path", { d: bandOf(line, this), style: `fill: ${line.colour}; stroke: ${line.colour}`, class: "band" });
  }

  /* Dots of one colour are one path of points without length. */
  dots(line, { width = 5, opacity = 0.6 } = {}) {
    const d = line.x.map((x, i) => (fits(line.y[i], this.y) ? `M${pixel(this.x.at(x))} ${pixel(this.y.at(line.y[i]))}h0` : "")).join("");
    this.add("path", {
      d, style: `stroke: ${line.colour}`, "stroke-width": width, "stroke-linecap": "round", "stroke-opacity": opacity, class: "dots",
    });
  }

  vertical(at, style) {
    return this.add("line", { class: style, x1: at, x2: at, y1: PLOT.top, y2: this.bottom });
  }
}

function pixel(value) {
  return value.toFixed(1);
}

function fits(value, axis) {
  return value !== null && !(axis.log && value <= 0);
}

function pathOf(xs, ys, plot) {
  let path = "", drawn = false;
  xs.forEach((x, i) => {
    if (!fits(ys[i], plot.y)) {
      drawn = false;
      return;
    }
    const alone = !drawn && !fits(i + 1 < ys.length ? ys[i + 1] : null, plot.y);
    path += `${drawn ? "L" : "M"}${pixel(plot.x.at(x))} ${pixel(plot.y.at(ys[i]))}${alone ? "h1" : ""}`;
    drawn = true;
  });
  return path;
}

function bandOf({ x, low, high }, plot) {
  const known = x.map((_, i) => i).filter((i) => fits(low[i], plot.y) && fits(high[i], plot.y));
  const point = (values) => (i) => `${pixel(plot.x.at(x[i]))} ${pixel(plot.y.at(values[i]))}`;
  if (!known.length) return "";
  return `M${known.map(point(high)).join("L")}L${known.reverse().map(point(low)).join("L")}Z`;
}

/* The mean of about a fortieth of the points around each, the gaps left out. */
function smoothed(values) {
  const half = Math.max(1, Math.round(values.length / 80));
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value || 0));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  return values.map((value, i) => {
    const reach = Math.min(half, i, values.length - 1 - i);
    const count = counts[i + reach + 1] - counts[i - reach];
    return value === null ? null : (sums[i + reach + 1] - sums[i - reach]) / count;
  });
}

/* The place in rising numbers that lies nearest. */
function nearestPlace(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/* A box beside a pixel of the host: a title, and rows of [colour or null, name, text]. */
function placeTip(tip, host, { title, rows, x, y }) {
  const facts = rows.flatMap(([fill, name, text]) => {
    const mark = fill ? [element("span", { class: "swatch", style: `background: ${fill}` })] : [];
    return [element("dt", {}, ...mark, name), element("dd", {}, text)];
  });
  tip.hidden = false;
  tip.replaceChildren(element("strong", {}, title), element("dl", {}, ...facts));
  const width = tip.offsetWidth, room = host.clientWidth;
  const left = x + 14 + width <= room ? x + 14 : Math.max(0, Math.min(x - 14, room) - width);
  tip.style.left = left + "px";
  tip.style.top = Math.max(0, y + 14) + "px";
}

function lineKey(name, stroke, dash) {
  const style = dash ? "dashed" : "solid";
  return element("li", {}, element("span", { class: "key", style: `border-color: ${stroke}; border-top-style: ${style}` }), name);
}
