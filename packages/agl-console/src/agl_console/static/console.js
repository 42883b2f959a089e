"use strict";
// Draws figures, reads out tokens, and asks for a page again when the store changed. Tables need none of this.

const drawn = new Map();
const opened = new Set();
const STEPS = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// One list of places for all lines of a figure, each with a value or null at every place.
function aligned(series) {
  const places = [...new Set(series.flatMap((line) => line.places))].sort((a, b) => a - b);
  const index = new Map(places.map((place, at) => [place, at]));
  const spread = (line, values) => {
    const row = new Array(places.length).fill(null);
    line.places.forEach((place, at) => { row[index.get(place)] = values[at]; });
    return row;
  };
  return { places, columns: series.map((line) => ["values", "low", "high"].map((part) => spread(line, line[part]))) };
}

function label(line, series) {
  const isOneRun = series.every((other) => other.run === line.run);
  const name = line.algorithm === "validate" ? "validation" : line.algorithm;
  return isOneRun ? name : `${line.run} · ${name}`;
}

// Every figure of a page draws a line of one name in one colour.
function colours() {
  const names = new Set();
  for (const script of document.querySelectorAll("[data-figure] script")) {
    const { series } = JSON.parse(script.textContent);
    series.forEach((line) => names.add(`${line.run}\n${line.algorithm}`));
  }
  return new Map([...names].map((name, index) => [name, colour(`--s${index % 6}`)]));
}

// Room above and below the values; uPlot draws a constant at the edge of a much larger range.
function range(_plot, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.1;
  return [low - room, high + room];
}

// The numbers beside an axis, with the digits that tell neighbours apart; uPlot writes three decimals at most.
function ticksOf(ticks, apart) {
  const digits = Math.max(0, Math.ceil(-Math.log10(apart) - 1e-9)) + (/^2\.5|^0\.0*25/.test(String(apart)) ? 1 : 0);
  const plain = new Intl.NumberFormat("en", { minimumFractionDigits: 0, maximumFractionDigits: Math.min(digits, 20) });
  return ticks.map((tick) => (tick !== 0 && apart < 1e-5 ? tick.toExponential(2) : plain.format(tick)));
}

// A number in the legend with its interval: of the step below the pointer, else the last one.
function value(plot, number, column, index) {
  const own = (at) => plot.data[column][at];
  const place = index ?? plot?.data[0].findLastIndex((_, at) => own(at) !== null) ?? null;
  const shown = plot ? own(place) : number;
  if (shown === null || shown === undefined) return "–";
  const short = (each) => String(Number(each.toPrecision(4)));
  const [low, high] = plot?.series[column].ends?.map((end) => plot.data[end][place]) ?? [null, null];
  return low === null || high === null ? short(shown) : `${short(shown)} [${short(low)}, ${short(high)}]`;
}

const MARKS = { published: "--quiet", best: "--good", back: "--bad", alert: "--busy", shown: "--accent" };

// A published version is a tick on the axis; other events are dashed lines over the whole height.
function drawMarks(plot, marks) {
  const { ctx, bbox: { left, top, width, height } } = plot;
  ctx.save();
  for (const { place, kind } of marks) {
    const x = plot.valToPos(place, "x", true);
    if (x < left || x > left + width) continue;
    ctx.strokeStyle = colour(MARKS[kind]);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash(kind === "published" ? [] : [5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top + height);
    ctx.lineTo(x, kind === "published" ? top + height - 8 * devicePixelRatio : top);
    ctx.stroke();
  }
  ctx.restore();
}

// A place on the axis as the step of its algorithm; other axes have plain numbers.
function stepAt(stretches, place) {
  const own = stretches.find(({ first, last }) => first <= place && place <= last);
  return own ? `${own.algorithm} ${own.step + place - own.first}` : String(place ?? "–");
}

// Where another algorithm begins: a line, and the algorithm's name if it has room.
function drawStretches(plot, stretches) {
  const { ctx, bbox: { top, height } } = plot;
  ctx.save();
  ctx.fillStyle = ctx.strokeStyle = colour("--quiet");
  [ctx.textAlign, ctx.textBaseline] = ["left", "top"];
  ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  for (const { algorithm, first, last } of stretches.length > 1 ? stretches : []) {
    const [from, to] = [first - 0.5, last + 0.5].map((place) => plot.valToPos(Math.max(place, plot.scales.x.min), "x", true));
    if (to - from < ctx.measureText(algorithm).width + 8) continue;
    ctx.fillText(algorithm, from + 4, top);
    if (first !== stretches[0].first) ctx.fillRect(from, top, devicePixelRatio, height);
  }
  ctx.restore();
}

function sizeOf(place) {
  return { width: place.clientWidth, height: place.closest(".main-chart") ? 320 : 210 };
}

function draw(figure, strokes) {
  const place = figure.querySelector(".plot");
  if (place.closest("details:not([open])")) return;
  const { series, over, marks, stretches } = JSON.parse(figure.querySelector("script").textContent);
  const { places, columns } = aligned(series);
  const options = { ...sizeOf(place), bands: [] };
  options.series = [{ label: over, value: (_, at) => stepAt(stretches, at ?? places.at(-1)) }];
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const named = stretches.length > 1 && { space: 90, values: (_, ticks) => ticks.map((tick) => stepAt(stretches, tick)) };
  options.axes = [{ ...axis, incrs: STEPS, ...named }, { ...axis, size: 60, values: (_, ticks, __, ___, apart) => ticksOf(ticks, apart) }];
  options.scales = { x: { time: false }, y: { range } };
  options.cursor = { drag: { x: true, y: false, dist: 6 }, sync: { key: over } };
  options.hooks = { draw: [(plot) => drawMarks(plot, marks), (plot) => drawStretches(plot, stretches)], setSeries: [(plot, index, { show }) => {
    if (show !== undefined) plot.series[index]?.ends?.forEach((end) => plot.setSeries(end, { show }));
  }] };
  const table = [places];
  series.forEach((line, index) => {
    const stroke = strokes.get(`${line.run}\n${line.algorithm}`);
    const [values, low, high] = columns[index];
    const points = { show: places.length < 60, size: 5, stroke, fill: stroke };
    const style = { spanGaps: true, pxAlign: 0 }; // points on whole pixels would put kinks into straight lines
    const main = { ...style, value, label: label(line, series), stroke, width: 2, points };
    options.series.push(main);
    table.push(values);
    if (low.some((value) => value !== null)) {
      main.ends = [table.length, table.length + 1];
      options.bands.push({ series: [table.length + 1, table.length], fill: `${stroke}2b` });
      for (const end of [low, high]) {
        options.series.push({ ...style, class: "end", label: end === low ? "low" : "high", stroke: "transparent", points: { show: false } });
        table.push(end);
      }
    }
  });
  place.replaceChildren();
  const plot = new uPlot(options, table, place);
  plot.over.addEventListener("click", () => openStep(figure, series, plot));
  drawn.set(figure, plot);
  addDownloads(figure, plot);
}

// The name of every column of a figure, for people and for files.
function heads(plot) {
  let owner = "";
  return plot.series.map((each) => (each.class === "end" ? `${owner} ${each.label}` : (owner = each.label)));
}

function asCsv(plot) {
  const cell = (each) => (each === null || each === undefined ? "" : /[",\n]/.test(each) ? `"${String(each).replaceAll('"', '""')}"` : each);
  const rows = plot.data[0].map((_, at) => plot.data.map((column) => column[at]));
  return [heads(plot), ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function asPng(plot) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [plot.ctx.canvas.width, plot.ctx.canvas.height];
  const context = canvas.getContext("2d");
  context.fillStyle = colour("--back");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(plot.ctx.canvas, 0, 0);
  return new Promise((done) => { canvas.toBlob(done); });
}

function addDownloads(figure, plot) {
  const name = figure.dataset.figure;
  const makers = { CSV: async () => new Blob([asCsv(plot)]), PNG: () => asPng(plot) };
  const list = document.createElement("p");
  list.className = "downloads";
  for (const [kind, make] of Object.entries(makers)) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: kind, title: `Save this chart as ${kind}` });
    button.addEventListener("click", async () => {
      const href = URL.createObjectURL(await make());
      Object.assign(document.createElement("a"), { href, download: `${name}.${kind.toLowerCase()}` }).click();
      setTimeout(() => URL.revokeObjectURL(href), 10_000);
    });
    list.append(button);
  }
  figure.querySelector(".downloads")?.remove();
  figure.append(list);
}

// The rollouts of the step that was clicked, of the line that is nearest, and of silent ones only those that taught
// nothing; a figure of several runs leads nowhere.
function openStep(figure, series, plot) {
  const address = figure.closest("[data-steps]")?.dataset.steps;
  const place = plot.data[0][plot.cursor.idx];
  if (address === undefined || place === undefined) return;
  const height = plot.posToVal(plot.cursor.top, "y");
  const at = (line) => line.places.indexOf(place);
  const distance = (line) => Math.abs(line.values[at(line)] - height);
  const [own] = series.filter((line) => line.places.includes(place)).sort((one, other) => distance(one) - distance(other));
  location.assign(`${address}&step=${own.steps[at(own)]}&algorithm=${encodeURIComponent(own.algorithm)}${/^(groups_silent|silent_share)$/.test(figure.dataset.figure) ? "&taught=nothing" : ""}`);
}

function drawAll() {
  for (const [figure, plot] of drawn) if (!figure.isConnected) { plot.destroy(); drawn.delete(figure); }
  const strokes = colours();
  document.querySelectorAll("[data-card]").forEach((card) => { card.open = opened.has(card.dataset.card); });
  document.querySelectorAll("[data-figure]").forEach((figure) => { drawn.get(figure)?.destroy(); draw(figure, strokes); });
}

// A card draws its chart when it is opened, and stays open when the page is asked for again.
function openCard({ target: card }) {
  if (card.dataset?.card === undefined) return;
  opened[card.open ? "add" : "delete"](card.dataset.card);
  const figure = card.querySelector("[data-figure]");
  drawn.get(figure)?.destroy();
  if (card.open) draw(figure, colours());
}

function fit() {
  for (const [figure, plot] of drawn) if (figure.offsetParent) plot.setSize(sizeOf(figure.querySelector(".plot")));
}

// Pinned runs come first; this browser remembers them.
function pin() {
  const pins = new Set(JSON.parse(localStorage.getItem("agl-pins") ?? "[]"));
  for (const row of [...document.querySelectorAll("[data-run]")].reverse()) {
    const button = row.querySelector(".pin");
    const isPinned = pins.has(row.dataset.run);
    button.hidden = false;
    button.textContent = isPinned ? "★" : "☆";
    button.setAttribute("aria-pressed", isPinned);
    button.onclick = () => {
      pins[isPinned ? "delete" : "add"](row.dataset.run);
      localStorage.setItem("agl-pins", JSON.stringify([...pins]));
      pin();
      button.focus();
    };
    if (isPinned) row.parentElement.prepend(row);
  }
}

function readTokens(cells) {
  const about = cells.parentElement.querySelector("[data-about-token]");
  const all = [...cells.querySelectorAll(".t")];
  let now = -1;
  const show = (index) => {
    if (index < 0 || index >= all.length) return;
    all[now]?.classList.remove("now");
    now = index;
    all[now].classList.add("now");
    about.textContent = all[now].dataset.about;
  };
  cells.addEventListener("pointerover", (event) => show(all.indexOf(event.target)));
  cells.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(all.length - 1, now + step)));
    all[now].scrollIntoView({ block: "nearest" });
  });
}

// The page is asked for again through htmx, which keeps the focus. A hidden page, also one that was opened in the
// background, has no connection, because a browser has few of them for one host; it asks once when it is seen.
function watch() {
  if (!document.querySelector("#live[hx-get]")) return;
  const change = () => document.body.dispatchEvent(new CustomEvent("agl:changed"));
  let feed;
  const open = () => {
    feed = new EventSource("/changes");
    feed.onmessage = change;
  };
  document.addEventListener("visibilitychange", () => {
    feed?.close();
    if (!document.hidden) {
      open();
      change();
    }
  });
  addEventListener("pagehide", () => feed?.close());
  if (!document.hidden) open();
}

drawAll();
pin();
document.addEventListener("toggle", openCard, true);
document.querySelectorAll("[data-cells]").forEach(readTokens);
watch();
addEventListener("resize", fit);
document.addEventListener("htmx:after:swap", () => { drawAll(); pin(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
