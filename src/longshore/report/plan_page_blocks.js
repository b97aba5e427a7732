/* Blocks on rows × time: their colours, how they are drawn, and the way from one to the next.

   A segment is a block {row, rows, start, end, …}: one pack on a run of neighbouring lanes that begin it together (almost
   every pack is one segment), or one piece of work of a pipeline rank. */

/* Light to dark, yellow to violet: in order also for people who see fewer colours. */
const RAMP = ["#ecdc7d", "#9fd385", "#50c29a", "#00a9ab", "#008cb4", "#1f6bc0", "#4d4fae", "#5f3a8a"];

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

/* The colour of place `i` among `count`, with the colour of text on it. */
function rampColour(i, count) {
  const at = count === 1 ? 3 : (i / (count - 1)) * (RAMP.length - 1);
  const low = Math.min(RAMP.length - 2, Math.floor(at));
  const [a, b] = [rgb(RAMP[low]), rgb(RAMP[low + 1])];
  const mixed = a.map((value, c) => Math.round(value + (b[c] - value) * (at - low)));
  const light = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2];
  return { fill: `rgb(${mixed.join(",")})`, text: light > 118 ? "#101418" : "#ffffff" };
}

/* The lane's own entry where lanes differ, else the common one. */
function laneValue(value, lane) {
  return typeof value === "number" ? value : value[lane];
}

/* Packs as segments: [{pack, round, row, rows, start, end, size}, …]. */
function packSegments(packs, sizes) {
  const segments = [];
  packs.lane.forEach((lane, pack) => {
    const shared = { pack, round: packs.round[pack], size: sizes.indexOf(packs.cp[pack]) };
    for (const [row, rows, start] of startRuns(packs.start[pack], lane, packs.cp[pack])) {
      segments.push({ ...shared, row, rows, start, end: start + packs.cost[pack] });
    }
  });
  return segments;
}

/* Runs of lanes with one start: [[first lane, lanes, start], …]. */
function startRuns(start, lane, lanes) {
  if (typeof start === "number") return [[lane, lanes, start]];
  const runs = [];
  start.forEach((value, i) => {
    const last = runs[runs.length - 1];
    if (last && last[2] === value) last[1] += 1;
    else runs.push([lane + i, 1, value]);
  });
  return runs;
}

/* The nearest segment from `box` in the direction of an arrow key; the very first without a box. */
function nearest(segments, box, key) {
  const score = {
    ArrowRight: (s) => (onRow(s, box.row) && s.start >= box.end - 1 && s !== box ? s.start : NaN),
    ArrowLeft: (s) => (onRow(s, box.row) && s.end <= box.start + 1 && s !== box ? -s.start : NaN),
    ArrowDown: (s) => (onRow(s, box.row + box.rows) ? Math.abs(s.start - box.start) : NaN),
    ArrowUp: (s) => (onRow(s, box.row - 1) ? Math.abs(s.start - box.start) : NaN),
  }[key];
  return least(segments, box ? score : (s) => s.start * 1e6 + s.row);
}

function onRow(segment, row) {
  return segment.row <= row && row < segment.row + segment.rows;
}

function least(items, score) {
  let best = null, lowest = Infinity;
  for (const item of items) {
    const value = score(item);
    if (value < lowest) [best, lowest] = [item, value];
  }
  return best;
}

/* Draws a visible segment, with the first of `texts(segment)` that fits. */
function paintBlock(ctx, frame, theme, segment, colour, texts) {
  if (segment.row + segment.rows <= frame.rows.from || segment.row >= frame.rows.to) return;
  if (segment.end <= frame.time.from || segment.start >= frame.time.to) return;
  const x = frame.x(segment.start), y = frame.y(segment.row);
  const width = frame.x(segment.end) - x, height = frame.y(segment.row + segment.rows) - y;
  ctx.fillStyle = colour.fill;
  ctx.fillRect(x, y, Math.max(width, 0.5), height);
  if (theme.plain || width < 7 || height < 4) return;
  ctx.strokeStyle = theme.paper;
  ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  if (width > 10 && height > 13) paintText(ctx, frame, [x, y, width, height], colour.text, texts(segment));
}

/* The first of the texts, which get shorter, that fits into the visible part of a block. */
function paintText(ctx, frame, [x, y, width, height], colour, texts) {
  const left = Math.max(x, frame.box.left), right = Math.min(x + width, frame.box.left + frame.box.width);
  const top = Math.max(y, frame.box.top), bottom = Math.min(y + height, frame.box.top + frame.box.height);
  if (bottom - top < 13) return;
  const text = texts.find((candidate) => ctx.measureText(candidate).width <= right - left - 4);
  if (!text) return;
  const pad = Math.min(6, (right - left - ctx.measureText(text).width) / 2);
  ctx.fillStyle = colour;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  ctx.fillText(text, left + pad, (top + bottom) / 2);
}
