// Lines over steps or time: a mean with the band between lowest and highest, gaps where there is nothing to show.
import { count, duration, figure, h, t } from "./core.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const wash = (colour, share) => `color-mix(in srgb, ${colour} ${share}%, transparent)`;
const HEIGHT = 226;
const WHOLE = Array.from({ length: 28 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const SECONDS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// What a server's change does to what was drawn: buckets from `first` on are new.
export function merged(old, change) {
  if (!old || change.first === 0 || change.generation !== old.generation || change.version !== old.version) return change;
  const k = change.first, next = { ...change, first: 0 };
  const join = (a, b) => a.slice(0, k).concat(b);
  for (const name of ["steps", "seconds"]) next[name] = join(old[name], change[name]);
  next.breaks = old.breaks.filter((place) => place < k).concat(change.breaks);
  const from = change.steps[0] ?? Infinity;
  next.not_a_number = old.not_a_number.filter((step) => step < from).concat(change.not_a_number);
  for (const name of QUANTITIES) next[name] = { mean: join(old[name].mean, change[name].mean), low: join(old[name].low, change[name].low), high: join(old[name].high, change[name].high) };
  return next;
}
const QUANTITIES = ["loss", "eval_loss", "learning_rate", "speed", "memory"];

// Columns for uPlot. By time a pause parts the lines; by steps there is none.
function columns(data, names, byTime) {
  const x = [], lines = names.map(() => []);
  const breaks = new Set(byTime ? data.breaks : []);
  for (let k = 0; k < data.steps.length; k++) {
    if (breaks.has(k)) {
      x.push((data.seconds[k - 1] + data.seconds[k]) / 2);
      for (const line of lines) line.push(null);
    }
    x.push(byTime ? data.seconds[k] : data.steps[k]);
    names.forEach(([name, part], n) => lines[n].push(data[name][part][k]));
  }
  if (byTime) for (let k = 1; k < x.length; k++) if (x[k] <= x[k - 1]) x[k] = x[k - 1] + 1e-3;
  return [x, ...lines];
}

// A chart of one quantity or two. `spec`: {title, about, lines: [{name, label, colour, points, band}], format, marks, log, limits}
export function chart(spec) {
  const readouts = spec.lines.map((line) => h("b", {}, "–"));
  const legend = h("div.legend", {}, spec.lines.map((line, n) => {
    const swatch = h(line.points ? "i.dot" : "i");
    swatch.style.setProperty("background", `var(${line.colour})`);
    return h("span", {}, swatch, line.label, readouts[n]);
  }), (spec.extra ?? []).map(([shape, colour, label]) => {
    const swatch = h(`i.${shape}`);
    swatch.style.setProperty("color", `var(${colour})`);
    if (shape === "tri") swatch.style.setProperty("background", `var(${colour})`);
    return h("span", {}, swatch, label);
  }));
  const plot = h("div.plot", { role: "img" });
  const node = h(`section.card.chart${spec.wide ? ".wide" : ""}`, { "aria-label": spec.title },
    h("header", {}, h("h2", {}, spec.title), legend), h("p.about", {}, spec.about), plot);
  let u = null, shown = null, byTime = false, context = {};

  const names = spec.lines.flatMap((line) => line.points ? [[line.name, "mean"]] : [[line.name, "mean"], [line.name, "low"], [line.name, "high"]]);
  const index = [];
  let place = 1;
  for (const line of spec.lines) { index.push(place); place += line.points ? 1 : 3; }

  function make(data) {
    const series = [{}], bands = [];
    for (const line of spec.lines) {
      const colour = css(line.colour), own = { scale: "y" };
      if (line.points) {
        series.push({ ...own, stroke: colour, width: 1.5, spanGaps: true, points: { show: true, size: 9, fill: colour, stroke: css("--card"), width: 1.5 } });
      } else {
        const at = series.length;
        series.push({ ...own, stroke: colour, width: 2, points: { show: false }, fill: spec.filled ? wash(colour, 12) : undefined });
        series.push({ ...own, width: 0, points: { show: false } }, { ...own, width: 0, points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: wash(colour, 20) });
      }
    }
    const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `12px ${css("--font")}`, gap: 7 };
    u = new uPlot({
      width: Math.max(200, plot.clientWidth), height: spec.height ?? HEIGHT, series, bands, legend: { show: false }, padding: [10, 12, 0, 0],
      cursor: { sync: { key: spec.group ?? "run" }, points: { size: 8, show: (self, n) => { const p = h("div"); if (!index.includes(n)) p.style.setProperty("display", "none"); return p; } }, drag: { x: true, y: false }, y: false },
      scales: {
        x: { time: false },
        y: { distr: spec.log ? 3 : 1, range: (self, low, high) => range(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 30, incrs: () => (byTime ? SECONDS : WHOLE), values: (self, ticks) => ticks.map((x) => (byTime ? duration(x) : count(x))), space: 70 },
        { ...axis, ...(spec.incrs ? { incrs: spec.incrs } : {}), size: (self, values) => Math.max(44, 12 + 6.8 * Math.max(...(values ?? ["0"]).map((v) => String(v).length))), values: (self, ticks) => ticks.map((y) => (y === null ? "" : spec.format(y))) },
      ],
      hooks: {
        draw: [(self) => marks(self)], setCursor: [(self) => readout(self.cursor.idx)],
        setSelect: [(self) => {
          if (self.select.width > 4) spec.onzoom?.(self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x"), byTime);
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    }, data, plot);
    u.over.addEventListener("dblclick", () => spec.onzoom?.(null));
  }

  function range(low, high) {
    if (low === null || low === undefined || high === undefined) return [0, 1];
    const limits = spec.limits?.(context, low, high);
    if (limits) return limits;
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.01, 1e-12);
    return spec.zero ? [0, high + room] : [low - room, high + room];
  }

  function marks(self) {
    const { ctx, bbox } = self, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    const tools = {
      ctx, ratio, bbox, css, at: (step) => self.valToPos(stepToX(step), "x", true), level: (y) => self.valToPos(y, "y", true),
      horizontal(y, colour, dash, label, side = "right") {
        const level = self.valToPos(y, "y", true);
        ctx.strokeStyle = css(colour); ctx.lineWidth = 1.5 * ratio; ctx.setLineDash(dash.map((d) => d * ratio));
        ctx.beginPath(); ctx.moveTo(bbox.left, level); ctx.lineTo(bbox.left + bbox.width, level); ctx.stroke(); ctx.setLineDash([]);
        ctx.fillStyle = css(colour); ctx.font = `${12 * ratio}px ${css("--font")}`; ctx.textAlign = side;
        ctx.fillText(label, side === "right" ? bbox.left + bbox.width - 4 * ratio : bbox.left + 6 * ratio, level + (level - bbox.top < 18 * ratio ? 14 : -5) * ratio);
      },
      triangle(step, colour) {
        const x = tools.at(step), y = bbox.top + bbox.height, s = 4.5 * ratio;
        ctx.fillStyle = css(colour); ctx.beginPath(); ctx.moveTo(x, y - 2 * s); ctx.lineTo(x + s, y); ctx.lineTo(x - s, y); ctx.fill();
      },
      dot(step, colour) {
        ctx.fillStyle = css(colour); ctx.beginPath(); ctx.arc(tools.at(step), bbox.top + bbox.height - 4 * ratio, 3.5 * ratio, 0, 7); ctx.fill();
      },
      vertical(step, colour) {
        ctx.strokeStyle = css(colour); ctx.lineWidth = ratio; ctx.setLineDash([2 * ratio, 3 * ratio]);
        ctx.beginPath(); ctx.moveTo(tools.at(step), bbox.top); ctx.lineTo(tools.at(step), bbox.top + bbox.height); ctx.stroke(); ctx.setLineDash([]);
      },
    };
    spec.marks?.(tools, context, shown);
    for (const step of shown?.not_a_number ?? []) if (spec.tells_nan) tools.triangle(step, "--over");
    ctx.restore();
  }

  function stepToX(step) {
    if (!byTime || !shown) return step;
    const steps = shown.steps, k = Math.min(steps.length - 1, Math.max(0, steps.findIndex((s) => s >= step)));
    return shown.seconds[k];
  }

  function readout(k) {
    if (!u) return;
    spec.lines.forEach((line, n) => {
      const values = u.data[index[n]] ?? [];
      let value = k === null || k === undefined ? undefined : values[k];
      if (k === null || k === undefined) for (let last = values.length - 1; last >= 0 && (value === null || value === undefined); last--) value = values[last];
      readouts[n].textContent = value === null || value === undefined ? "–" : (spec.read ?? spec.format)(value);
    });
  }

  const resize = new ResizeObserver(() => u?.setSize({ width: Math.max(200, plot.clientWidth), height: spec.height ?? HEIGHT }));
  resize.observe(plot);
  const recolour = () => { if (u) { u.destroy(); u = null; if (shown) draw(shown, byTime, context); } };
  addEventListener("themechange", recolour);

  function draw(data, time, now = {}) {
    shown = data; byTime = time; context = now;
    const held = columns(data, names, time);
    if (!u) make(held); else u.setData(held);
    readout(null);
    const values = held[1].filter((y) => y !== null);
    plot.setAttribute("aria-label", values.length ? t("chart_said", { title: spec.title, first: spec.format(values[0]), last: spec.format(values.at(-1)), n: values.length }) : t("chart_empty", { title: spec.title }));
  }
  return { node, draw, end() { resize.disconnect(); removeEventListener("themechange", recolour); u?.destroy(); u = null; } };
}

// Several runs in one picture: a line of another colour for each.
export const COLOURS = ["--accent", "--second", "--third", "--violet", "--warn", "--over", "--faint", "--ink"];
export function comparison(place, runs, quantity, byTime, format) {
  const names = Object.keys(runs);
  const tables = names.map((name) => {
    const data = runs[name], x = [], y = [];
    data[quantity].mean.forEach((value, k) => { if (value !== null) { x.push(byTime ? data.seconds[k] : data.steps[k]); y.push(value); } });
    return [x, y];
  }).map(([x, y]) => (x.length ? [x, y] : [[0], [null]]));
  const data = uPlot.join(tables, tables.map((table) => table.slice(1).map(() => 2)));
  const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `12px ${css("--font")}`, gap: 7 };
  place.replaceChildren();
  return new uPlot({
    width: Math.max(200, place.clientWidth), height: 280, legend: { show: false }, padding: [10, 12, 0, 0], cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false } },
    series: [{}, ...names.map((name, n) => ({ label: name, stroke: css(COLOURS[n]), width: 2, spanGaps: true, points: { show: false } }))],
    axes: [{ ...axis, grid: { show: false }, size: 30, incrs: byTime ? SECONDS : WHOLE, values: (u, ticks) => ticks.map((x) => (byTime ? duration(x) : count(x))), space: 70 }, { ...axis, size: 54, values: (u, ticks) => ticks.map(format) }],
  }, data, place);
}
