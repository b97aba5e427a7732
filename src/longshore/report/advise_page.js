"use strict";
// Draws the advice: bars of memory and speed for each candidate, reasons, recipe and tables.
(() => {
  const data = JSON.parse(document.getElementById("advice-data").textContent);
  const byId = (id) => document.getElementById(id);
  const whole = (number) => Math.round(number).toLocaleString("en-US");

  function element(name, text, className) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function duration(days) {
    if (days >= 1) return `${days.toFixed(1)} days`;
    return days >= 1 / 24 ? `${(days * 24).toFixed(1)} hours` : `${(days * 1440).toFixed(1)} minutes`;
  }

  function nameOf(each) {
    const axes = ["tp", "pp", "vpp", "ep"].filter((key) => each[key] > 1).map((key) => `${key} ${each[key]}`);
    const more = each.recompute ? ["recomputed"] : [];
    if (each.graphs) more.push("graphs");
    return [...axes, each.shard, ...more, `capacity ${whole(each.capacity)}`, `CP ≤ ${each.max_cp}`].join(", ");
  }

  function setting() {
    const rows = [
      ["model", `${data.model}, ${data.layers} layers, ${data.dtype}`],
      ["machine", `${data.gpus} × ${data.machine}, ${data.memory_gib.toFixed(1)} GiB each`],
      ["sequences", `${whole(data.sequences)}, the longest ${whole(data.longest)} tokens`],
      ["a step", `${whole(data.batch)} sequences, about ${whole(data.step_tokens)} tokens`],
      ["compared", `${whole(data.compared)} ways`],
    ];
    for (const [term, text] of rows) {
      const box = element("div");
      box.append(element("dt", term), element("dd", text));
      byId("setting").append(box);
    }
  }

  const candidates = data.candidates;
  const names = Object.keys(data.memory_names);
  const used = names.filter((name) => candidates.some((each) => each.memory[name] > 0));
  const colour = (name) => `var(--part-${names.indexOf(name)})`;

  function legend() {
    for (const name of used) {
      const entry = element("span");
      const box = element("i");
      box.style.background = colour(name);
      entry.append(box, data.memory_names[name]);
      byId("legend").append(entry);
    }
  }

  function memoryBar(each, scale) {
    const bar = element("div", undefined, "bar");
    let left = 0;
    for (const name of used) {
      const size = each.memory[name];
      if (!size) continue;
      const part = element("b");
      part.style.left = `${left * scale}%`;
      part.style.width = `${size * scale}%`;
      part.style.background = colour(name);
      part.title = `${data.memory_names[name]} ${size.toFixed(1)} GiB`;
      bar.append(part);
      left += size;
    }
    const limit = element("span", undefined, "limit");
    limit.style.left = `${data.room_gib * scale}%`;
    limit.title = `${data.room_gib.toFixed(1)} GiB may be used`;
    bar.append(limit, element("span", `${each.memory_gib.toFixed(1)} GiB`, "label"));
    return bar;
  }

  function bars() {
    const root = byId("bars");
    const scale = 90 / Math.max(data.memory_gib, ...candidates.map((each) => each.memory_gib));
    const fastest = Math.max(...candidates.map((each) => each.tokens_per_s));
    root.append(element("div", "candidate", "head"), element("div", "memory", "head"));
    root.append(element("div", "tokens/s", "head"));
    candidates.forEach((each, place) => {
      root.append(element("div", (place ? "" : "→ ") + nameOf(each), place ? "name" : "name best"));
      root.append(memoryBar(each, scale));
      const speed = element("div", undefined, "bar speed");
      const part = element("b");
      part.style.width = `${(100 * each.tokens_per_s) / fastest}%`;
      speed.append(part, element("span", whole(each.tokens_per_s), "label inside"));
      root.append(speed);
    });
  }

  function table(id, header, rows) {
    const root = byId(id);
    const head = element("tr");
    header.forEach((text) => head.append(element("th", text)));
    root.append(head);
    rows.forEach((cells, place) => {
      const row = element("tr", undefined, place || id === "reasons" ? "" : "best");
      cells.forEach((text) => row.append(element("td", text)));
      root.append(row);
    });
  }

  byId("summary").textContent = data.headline;
  byId("recipe").textContent = data.recipe;
  const times = data.basis ? `Times of ${data.basis}` : `Times from what was measured on ${data.machine}`;
  byId("origin").textContent = [
    `${times}; exchanges between GPUs, communicators and CUDA's own memory are assumptions.`,
    "MFU is the share of the vendor's dense peak; what is recomputed does not count.",
    ...data.notes,
  ].join(" ");
  setting();
  legend();
  bars();
  table("reasons", ["key", "value", "why"], data.reasons);
  table(
    "figures-table",
    ["tp", "pp", "vpp", "ep", "lanes", "shard", "sync", "recompute", "capacity", "max CP", "rounds", "step", "tokens/s", "MFU", "of the fastest product", "time"],
    candidates.map((each) => [
      each.tp, each.pp, each.vpp, each.ep, each.lanes, each.shard, each.sync, each.recompute ? "blocks" : "none",
      whole(each.capacity), each.max_cp, each.rounds, `${each.seconds.toPrecision(3)} s`, whole(each.tokens_per_s),
      each.mfu === null ? "–" : `${Math.round(each.mfu * 100)}%`, `${Math.round(each.of_product * 100)}%`, duration(each.days),
    ]),
  );
  table(
    "memory-table",
    [...used.map((name) => data.memory_names[name]), "all, GiB", "with full lanes"],
    candidates.map((each) => [
      ...used.map((name) => each.memory[name].toFixed(1)), each.memory_gib.toFixed(1), each.at_capacity_gib.toFixed(1),
    ]),
  );
})();
