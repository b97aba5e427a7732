/* The lanes of a step with their packs, as a model for a Chart. */

/* Where each pack's sequences begin in the flat list: counts 2, 1, 3 give 0, 2, 3. */
function packFirsts(counts) {
  let sum = 0;
  return counts.map((count) => (sum += count) - count);
}

const NOWHERE = -1;

class LaneModel {
  constructor(step, { lanes, sizes }) {
    Object.assign(this, { step, sizes, rows: lanes, total: step.total, unit: step.unit, rowName: "Lane" });
    this.colours = sizes.map((_, i) => rampColour(i, sizes.length));
    this.segments = packSegments(step.packs, sizes);
    this.firsts = packFirsts(step.packs.count);
    this.together = [...step.start, ...step.end].every((value) => typeof value === "number");
  }

  caption(frame) {
    if (frame.rowHeight >= 1) return "";
    const lanes = this.groupsFor(frame).lanes;
    return `There are more lanes than pixels, so ${lanes} neighbouring lanes share a line. Colours show their mean time at ` +
      "each CP size. They are paler after the least busy of these lanes has finished, and a grey tail ends where the " +
      "busiest finishes. Zoom in to see single packs.";
  }

  paint(ctx, frame, theme) {
    if (frame.rowHeight < 1) this.paintGroups(ctx, frame, theme);
    else this.paintPacks(ctx, frame, theme);
    this.paintRounds(ctx, frame, theme);
  }

  paintPacks(ctx, frame, theme) {
    if (this.step.overhead) this.paintOverhead(ctx, frame, theme);
    const texts = (segment) => this.packTexts(segment.pack);
    for (const segment of this.segments) paintBlock(ctx, frame, theme, segment, this.colours[segment.size], texts);
  }

  /* What may stand on a pack, the longest first. */
  packTexts(pack) {
    const { cp, count } = this.step.packs;
    return [`CP ${cp[pack]} · ${plural(count[pack], "sequence")}`, `CP ${cp[pack]}`, String(cp[pack])];
  }

  /* A round's own cost, on the lanes that take part in it. */
  paintOverhead(ctx, frame, theme) {
    ctx.fillStyle = theme.muted;
    const width = frame.x(this.step.overhead) - frame.x(0);
    this.step.busy.forEach((busy, round) => {
      const starts = busy.map((ticks, lane) => (ticks ? laneValue(this.step.start[round], lane) : NOWHERE));
      for (const [row, rows, start] of startRuns(starts, 0, this.rows)) {
        if (start !== NOWHERE) ctx.fillRect(frame.x(start), frame.y(row), width, rows * frame.rowHeight);
      }
    });
  }

  roundRuns() {
    return this.step.start.flatMap((start) => startRuns(start, 0, this.rows));
  }

  /* A line where each round starts. */
  paintRounds(ctx, frame, theme) {
    if (frame.rowHeight >= 1 || this.together) {
      ctx.fillStyle = theme.ink;
      for (const [row, rows, start] of this.roundRuns()) {
        if (start > 0) ctx.fillRect(Math.round(frame.x(start)) - 0.5, frame.y(row), 1, rows * frame.rowHeight);
      }
    }
  }

  /* The rounds' numbers, where all lanes start and end them together. */
  paintHead(ctx, frame, theme) {
    ctx.fillStyle = theme.muted;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    if (!this.together) return;
    this.step.start.forEach((start, round) => {
      const x = Math.max(frame.x(start), frame.box.left);
      const room = Math.min(frame.x(this.step.end[round]), frame.box.left + frame.box.width) - x;
      const texts = [`round ${round}`, String(round)];
      const text = texts.find((candidate) => ctx.measureText(candidate).width <= room - 6);
      if (text) ctx.fillText(text, x + 2, 9);
    });
  }

  /* Rows thinner than a pixel are drawn in groups of neighbouring lanes: the mean time at each CP size, and a paler
     zone from the end of the group's least busy lane to the end of its busiest. */
  paintGroups(ctx, frame, theme) {
    const groups = this.groupsFor(frame);
    const first = Math.floor(frame.rows.from / groups.lanes);
    const last = Math.min(groups.rows.length, Math.ceil(frame.rows.to / groups.lanes));
    for (let i = first; i < last; i++) {
      const y = frame.y(i * groups.lanes), height = frame.y((i + 1) * groups.lanes) - y + 0.3;
      for (const part of groups.rows[i]) this.paintGroup(ctx, frame, theme, part, y, height);
    }
  }

  paintGroup(ctx, frame, theme, part, y, height) {
    let at = part.start + part.overhead;
    if (part.overhead) this.bar(ctx, frame, theme.muted, part.start, at, y, height);
    for (let size = this.sizes.length - 1; size >= 0; size--) {
      if (!part.sizes[size]) continue;
      this.bar(ctx, frame, this.colours[size].fill, at, at + part.sizes[size], y, height);
      at += part.sizes[size];
    }
    if (theme.plain) return;
    ctx.globalAlpha = 0.4;
    this.bar(ctx, frame, theme.paper, part.start + part.min, part.start + part.mean, y, height);
    this.bar(ctx, frame, theme.hatch, part.start + part.mean, part.start + part.max, y, height);
    ctx.globalAlpha = 1;
  }

  bar(ctx, frame, fill, from, to, y, height) {
    const x = frame.x(from), end = frame.x(to);
    if (end <= frame.box.left || x >= frame.box.left + frame.box.width || end <= x) return;
    ctx.fillStyle = fill;
    ctx.fillRect(x, y, end - x, height);
  }

  /* Lanes are grouped so that a group is about two pixels tall; groups are kept until their size changes. */
  groupsFor(frame) {
    const lanes = Math.max(1, Math.ceil(2 / frame.rowHeight));
    this.grouped = this.grouped || new Map();
    if (!this.grouped.has(lanes)) {
      if (this.grouped.size > 8) this.grouped.clear();
      this.grouped.set(lanes, { lanes, rows: this.groupLanes(lanes) });
    }
    return this.grouped.get(lanes);
  }

  groupLanes(lanes) {
    const rows = [];
    for (let first = 0; first < this.rows; first += lanes) {
      rows.push(this.step.busy.map((_, round) => this.groupPart(first, Math.min(this.rows, first + lanes), round)));
    }
    for (const segment of this.segments) {
      const end = segment.row + segment.rows;
      for (let i = Math.floor(segment.row / lanes); i * lanes < end; i++) {
        const size = Math.min(this.rows, (i + 1) * lanes) - i * lanes;
        const shared = Math.min(end, i * lanes + size) - Math.max(segment.row, i * lanes);
        rows[i][segment.round].sizes[segment.size] += ((segment.end - segment.start) * shared) / size;
      }
    }
    return rows;
  }

  groupPart(first, last, round) {
    const busy = this.step.busy[round].slice(first, last);
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const start = this.step.start[round];
    return {
      start: typeof start === "number" ? start : mean(start.slice(first, last)),
      min: Math.min(...busy), max: Math.max(...busy), mean: mean(busy),
      overhead: mean(busy.map((ticks) => (ticks ? this.step.overhead : 0))), sizes: this.sizes.map(() => 0),
    };
  }

  pick(row, tick, frame) {
    if (row < 0 || row >= this.rows) return null;
    if (frame.rowHeight < 1) return this.describeGroup(row, tick, frame);
    const hit = this.segments.find((s) => onRow(s, row) && s.start <= tick && tick < s.end);
    return hit ? this.describePack(hit) : this.describeIdle(row, tick);
  }

  neighbour(box, key) {
    const found = nearest(this.segments, box, key);
    return found && this.describePack(found);
  }

  describePack(segment) {
    const { pack } = segment;
    const { lane, cp, tokens, cost, round } = this.step.packs;
    return {
      title: `CP size ${cp[pack]} on ${laneRange(lane[pack], cp[pack])}`,
      facts: [
        ["Round", number(round[pack])],
        ["Sequences", this.describeSequences(pack)],
        ["Tokens", `${number(tokens[pack])} on each lane`],
        ["Cost", `${seconds(cost[pack] * this.unit)} on each lane`],
      ],
      box: segment,
    };
  }

  describeSequences(pack) {
    const { count, sequences } = this.step.packs;
    const first = this.firsts[pack];
    const shown = sequences.slice(first, first + Math.min(4, count[pack]));
    const names = shown.map((i) => `#${i} (${number(this.step.lengths[i])} tokens)`).join(", ");
    const rest = count[pack] - shown.length;
    return `${number(count[pack])}: ${names}${rest ? ` and ${number(rest)} more` : ""}`;
  }

  roundAt(lane, tick) {
    let round = 0;
    this.step.start.forEach((start, i) => { if (laneValue(start, lane) <= tick) round = i; });
    return round;
  }

  describeIdle(lane, tick) {
    const { start, busy, total, overhead } = this.step;
    const round = this.roundAt(lane, tick);
    const began = laneValue(start[round], lane), free = began + busy[round][lane];
    if (busy[round][lane] && tick < began + overhead) return this.describeOverhead(lane, round, began);
    const next = round + 1 < start.length ? laneValue(start[round + 1], lane) : total;
    const share = (next - free) / Math.max(1, next - began);
    return {
      title: `Idle: lane ${number(lane)}, round ${round}`,
      facts: [["Waits", seconds((next - free) * this.unit)], ["Share", `${percent(share)} of its round`]],
      box: { row: lane, rows: 1, start: free, end: next },
    };
  }

  describeOverhead(lane, round, began) {
    const { overhead } = this.step;
    return {
      title: `Round ${round}'s own cost, lane ${number(lane)}`,
      facts: [["Cost", `${seconds(overhead * this.unit)} on each lane that takes part`]],
      box: { row: lane, rows: 1, start: began, end: began + overhead },
    };
  }

  describeGroup(row, tick, frame) {
    const { lanes, rows } = this.groupsFor(frame);
    const i = Math.floor(row / lanes), first = i * lanes, count = Math.min(lanes, this.rows - first);
    const round = this.roundAt(first, tick), part = rows[i][round];
    const end = laneValue(this.step.end[round], first);
    const share = (value) => percent(Math.max(0, 1 - value / Math.max(1, end - part.start)));
    return {
      title: `${laneRange(first, count).replace("lane", "Lane")}, round ${round}`,
      facts: [
        ["Idle", count > 1 ? `${share(part.mean)} on average, from ${share(part.max)} to ${share(part.min)}` : share(part.mean)],
        ["Packs", "zoom in to see them"],
      ],
      box: { row: first, rows: count, start: part.start, end },
    };
  }
}
