/* The ranks of a pipeline with their work, as a model for a Chart. */

const KIND_COLOURS = [
  { fill: "#4a8fd6", text: "#101418" },
  { fill: "#e0a03c", text: "#101418" },
  { fill: "#8a8f98", text: "#101418" },
  { fill: "#5aa874", text: "#101418" },
];

/* Predicted bubbles of the ranks: "Bubble: rank 0 12.0 %, rank 1 14.5 %." */
function bubbleNote(shares) {
  return `Bubble: ${shares.map((share, rank) => `rank ${rank} ${percent(share)}`).join(", ")}.`;
}

class PipelineModel {
  constructor(events) {
    const { kinds, kind, rank, stage, round, start, end } = events;
    Object.assign(this, { kinds, total: events.total, unit: events.unit, rowName: "Rank" });
    this.rows = Math.max(...rank) + 1;
    this.segments = rank.map((row, i) => (
      { row, rows: 1, start: start[i], end: end[i], round: round[i], stage: stage[i], kind: kind[i] }));
    this.colours = kinds.map((_, i) => KIND_COLOURS[i % KIND_COLOURS.length]);
  }

  caption() {
    return "";
  }

  paint(ctx, frame, theme) {
    const texts = (segment) => [String(segment.round)];
    for (const segment of this.segments) paintBlock(ctx, frame, theme, segment, this.colours[segment.kind], texts);
  }

  paintHead() {}

  pick(row, tick) {
    const hit = this.segments.find((s) => s.row === row && s.start <= tick && tick < s.end);
    return hit ? this.describe(hit) : null;
  }

  neighbour(box, key) {
    const found = nearest(this.segments, box, key);
    return found && this.describe(found);
  }

  describe(segment) {
    return {
      title: `${this.kinds[segment.kind]}, rank ${segment.row}`,
      facts: [
        ["Round", number(segment.round)],
        ["Stage", number(segment.stage)],
        ["Starts", seconds(segment.start * this.unit)],
        ["Takes", seconds((segment.end - segment.start) * this.unit)],
      ],
      box: segment,
    };
  }
}
