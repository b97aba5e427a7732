/* A picture of rows × time that zooms and pans: one canvas for the picture, one below it for the overview.

   A model gives `rows`, `total` (ticks), `unit` (seconds a tick), `rowName`, and the functions
     paint(ctx, frame, theme)      draws itself; frame.x(tick) and frame.y(row) are pixels, theme.plain wants no details
     paintHead(ctx, frame, theme)  draws into the margin above
     caption(frame)                a sentence on what the picture shows now, or ""
     pick(row, tick, frame)        what lies there: {title, facts: [[term, text], …], box} or null
     neighbour(box, key)           the neighbour of a box in an arrow key's direction, as pick gives it
   where a box is {row, rows, start, end}. */

const MARGIN = { left: 54, right: 10, top: 20, bottom: 26 };
const OVERVIEW_HEIGHT = 56;
const READABLE_ROW = 18;

/* The visible part, `from` to `to`, of one axis that reaches from 0 to `size`. */
class Span {
  constructor(size, least) {
    this.size = size;
    this.least = Math.min(size, least);
    this.reset();
  }
  reset() {
    this.from = 0;
    this.to = this.size;
  }
  get length() { return this.to - this.from; }
  get whole() { return this.length > this.size * 0.9999; }
  set(from, length) {
    const kept = Math.min(this.size, Math.max(this.least, length));
    this.from = Math.max(0, Math.min(this.size - kept, from));
    this.to = this.from + kept;
  }
  pan(delta) { this.set(this.from + delta, this.length); }
  zoom(factor, at) {
    const length = Math.min(this.size, Math.max(this.least, this.length / factor));
    this.set(at - (at - this.from) * (length / this.length), length);
  }
  show(from, to) {
    if (from < this.from || to > this.to) this.set((from + to - this.length) / 2, this.length);
  }
}

/* Where ticks and rows lie on a canvas. */
class Frame {
  constructor(time, rows, box) {
    Object.assign(this, { time, rows, box });
  }
  x(tick) { return this.box.left + ((tick - this.time.from) / this.time.length) * this.box.width; }
  y(row) { return this.box.top + ((row - this.rows.from) / this.rows.length) * this.box.height; }
  tick(x) { return this.time.from + ((x - this.box.left) / this.box.width) * this.time.length; }
  row(y) { return this.rows.from + ((y - this.box.top) / this.box.height) * this.rows.length; }
  get rowHeight() { return this.box.height / this.rows.length; }
  holds(x, y) {
    const { left, top, width, height } = this.box;
    return x >= left && x < left + width && y >= top && y < top + height;
  }
}

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "muted", "line", "idle", "hatch", "accent", "first", "second"];
  const theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  theme.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return theme;
}

/* Diagonal lines on grey: the look of idle time. */
function hatching(ctx, theme) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = theme.idle;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = theme.hatch;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
  }
  pen.stroke();
  return ctx.createPattern(tile, "repeat");
}

function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}

function hint() {
  return element("p", { class: "hint" },
    element("span", { class: "mouse" }, "Point at a block for its details. Drag to move; click the picture, then use " +
      "the wheel to zoom (Shift: time only, Alt: rows only). Keys: arrows go from block to block, + and − zoom, 0 shows all."),
    element("span", { class: "touch" }, "Tap a block for its details, pinch to zoom, drag to move."));
}

class Chart {
  constructor(host, model, label) {
    Object.assign(this, { host, model });
    this.time = new Span(model.total, model.total / 20000);
    this.rows = new Span(model.rows, 1);
    this.box = null;
    this.build(label);
    this.resize();
    new Gestures(this);
    this.observer = new ResizeObserver(() => requestAnimationFrame(() => this.resize()));
    this.observer.observe(host);
  }

  close() {
    this.observer.disconnect();
    this.host.replaceChildren();
  }

  build(label) {
    this.canvas = element("canvas", {
      class: "main", tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": label,
    });
    this.overview = element("canvas", { class: "overview", "aria-hidden": "true" });
    this.tip = element("div", { class: "tip", role: "status", hidden: "" });
    this.caption = element("p", { class: "hint" });
    const picture = element("div", { class: "timeline" }, this.canvas, this.tip);
    this.host.replaceChildren(this.tools(), picture, this.overview, this.caption, hint());
  }

  tools() {
    const button = (text, label, act) => {
      const node = element("button", { type: "button", "aria-label": label, title: label }, text);
      node.addEventListener("click", () => { act(); this.redraw(); });
      return node;
    };
    const middle = (span) => (span.from + span.to) / 2;
    const pair = (name, span) => element("span", {}, name,
      button("−", `Show more ${name.toLowerCase()}`, () => span.zoom(1 / 1.6, middle(span))),
      button("+", `Show less ${name.toLowerCase()}, larger`, () => span.zoom(1.6, middle(span))));
    return element("div", { class: "tools", role: "group", "aria-label": "Zoom" },
      pair("Time", this.time), pair(this.model.rowName + "s", this.rows),
      button("Show all", "Show the whole step", () => this.reset()));
  }

  resize() {
    const width = this.host.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    const tallest = width < 600 ? 340 : 440;
    const height = MARGIN.top + MARGIN.bottom + Math.max(120, Math.min(tallest, this.model.rows * 44));
    this.ctx = sizeCanvas(this.canvas, width, height);
    this.overviewCtx = sizeCanvas(this.overview, width, OVERVIEW_HEIGHT);
    const plot = width - MARGIN.left - MARGIN.right;
    this.frame = new Frame(this.time, this.rows,
      { left: MARGIN.left, top: MARGIN.top, width: plot, height: height - MARGIN.top - MARGIN.bottom });
    this.small = new Frame(new Span(this.model.total, 0), new Span(this.model.rows, 0),
      { left: MARGIN.left, top: 1, width: plot, height: OVERVIEW_HEIGHT - 2 });
    this.repaint();
  }

  /* Draws at once, the overview too: after a change of size or colours. */
  repaint() {
    this.theme = readTheme();
    this.theme.hatching = hatching(this.ctx, this.theme);
    this.theme.paintedOverview = null;
    this.draw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const { ctx, frame, model, theme } = this;
    ctx.clearRect(0, 0, this.width, this.canvas.height);
    ctx.font = theme.font;
    const { left, top, width, height } = frame.box;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.fillStyle = theme.hatching;
    ctx.fillRect(left, top, width, height);
    model.paint(ctx, frame, theme);
    if (this.box) this.outline(ctx, frame, this.box);
    ctx.restore();
    model.paintHead(ctx, frame, theme);
    paintTimeAxis(ctx, frame, model.unit, theme);
    paintRowAxis(ctx, frame, model.rowName, theme);
    this.drawOverview();
    this.caption.textContent = model.caption(frame);
    this.canvas.style.touchAction = this.time.whole && this.rows.whole ? "pan-y" : "none";
  }

  outline(ctx, frame, box) {
    const x = frame.x(box.start), y = frame.y(box.row);
    const width = Math.max(3, frame.x(box.end) - x), height = Math.max(3, frame.y(box.row + box.rows) - y);
    ctx.lineWidth = 4;
    ctx.strokeStyle = this.theme.paper;
    ctx.strokeRect(x, y, width, height);
    ctx.lineWidth = 2;
    ctx.strokeStyle = this.theme.ink;
    ctx.strokeRect(x, y, width, height);
    ctx.lineWidth = 1;
  }

  drawOverview() {
    const { overviewCtx: ctx, small, theme } = this;
    if (!theme.paintedOverview) theme.paintedOverview = this.paintOverview();
    ctx.clearRect(0, 0, this.width, OVERVIEW_HEIGHT);
    ctx.drawImage(theme.paintedOverview, 0, 0, this.width, OVERVIEW_HEIGHT);
    const x = small.x(this.time.from), y = small.y(this.rows.from);
    ctx.strokeStyle = theme.ink;
    ctx.lineWidth = 2;
    ctx.strokeRect(x, y, Math.max(4, small.x(this.time.to) - x), Math.max(4, small.y(this.rows.to) - y));
  }

  paintOverview() {
    const copy = document.createElement("canvas");
    const ctx = sizeCanvas(copy, this.width, OVERVIEW_HEIGHT);
    const { left, top, width, height } = this.small.box;
    ctx.fillStyle = this.theme.idle;
    ctx.fillRect(left, top, width, height);
    this.model.paint(ctx, this.small, { ...this.theme, plain: true });
    return copy;
  }

  /* Shows what `found` says beside the pixel (x, y), or hides the tip when nothing was found. */
  tell(found, x, y) {
    this.box = found ? found.box : null;
    this.tip.hidden = !found;
    if (found) {
      const facts = found.facts.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
      this.tip.replaceChildren(element("strong", {}, found.title), element("dl", {}, ...facts));
      this.placeTip(x, y);
    }
    this.redraw();
  }

  placeTip(x, y) {
    const gap = 14, width = this.tip.offsetWidth, height = this.tip.offsetHeight;
    const right = x + gap + width <= this.width ? x + gap : Math.max(0, Math.min(x - gap, this.width) - width);
    const above = y - gap - height;
    this.tip.style.left = right + "px";
    this.tip.style.top = (above >= -40 ? above : y + gap) + "px";
  }

  pointAt(x, y) {
    const { frame } = this;
    this.tell(frame.holds(x, y) ? this.model.pick(Math.floor(frame.row(y)), frame.tick(x), frame) : null, x, y);
  }

  /* Moves the outline with an arrow key and brings it into view. */
  walk(key) {
    const found = this.model.neighbour(this.box, key);
    if (!found) return;
    this.time.show(found.box.start, found.box.end);
    this.rows.show(found.box.row, found.box.row + found.box.rows);
    const { frame } = this;
    const x = Math.max(frame.box.left, frame.x((found.box.start + found.box.end) / 2));
    const y = Math.max(frame.box.top, frame.y(found.box.row + found.box.rows / 2));
    this.tell(found, x, y);
  }

  /* Zooms around a pixel. By itself it zooms rows until they can be read and then time; out again, the other way. */
  zoom(factor, x, y, axis = "") {
    const crowded = factor > 1 ? this.frame.rowHeight < READABLE_ROW : this.time.whole;
    if (axis === "rows" || (!axis && crowded)) this.rows.zoom(factor, this.frame.row(y));
    else this.time.zoom(factor, this.frame.tick(x));
    this.redraw();
  }

  pan(dx, dy) {
    this.time.pan((-dx / this.frame.box.width) * this.time.length);
    this.rows.pan((-dy / this.frame.box.height) * this.rows.length);
    this.redraw();
  }

  /* Centres the view on a pixel of the overview. */
  centre(x, y) {
    this.time.set(this.small.tick(x) - this.time.length / 2, this.time.length);
    this.rows.set(this.small.row(y) - this.rows.length / 2, this.rows.length);
    this.redraw();
  }

  reset() {
    this.time.reset();
    this.rows.reset();
    this.redraw();
  }
}

function paintTimeAxis(ctx, frame, unit, theme) {
  const range = frame.time.length * unit;
  const step = nice(range, Math.floor(frame.box.width / (frame.box.width < 500 ? 60 : 90)));
  const bottom = frame.box.top + frame.box.height;
  ctx.fillStyle = theme.muted;
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  const first = Math.max(0, Math.ceil((frame.time.from * unit) / step - 1e-9));
  for (let i = first; i * step <= frame.time.to * unit * (1 + 1e-9); i++) {
    const x = Math.min(frame.x((i * step) / unit), frame.box.left + frame.box.width - 12);
    ctx.fillRect(Math.round(frame.x((i * step) / unit)), bottom, 1, 4);
    ctx.fillText(axisTime(i * step, step, frame.time.to * unit), x, bottom + 7);
  }
}

/* A time with as many digits as its neighbours need to differ. */
function axisTime(value, step, largest) {
  const [scale, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([least]) => largest >= least) ||
    [1e-9, "ns"];
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / scale) + 1e-9)));
  const text = (value / scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${text} ${name}`;
}

function paintRowAxis(ctx, frame, name, theme) {
  const step = Math.max(1, nice(frame.rows.length, frame.box.height / 30));
  ctx.fillStyle = theme.muted;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (let row = Math.ceil(frame.rows.from / step) * step; row < frame.rows.to; row += step) {
    const tall = frame.rowHeight > 10;
    const y = tall ? frame.y(row + 0.5) : frame.y(row) + 1;
    if (y < frame.box.top - 1 || y > frame.box.top + frame.box.height + 1) continue;
    ctx.fillText(number(row), frame.box.left - 8, y);
    ctx.fillRect(frame.box.left - 5, Math.round(y), 4, 1);
  }
  ctx.textAlign = "left";
  ctx.fillText(name, 0, 9);
}
