/* Mouse, touch and keys on a Chart. One finger or the mouse drags, two fingers pinch; the wheel zooms when the picture
   has the focus or Ctrl is held, so that scrolling past it still scrolls the page. */

class Gestures {
  constructor(chart) {
    this.chart = chart;
    this.pointers = new Map();
    const { canvas, overview } = chart;
    const on = (target, name, act) => target.addEventListener(name, act.bind(this), { passive: false });
    on(canvas, "pointerdown", this.down);
    on(canvas, "pointermove", this.move);
    on(canvas, "pointerup", this.up);
    on(canvas, "pointercancel", this.cancel);
    on(canvas, "pointerleave", this.leave);
    on(canvas, "wheel", this.wheel);
    on(canvas, "keydown", this.key);
    on(canvas, "blur", () => chart.tell(null));
    on(overview, "pointerdown", this.overviewMove);
    on(overview, "pointermove", this.overviewMove);
  }

  down(event) {
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.chart.canvas.setPointerCapture(event.pointerId);
    this.dragged = this.pointers.size > 1;
  }

  move(event) {
    const { chart, pointers } = this;
    const old = pointers.get(event.pointerId);
    const now = { x: event.offsetX, y: event.offsetY };
    if (!old) {
      chart.pointAt(now.x, now.y);
      return;
    }
    if (pointers.size === 2) this.pinch(event.pointerId, now);
    else if (this.dragged || Math.hypot(now.x - old.x, now.y - old.y) > 4) this.drag(old, now);
    else return;
    pointers.set(event.pointerId, now);
  }

  drag(old, now) {
    this.dragged = true;
    this.chart.canvas.classList.add("dragging");
    this.chart.tell(null);
    this.chart.pan(now.x - old.x, now.y - old.y);
  }

  pinch(id, now) {
    const [other] = [...this.pointers].filter(([key]) => key !== id).map(([, point]) => point);
    const old = this.pointers.get(id);
    const before = Math.hypot(old.x - other.x, old.y - other.y) || 1;
    const after = Math.hypot(now.x - other.x, now.y - other.y) || 1;
    this.chart.zoom(after / before, (now.x + other.x) / 2, (now.y + other.y) / 2);
  }

  up(event) {
    if (!this.dragged) this.chart.pointAt(event.offsetX, event.offsetY);
    this.cancel(event);
  }

  cancel(event) {
    this.pointers.delete(event.pointerId);
    this.chart.canvas.classList.remove("dragging");
  }

  leave(event) {
    if (event.pointerType === "mouse") this.chart.tell(null);
  }

  wheel(event) {
    const { chart } = this;
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== chart.canvas) return;
    event.preventDefault();
    const axis = event.shiftKey ? "time" : event.altKey ? "rows" : "";
    const turn = event.deltaY || event.deltaX;
    const lines = event.deltaMode === 1 ? 30 : 1;
    chart.zoom(Math.exp(-Math.max(-60, Math.min(60, turn * lines)) / 150), event.offsetX, event.offsetY, axis);
    chart.pointAt(event.offsetX, event.offsetY);
  }

  key(event) {
    const { chart } = this;
    const { left, top, width, height } = chart.frame.box;
    const [x, y] = [left + width / 2, top + height / 2];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) chart.walk(event.key);
    else if (event.key === "+" || event.key === "=") chart.zoom(1.6, x, y);
    else if (event.key === "-") chart.zoom(1 / 1.6, x, y);
    else if (event.key === "0" || event.key === "Home") chart.reset();
    else if (event.key === "Escape") chart.tell(null);
    else return;
    event.preventDefault();
  }

  overviewMove(event) {
    if (event.type === "pointerdown") event.target.setPointerCapture(event.pointerId);
    if (event.buttons) this.chart.centre(event.offsetX, event.offsetY);
  }
}
