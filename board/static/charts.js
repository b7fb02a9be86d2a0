// Lines over steps or time: a mean with the band between lowest and highest, gaps where there is nothing to show.
import { count, duration, figure, h, has, t } from "./core.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const wash = (colour, share) => `color-mix(in srgb, ${colour} ${share}%, transparent)`;
const HEIGHT = 226;
const WHOLE = Array.from({ length: 28 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const SECONDS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const FIRST_SHARE = 0.1; // of a line's points: may lie above a chart
const MOST_EPOCHS = 40; // marked in one chart

export const COLOURS = ["--accent", "--second", "--third", "--violet", "--warn", "--over", "--faint", "--ink"];

// What a server's change does to what was drawn: buckets from `first` on are new.
export function merged(old, change) {
  if (!old || change.first === 0 || change.generation !== old.generation || change.version !== old.version) return change;
  const k = change.first, next = { ...change, first: 0, series: {} };
  const join = (a, b) => a.slice(0, k).concat(b);
  for (const name of ["steps", "seconds"]) next[name] = join(old[name], change[name]);
  next.breaks = old.breaks.filter((place) => place < k).concat(change.breaks);
  const from = change.steps[0] ?? Infinity;
  next.not_a_number = old.not_a_number.filter((step) => step < from).concat(change.not_a_number);
  for (const [name, now] of Object.entries(change.series)) {
    const before = old.series[name];
    next.series[name] = { mean: join(before.mean, now.mean), low: join(before.low, now.low), high: join(before.high, now.high) };
  }
  return next;
}

// --- what a chart and a comparison share ---

// The exponential moving average of a line, without the pull of its beginning at zero.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// Numbers of a logarithmic axis: 1, 2 and 5 of each power of ten, or even steps in a narrow range.
function logTicks(low, high) {
  const thinned = (ticks) => ticks.filter((_, k) => k % Math.ceil(ticks.length / 6) === 0);
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
  const within = found.filter((y) => y >= low && y <= high);
  if (within.length > 2) return thinned(within);
  const step = 10 ** Math.floor(Math.log10(high - low)) / 2, first = Math.ceil(low / step);
  return thinned(Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, k) => (first + k) * step));
}

function nearest(values, k) {
  for (let far = 0; far < values.length; far++)
    for (const place of [k - far, k + far])
      if (values[place] !== null && values[place] !== undefined) return place;
  return null;
}

// From the lowest value to the highest that is not one of the first few, far above the others.
function trimmedRange(lines) {
  let low = Infinity, top = -Infinity, highest = -Infinity;
  for (const { mean, lows = mean, highs = mean } of lines) {
    const places = [...mean.keys()].filter((k) => mean[k] !== null && mean[k] !== undefined);
    if (!places.length) continue;
    const few = places.length < 4 ? 0 : Math.ceil(places.length * FIRST_SHARE);
    const least = (some) => Math.min(...some.map((k) => lows[k])), most = (some) => Math.max(...some.map((k) => highs[k]));
    const rest = places.slice(few), all = most(places);
    const limit = 2 * most(rest) - least(rest) || most(rest) + Math.abs(most(rest)) * 0.05;
    low = Math.min(low, least(places));
    let begin = 0;
    while (begin < few && most(places.slice(begin)) > limit) begin += 1;
    top = Math.max(top, most(places.slice(begin)));
    highest = Math.max(highest, all);
  }
  return { low, top, hidden: highest > top ? highest : null };
}

function plot(place, { data, series, bands, pointed, byTime, format, height, range, isLog, incrs, group, onzoom, ondraw, oncursor }) {
  const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `12px ${css("--font")}`, gap: 7 };
  const width = (values) => Math.max(44, 12 + 6.8 * Math.max(...(values ?? ["0"]).map((text) => String(text).length)));
  const tip = h("div.tip", { hidden: true });
  let isOver = false;
  const u = new uPlot({
    width: Math.max(200, place.clientWidth), height, series, bands, legend: { show: false }, padding: [10, 12, 0, 0],
    cursor: { ...(group ? { sync: { key: group } } : {}), points: { size: 8, show: (self, n) => h("div", { style: pointed(n) ? {} : { display: "none" } }) }, drag: { x: true, y: false }, y: false },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: (self, low, high) => range(low, high) } },
    axes: [
      { ...axis, grid: { show: false }, size: 30, incrs: () => (byTime() ? SECONDS : WHOLE), values: (self, ticks) => ticks.map((x) => (byTime() ? duration(x) : count(x))), space: 70 },
      { ...axis, ...(isLog ? { splits: (self, n, low, high) => logTicks(low, high), filter: (self, splits) => splits } : incrs ? { incrs } : {}), size: (self, values) => width(values), values: (self, ticks) => ticks.map((y) => (y === null ? "" : format(y))) },
    ],
    hooks: {
      draw: [(self) => ondraw?.(self)],
      setCursor: [(self) => {
        const lines = oncursor(self.cursor.idx);
        tip.hidden = !isOver || !lines;
        if (tip.hidden) return;
        tip.replaceChildren(...lines);
        const left = self.cursor.left, isRight = left > self.over.clientWidth / 2;
        tip.style.setProperty("left", isRight ? "auto" : `${left + 14}px`);
        tip.style.setProperty("right", isRight ? `${self.over.clientWidth - left + 14}px` : "auto");
      }],
      setSelect: [(self) => {
        if (self.select.width > 4) onzoom?.(self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x"), byTime());
        self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
    },
  }, data, place);
  u.over.append(tip);
  u.over.addEventListener("mouseenter", () => { isOver = true; });
  u.over.addEventListener("mouseleave", () => { isOver = false; tip.hidden = true; });
  u.over.addEventListener("dblclick", () => onzoom?.(null));
  return u;
}

function swatch(shape, colour) {
  const node = h(shape ? `i.${shape}` : "i");
  node.style.setProperty(shape === "dash" ? "color" : "background", `var(${colour})`);
  return node;
}
const tipLine = (shape, colour, label, value) => h("div", {}, swatch(shape, colour), h("span", {}, label), h("b", {}, value));

function drawNote({ ctx, bbox }, text, colour, side) {
  ctx.fillStyle = css(colour);
  ctx.font = `${12 * devicePixelRatio}px ${css("--font")}`;
  ctx.textAlign = side;
  ctx.fillText(text, side === "right" ? bbox.left + bbox.width - 4 * devicePixelRatio : bbox.left + 6 * devicePixelRatio, bbox.top + 13 * devicePixelRatio);
}

// --- files ---

function download(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function downloadPicture(u, title, labels, name) {
  const source = u.ctx.canvas, ratio = devicePixelRatio, head = 62 * ratio, canvas = document.createElement("canvas");
  canvas.width = source.width + 24 * ratio;
  canvas.height = source.height + head + 10 * ratio;
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = css("--card");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = css("--ink");
  ctx.font = `600 ${16 * ratio}px ${css("--font")}`;
  ctx.fillText(title, 16 * ratio, 26 * ratio);
  ctx.font = `${12 * ratio}px ${css("--font")}`;
  let x = 16 * ratio;
  for (const { label, colour } of labels) {
    ctx.fillStyle = css(colour);
    ctx.fillRect(x, 43 * ratio, 14 * ratio, 3 * ratio);
    ctx.fillStyle = css("--soft");
    ctx.fillText(label, x + 20 * ratio, 48 * ratio);
    x += 40 * ratio + ctx.measureText(label).width;
  }
  ctx.drawImage(source, 8 * ratio, head);
  canvas.toBlob((blob) => download(blob, `${name}.png`));
}

function downloadTable(rows, name) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  download(new Blob(["\ufeff", rows.map((row) => row.map(cell).join(",")).join("\r\n")], { type: "text/csv" }), `${name}.csv`);
}

const tool = (label, about, onclick, pressed) =>
  h("button.tool", { type: "button", title: about, "aria-label": about, "aria-pressed": pressed === undefined ? null : String(pressed), onclick }, label);

function drawTools(buttons, log, picture, table) {
  buttons.replaceChildren(
    ...(log ? [tool(t("log_scale"), t("log_scale_about"), log.change, log.isOn)] : []),
    tool("PNG", t("download_png"), picture), tool("CSV", t("download_csv"), table));
}

// --- a chart of one run ---

// Columns for uPlot. By time a pause parts the lines; by steps there is none.
function columns(data, wanted, byTime) {
  const x = [], lines = wanted.map(() => []), places = [];
  const breaks = new Set(byTime ? data.breaks : []);
  for (let k = 0; k < data.steps.length; k++) {
    if (breaks.has(k)) {
      x.push((data.seconds[k - 1] + data.seconds[k]) / 2);
      places.push(k);
      for (const line of lines) line.push(null);
    }
    x.push(byTime ? data.seconds[k] : data.steps[k]);
    places.push(k);
    wanted.forEach((values, n) => lines[n].push(values[k] ?? null));
  }
  if (byTime) for (let k = 1; k < x.length; k++) if (x[k] <= x[k - 1]) x[k] = x[k - 1] + 1e-3;
  return { columns: [x, ...lines], places };
}

// `spec`: {key, title, about, badge, lines: [{name, label, colour, points}], format, read, marks, limits, trims, ...}.
// A line of points has one column; another its smoothed mean, lowest, highest and raw mean.
export function chart(spec) {
  const readouts = spec.lines.map(() => h("b", {}, "–"));
  const legend = h("div.legend", {},
    spec.lines.map((line, n) => h("span", {}, swatch(line.points ? "dot" : "", line.colour), line.label, readouts[n])),
    (spec.extra ?? []).map(([shape, colour, label]) => h("span", {}, swatch(shape, colour), label)));
  const place = h("div.plot", { role: "img" }), buttons = h("div.tools");
  const node = h(`section.card.chart${spec.wide ? ".wide" : ""}`, { "aria-label": spec.title, "data-chart": spec.key },
    h("header", {}, h("h2", {}, spec.title), spec.badge && h("span.badge-note", {}, spec.badge), legend, buttons),
    h("p.about", {}, spec.about), place);
  let u = null, shown = null, byTime = false, context = {}, isLog = false, places = [], hidden = null;
  const index = [];
  spec.lines.reduce((at, line) => { index.push(at); return at + (line.points ? 1 : 4); }, 1);
  const at = (name, part) => shown.series[name]?.[part] ?? [];

  function make(data) {
    const series = [{}], bands = [];
    for (const line of spec.lines) {
      const colour = css(line.colour), own = { scale: "y" };
      if (line.points) {
        series.push({ ...own, stroke: colour, width: 1.5, spanGaps: true, points: { show: true, size: 9, fill: colour, stroke: css("--card"), width: 1.5 } });
        continue;
      }
      const first = series.length;
      series.push({ ...own, stroke: colour, width: 2, points: { show: false }, fill: spec.filled ? wash(colour, 12) : undefined });
      series.push({ ...own, width: 0, points: { show: false } }, { ...own, width: 0, points: { show: false } });
      series.push({ ...own, stroke: wash(colour, 38), width: 1, points: { show: false } });
      bands.push({ series: [first + 2, first + 1], fill: wash(colour, 20) });
    }
    u = plot(place, {
      data, series, bands, pointed: (n) => index.includes(n), byTime: () => byTime, format: spec.format, height: spec.height ?? HEIGHT, range, isLog, incrs: spec.incrs,
      group: "run", onzoom: spec.onzoom, ondraw: marks, oncursor: readout,
    });
    offerFiles();
  }

  function offerFiles() {
    const change = () => { isLog = !isLog; remake(); };
    const name = `${context.run}-${spec.key.replaceAll("/", "-")}`;
    drawTools(buttons, spec.limits || spec.zero ? null : { isOn: isLog, change }, () => downloadPicture(u, `${context.run}: ${spec.title}`, spec.lines, name), () => {
      const parts = spec.lines.flatMap((line) => (line.points ? [[line, "mean"]] : [[line, "mean"], [line, "low"], [line, "high"]]));
      const head = ["step", "seconds", ...parts.map(([line, part]) => (line.points ? line.name : `${line.name}_${part}`))];
      const rows = shown.steps.map((step, k) => [step, shown.seconds[k], ...parts.map(([line, part]) => at(line.name, part)[k])]);
      downloadTable([head, ...rows.filter((row) => row.slice(2).some((value) => value !== null && value !== undefined))], name);
    });
  }

  function range(low, high) {
    hidden = null;
    if (low === null || low === undefined || high === undefined) return [0, 1];
    if (isLog) return low > 0 ? [low / 1.1, high * 1.1] : [Math.max(low, 1e-6), Math.max(high, 1e-5)];
    const limits = spec.limits?.(context, low, high);
    if (limits) return limits;
    if (spec.trims && !context.isZoomed) {
      const lines = spec.lines.map((line) => ({ mean: at(line.name, "mean"), lows: at(line.name, "low"), highs: at(line.name, "high") }));
      const found = trimmedRange(lines);
      if (Number.isFinite(found.low)) ({ low, top: high, hidden } = found);
    }
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.01, 1e-12);
    return spec.zero ? [0, high + room] : [low - room, high + room];
  }

  function marks(self) {
    const { ctx, bbox } = self, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left - 10 * ratio, bbox.top, bbox.width + 20 * ratio, bbox.height); ctx.clip();
    const draw = {
      at: (step) => self.valToPos(stepToX(step), "x", true), level: (y) => self.valToPos(y, "y", true), top: bbox.top,
      note: (text, colour, side) => drawNote(self, text, colour, side),
      horizontal(y, colour, dash, label, side = "right") {
        const level = draw.level(y);
        ctx.strokeStyle = css(colour); ctx.lineWidth = 1.5 * ratio; ctx.setLineDash(dash.map((d) => d * ratio));
        ctx.beginPath(); ctx.moveTo(bbox.left, level); ctx.lineTo(bbox.left + bbox.width, level); ctx.stroke(); ctx.setLineDash([]);
        ctx.fillStyle = css(colour); ctx.font = `${12 * ratio}px ${css("--font")}`; ctx.textAlign = side;
        ctx.fillText(label, side === "right" ? bbox.left + bbox.width - 4 * ratio : bbox.left + 6 * ratio, level + (level - bbox.top < 18 * ratio ? 14 : -5) * ratio);
      },
      triangle(step, colour) {
        const x = draw.at(step), y = bbox.top + bbox.height, s = 4.5 * ratio;
        ctx.fillStyle = css(colour); ctx.beginPath(); ctx.moveTo(x, y - 2 * s); ctx.lineTo(x + s, y); ctx.lineTo(x - s, y); ctx.fill();
      },
      dot(step, colour) {
        ctx.fillStyle = css(colour); ctx.beginPath(); ctx.arc(draw.at(step), bbox.top + bbox.height - 4 * ratio, 3.5 * ratio, 0, 7); ctx.fill();
      },
      ring(step, y, colour) {
        ctx.strokeStyle = css(colour); ctx.lineWidth = 2 * ratio; ctx.beginPath(); ctx.arc(draw.at(step), draw.level(y), 8 * ratio, 0, 7); ctx.stroke();
      },
      vertical(step, colour, dash = [2, 3]) {
        ctx.strokeStyle = css(colour); ctx.lineWidth = ratio; ctx.setLineDash(dash.map((d) => d * ratio));
        ctx.beginPath(); ctx.moveTo(draw.at(step), bbox.top); ctx.lineTo(draw.at(step), bbox.top + bbox.height); ctx.stroke(); ctx.setLineDash([]);
      },
    };
    drawEpochs(draw, ctx, bbox);
    spec.marks?.(draw, context, shown);
    if (hidden !== null) draw.note(`↑ ${t("outliers_above", { value: spec.format(Number(hidden.toPrecision(3))) })}`, "--faint", "right");
    for (const step of shown?.not_a_number ?? []) if (spec.tells_nan) draw.triangle(step, "--over");
    ctx.restore();
  }

  function drawEpochs(draw, ctx, bbox) {
    const each = context.stepsPerEpoch, first = shown.steps[0], last = shown.steps.at(-1);
    if (!each || (last - first) / each > MOST_EPOCHS) return;
    const gap = draw.at(2 * each) - draw.at(each);
    for (let n = Math.ceil((first + 1) / each); n * each <= last; n++) {
      draw.vertical(n * each, "--line", []);
      if (spec.limits || gap < 64 * devicePixelRatio) continue; // where the bottom has marks of its own
      ctx.fillStyle = css("--faint"); ctx.font = `${11 * devicePixelRatio}px ${css("--font")}`; ctx.textAlign = "right";
      ctx.fillText(t("epoch", { n }), draw.at(n * each) - 4 * devicePixelRatio, bbox.top + bbox.height - 6 * devicePixelRatio);
    }
  }

  function stepToX(step) {
    if (!byTime || !shown) return step;
    const k = shown.steps.findIndex((s) => s >= step);
    return shown.seconds[k < 0 ? shown.steps.length - 1 : k];
  }

  // The values under the cursor, in the legend; without one the last. Returns the lines of the label beside the cursor.
  function readout(k) {
    if (!u) return null;
    const isAway = k === null || k === undefined, read = spec.read ?? spec.format, lines = [];
    spec.lines.forEach((line, n) => {
      const values = u.data[index[n]] ?? [], near = isAway ? nearest(values, values.length - 1) : line.points ? nearest(values, k) : k;
      const value = near === null ? null : values[near], text = value === null || value === undefined ? "–" : read(value);
      readouts[n].textContent = text;
      const other = line.points && !isAway && near !== null && places[near] !== places[k];
      lines.push(tipLine(line.points ? "dot" : "", line.colour, line.label, other ? `${text} (${t("at_step_only", { n: count(shown.steps[places[near]]) })})` : text));
    });
    if (isAway) return null;
    const n = shown.steps[places[k]], last = n + shown.width - 1;
    return [h("div.tip-head", {}, shown.width > 1 ? t("at_steps", { n: count(n), last: count(last) }) : t("at_step", { n: count(n) }), h("span", {}, duration(shown.seconds[places[k]]))), ...lines];
  }

  const resize = new ResizeObserver(() => u?.setSize({ width: Math.max(200, place.clientWidth), height: spec.height ?? HEIGHT }));
  resize.observe(place);
  function remake() {
    if (!u) return;
    u.destroy();
    u = null;
    if (shown) draw(shown, byTime, context);
  }
  addEventListener("themechange", remake);

  function draw(data, time, now = {}) {
    shown = data; byTime = time; context = now;
    const weight = spec.smooths ? now.smoothing ?? 0 : 0;
    const wanted = spec.lines.flatMap((line) => {
      const mean = at(line.name, "mean");
      if (line.points) return [mean];
      return [weight ? smoothed(mean, weight) : mean, at(line.name, "low"), at(line.name, "high"), weight ? mean : []];
    });
    const held = columns(data, isLog ? wanted.map((line) => line.map((y) => (y > 0 ? y : null))) : wanted, time);
    places = held.places;
    if (!u) make(held.columns); else u.setData(held.columns);
    readout(null);
    const values = held.columns[1].filter((y) => y !== null);
    place.setAttribute("aria-label", values.length ? t("chart_said", { title: spec.title, first: spec.format(values[0]), last: spec.format(values.at(-1)), n: values.length }) : t("chart_empty", { title: spec.title }));
  }
  return { node, draw, end() { resize.disconnect(); removeEventListener("themechange", remake); u?.destroy(); u = null; } };
}

// --- several runs in one picture: a line of another colour for each ---

// `now`: {byTime, smoothing, isLog, trims, format, title, change}, where `change` is what the button of the log scale does.
export function comparison(place, buttons, runs, quantity, now) {
  const names = Object.keys(runs), { byTime, format } = now;
  const tables = names.map((name) => {
    const data = runs[name], x = [], y = [], mean = data.series[quantity]?.mean ?? [];
    mean.forEach((value, k) => { if (value !== null && (!now.isLog || value > 0)) { x.push(byTime ? data.seconds[k] : data.steps[k]); y.push(value); } });
    return x.length ? [x, now.smoothing ? smoothed(y, now.smoothing) : y] : [[0], [null]];
  });
  const data = uPlot.join(tables, tables.map((table) => table.slice(1).map(() => 2)));
  let hidden = null;
  const range = (low, high) => {
    if (low === null || low === undefined || high === undefined) return [0, 1];
    if (now.isLog) return [low / 1.1, high * 1.1];
    if (now.trims) ({ low, top: high, hidden } = trimmedRange(tables.map(([, mean]) => ({ mean }))));
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.01, 1e-12);
    return [low - room, high + room];
  };
  place.replaceChildren();
  const u = plot(place, {
    data, pointed: () => true, byTime: () => byTime, format, height: 280, range, isLog: now.isLog,
    series: [{}, ...names.map((name, n) => ({ label: name, scale: "y", stroke: css(COLOURS[n]), width: 2, spanGaps: true, points: { show: quantity.startsWith("eval_"), size: 6 } }))],
    ondraw: (self) => { if (hidden !== null) drawNote(self, `↑ ${t("outliers_above", { value: format(Number(hidden.toPrecision(3))) })}`, "--faint", "right"); },
    oncursor: (k) => {
      if (k === null || k === undefined) return null;
      const head = byTime ? duration(data[0][k]) : t("at_step", { n: count(data[0][k]) });
      return [h("div.tip-head", {}, head), ...names.map((name, n) => {
        const near = nearest(data[n + 1], k);
        return tipLine("", COLOURS[n], name, near === null ? "–" : format(data[n + 1][near]));
      })];
    },
  });
  const file = `comparison-${quantity.replaceAll("/", "-")}`;
  drawTools(buttons, { isOn: now.isLog, change: now.change },
    () => downloadPicture(u, now.title, names.map((label, n) => ({ label, colour: COLOURS[n] })), file),
    () => downloadTable([[byTime ? "seconds" : "step", ...names], ...data[0].map((x, k) => [x, ...names.map((_, n) => data[n + 1][k])])], file));
  return u;
}

// --- the metrics of evaluations ---

// Also of one validation set: news/loss.
export const isLoss = (metric) => ["loss", "mse"].includes(metric.split("/").at(-1));
export function metricName(metric) {
  if (has(`metric_${metric}`)) return t(`metric_${metric}`);
  const [set, ...rest] = metric.split("/");
  return rest.length ? t("metric_of", { metric: metricName(rest.join("/")), set }) : metric;
}
// Within a sentence: eval loss, but ROUGE-L.
export const metricInText = (metric) => metricName(metric).replace(/^[A-Z](?=[a-z])/, (letter) => letter.toLowerCase());
const FRACTIONS = ["accuracy", "macro_f1", "matthews", "spearman", "pearson"];
// What is found among texts is a fraction where vectors are compared, and a percentage of answers.
const isFraction = (name, value) => FRACTIONS.includes(name) || (/^(recall|ndcg|mrr)@/.test(name) && value <= 1);
export const scoreText = (metric, value) => figure(value, isLoss(metric) || isFraction(metric.split("/").at(-1), value) ? 3 : 2);

// Series of a run's evaluations by metric: [[metric, [[set, series], ...]], ...]; the set is "" for the validation data as a whole.
export function evaluated(names, settings) {
  const sets = [...String(settings?.validation_file ?? "").matchAll(/(?:^|,)\s*([\w.-]+)=/g)].map((match) => match[1]), found = new Map();
  for (const name of names) {
    if (!name.startsWith("eval_")) continue;
    const full = name.slice(5), set = sets.find((one) => full.startsWith(`${one}/`)) ?? "", metric = set ? full.slice(set.length + 1) : full;
    found.set(metric, [...(found.get(metric) ?? []), [set, name]]);
  }
  return [...found];
}
