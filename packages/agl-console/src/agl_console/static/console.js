"use strict";
// Draws figures, reads out tokens, and asks for a page again when the store changed. Tables need none of this.

const drawn = new Map();
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
  return isOneRun ? line.algorithm : `${line.run} · ${line.algorithm}`;
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
function marks(ticks, apart) {
  const digits = Math.max(0, Math.ceil(-Math.log10(apart) - 1e-9)) + (/^2\.5|^0\.0*25/.test(String(apart)) ? 1 : 0);
  const plain = new Intl.NumberFormat("en", { minimumFractionDigits: 0, maximumFractionDigits: Math.min(digits, 20) });
  return ticks.map((tick) => (tick !== 0 && apart < 1e-5 ? tick.toExponential(2) : plain.format(tick)));
}

// A number below a figure.
function value(_plot, number) {
  return number === null || number === undefined ? "--" : String(Number(number.toPrecision(4)));
}

function draw(figure, strokes) {
  const place = figure.querySelector(".plot");
  const { series, over } = JSON.parse(figure.querySelector("script").textContent);
  const { places, columns } = aligned(series);
  const options = { width: place.clientWidth, height: 210, series: [{ label: over }], bands: [] };
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  options.axes = [{ ...axis, incrs: STEPS }, { ...axis, size: 60, values: (_, ticks, __, ___, apart) => marks(ticks, apart) }];
  options.scales = { x: { time: false }, y: { range } };
  options.cursor = { drag: { x: false, y: false } };
  const table = [places];
  series.forEach((line, index) => {
    const stroke = strokes.get(`${line.run}\n${line.algorithm}`);
    const [values, low, high] = columns[index];
    const points = { show: places.length < 60, size: 5, stroke, fill: stroke };
    const style = { value, spanGaps: true, pxAlign: 0 }; // points on whole pixels would put kinks into straight lines
    options.series.push({ ...style, label: label(line, series), stroke, width: 2, points });
    table.push(values);
    if (low.some((value) => value !== null)) {
      options.bands.push({ series: [table.length + 1, table.length], fill: `${stroke}33` });
      for (const end of [low, high]) {
        options.series.push({ ...style, label: end === low ? "low" : "high", stroke: `${stroke}55`, width: 1, points: { show: false } });
        table.push(end);
      }
    }
  });
  place.replaceChildren();
  const plot = new uPlot(options, table, place);
  plot.over.addEventListener("click", () => openStep(figure, series, plot));
  drawn.set(figure, plot);
}

// The rollouts of the step that was clicked, of the line that is nearest; a figure of several runs leads nowhere.
function openStep(figure, series, plot) {
  const address = figure.closest("[data-steps]")?.dataset.steps;
  const place = plot.data[0][plot.cursor.idx];
  if (address === undefined || place === undefined) return;
  const height = plot.posToVal(plot.cursor.top, "y");
  const at = (line) => line.places.indexOf(place);
  const distance = (line) => Math.abs(line.values[at(line)] - height);
  const [own] = series.filter((line) => line.places.includes(place)).sort((one, other) => distance(one) - distance(other));
  location.assign(`${address}&step=${own.steps[at(own)]}&algorithm=${encodeURIComponent(own.algorithm)}`);
}

function drawAll() {
  for (const [figure, plot] of drawn) if (!figure.isConnected) { plot.destroy(); drawn.delete(figure); }
  const strokes = colours();
  document.querySelectorAll("[data-figure]").forEach((figure) => { drawn.get(figure)?.destroy(); draw(figure, strokes); });
}

function fit() {
  for (const [figure, plot] of drawn) plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: 210 });
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
document.querySelectorAll("[data-cells]").forEach(readTokens);
watch();
addEventListener("resize", fit);
document.addEventListener("htmx:after:swap", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
