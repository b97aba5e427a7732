/* How the page of a run writes numbers, and the names of what it shows. compact(12345) is "12.3k", duration(4000) is
   "1 h 7 min". */

window.addEventListener("error", (event) => complain(event.message));
window.addEventListener("unhandledrejection", (event) => complain(String(event.reason)));

function complain(message) {
  const root = document.documentElement;
  root.dataset.errors = (root.dataset.errors ? root.dataset.errors + "\n" : "") + message;
  byId("trouble").textContent = `Part of this page could not be drawn: ${message}`;
  byId("trouble").hidden = false;
}

const RUN_WORDS = {
  ...WORDS,
  efficiency: "Share of the lanes' time that goes into arithmetic on real tokens, by the cost model's estimate.",
  padding: "Share of all tokens that are padding and train nothing.",
  "cost model": "The estimated time of a pack, by which the planner balances lanes. A common factor does not change plans.",
  bubble: "Share of a step in which a rank of a pipeline works on none of its stages.",
  "data wait": "Time a step waited because its data were not ready.",
};

function compact(value) {
  const size = Math.abs(value);
  const [scale, name] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => size >= least) || [1, ""];
  return significant(value / (name === "k" ? 1000 : scale)) + name;
}

/* Plain where it can be read, with a power of ten where it cannot. */
function figureText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e-", "e−").replace("e+", "e");
  return size >= 1000 ? number(value) : significant(value, 4);
}

function duration(value) {
  if (value < 100) return seconds(value);
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes}${NBSP}min`;
  const hours = Math.floor(minutes / 60);
  return hours < 100 ? `${hours}${NBSP}h ${minutes % 60}${NBSP}min` : `${number(hours)}${NBSP}h`;
}

function gib(value) {
  return significant(value) + NBSP + "GiB";
}

function times(value) {
  return significant(value) + NBSP + "×";
}

/* Each figure: its key, label, text, sentence, and which of several runs is best: 1 the most, -1 the least, 0 none. */
const RUN_FIGURES = [
  ["loss", "Last loss", figureText, "Training loss of the last step that had one.", -1],
  ["recent_loss", "Recent loss", figureText, "Mean training loss of the last tenth of the steps, at most 50.", -1],
  ["eval_loss", "Best evaluation", figureText, "The lowest loss on held-out data.", -1],
  ["steps", "Steps", number, "Updates of the model that were recorded.", 0],
  ["tokens", "Tokens", compact, "Real tokens that were trained on, without padding.", 0],
  ["seconds", "Time", duration, "All steps together.", 0],
  ["tokens_per_s", "Tokens per second", compact, "Over all lanes (median).", 1],
  ["step_s", "Time of a step", seconds, "Median over steps.", 0],
  ["mfu", "MFU", percent, "FLOPs of products per second as a share of the vendor's dense peak; what is recomputed does not count (median).", 1],
  ["tflops", "TFLOP/s", figureText, "Of one rank (median).", 1],
  ["efficiency", "Plan efficiency", percent, "Share of the lanes' time that plans spend on real tokens (mean).", 1],
  ["padding", "Padding", percent, "Share of all tokens that are padding (mean).", -1],
  ["rounds", "Rounds", (value) => number(value, 1), "Micro-batches of each lane in a step (mean).", 0],
  ["data_wait", "Waiting for data", percent, "Share of the time in which a step waited for its data.", -1],
  ["planning", "Planning", seconds, "Time to plan a step (median), mostly during the previous step.", -1],
  ["memory_gib", "Memory", gib, "Peak memory of a rank.", -1],
  ["skipped", "Skipped steps", number, "Steps without a loss token.", 0],
  ["no_loss", "Steps without a loss", number, "Steps whose loss was not a finite number.", 0],
];
const ONLY_IF_ANY = ["skipped", "no_loss"];

/* Those that at least one of the runs has something to say about. */
function shownFigures(runs) {
  return RUN_FIGURES.filter(([key]) => runs.some(({ figures }) => (
    figures[key] !== null && (figures[key] !== 0 || !ONLY_IF_ANY.includes(key)))));
}

/* Keys of the configuration that say in a line what the run was. */
const CHIPS = [
  ["Model", ["model.preset", "model.from_hf"]],
  ["Ranks", ["parallel.ranks"]],
  ["Policy", ["plan.policy"]],
  ["Capacity", ["plan.capacity"]],
  ["Sync", ["plan.sync"]],
  ["Sequences per step", ["data.batch"]],
  ["Tokens per step", ["data.batch_tokens"]],
  ["Learning rate", ["train.lr"]],
  ["Arithmetic", ["train.dtype"]],
];

function chips(config) {
  const said = (key) => key in config && !["", '""', "0", "0.0"].includes(config[key]);
  return CHIPS.map(([name, keys]) => [name, keys.find(said)]).filter(([, key]) => key)
    .map(([name, key]) => [name, config[key]]);
}

/* The page's colours for runs and series; all are defined for light and dark. */
function colour(i) {
  return `var(--c${i % 8})`;
}

function swatch(i) {
  return element("span", { class: "swatch", style: `background: ${colour(i)}` });
}
