"use strict";
/* Words and numbers: how the page writes them. seconds(0.0421) is "42.1 ms", percent(0.953) is "95.3 %". */

const WORDS = {
  lane: "One data- or context-parallel rank, with its own tokens: a GPU, or the GPUs that share it by tensor and pipeline parallelism.",
  sequence: "One training example, measured in tokens.",
  pack: "Sequences joined end to end and processed together, on one lane or split over several.",
  "CP size": "Context parallelism: over how many lanes a pack is split. 1 means it stays on one lane.",
  round: "One micro-batch on every lane. A step has one or more rounds.",
  step: "One update of the model. All sequences of a step count equally, however they are packed.",
  capacity: "The most tokens a lane can hold in one round; memory sets it.",
};

const SYNC = {
  round: "lanes wait for each other after every round",
  step: "lanes meet only where they share a pack, and at the end of the step",
};

const NBSP = "\u00a0";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function number(value, digits = 0) {
  return digits ? value.toLocaleString("en", { maximumFractionDigits: digits }) : WHOLE.format(value);
}

function significant(value, digits = 3) {
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function seconds(value) {
  if (value === null) return "unknown";
  if (value === 0) return "0 s";
  if (value >= 100) return number(value) + NBSP + "s";
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [0, "ns"]];
  const [scale, name] = units.find(([least]) => value >= least);
  return significant(value / (scale || 1e-9)) + NBSP + name;
}

function percent(share) {
  if (share === null) return "unknown";
  const value = Math.abs(share) < 5e-7 ? 0 : share * 100;
  if (value > 0 && value < 0.05) return `<${NBSP}0.1${NBSP}%`;
  if (value < 100 && value >= 99.95) return `>${NBSP}99.9${NBSP}%`;
  return number(value, 1) + NBSP + "%";
}

/* A length for an axis, where k is 1,024: 16384 is "16k". */
function short(length) {
  if (length < 1024) return number(length);
  if (length >= 1024 * 1024) return significant(length / 1024 / 1024) + "M";
  return significant(length / 1024) + "k";
}

function plural(count, word) {
  return number(count) + " " + word + (count === 1 ? "" : "s");
}

/* "lane 3" or "lanes 4–7". */
function laneRange(first, count) {
  return count === 1 ? `lane ${number(first)}` : `lanes ${number(first)}–${number(first + count - 1)}`;
}

/* A round step for an axis: about `count` of them make `range`. nice(0.7, 4) is 0.2. */
function nice(range, count) {
  const rough = range / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((value) => value >= rough * 0.999);
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function byId(id) {
  return document.getElementById(id);
}
