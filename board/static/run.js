// Part two: one run, live. Charts, what it says of itself, and what can be asked of it.
import {
  ALIVE, ask, axisButtons, bytes, button, confirmed, copyable, count, deleteRun, duration, figure, go, h, has, icon, link, listen, memoryBar, pill, progressBar, recalled,
  showMissing, smoothingSlider, t, tick, toast, when, work,
} from "./core.js";
import { chart, evaluated, merged, metricInText, metricName, scoreText } from "./charts.js";

const PART_COLOURS = ["--accent", "--third", "--second", "--violet", "--warn", "--faint", "--over", "--soft"];
const SET_COLOURS = ["--second", "--third", "--violet", "--warn", "--over", "--faint"];

export function showRun(place, name) {
  document.title = `${name} · FrugalT5`;
  const path = `/api/runs/${encodeURIComponent(name)}`;
  let facts = null, data = null, zoomed = null, byTime = false, tab = "samples", drawnTab = "", logTimer = null;
  let charts = [], madeOf = "", smoothing = recalled("smoothing", 0);

  const title = h("div.grow"), actions = h("div.row"), stats = h("div.stats"), problems = h("div");
  const nothing = h("div.card.empty", { hidden: true }), tabs = h("section.card.stack", { id: "tabs" });
  const unzoom = button(t("whole_run"), { glyph: "back", onclick: () => { zoomed = null; drawCharts(); } });
  const segments = h("div.segments", { role: "group", "aria-label": t("axis") });
  const smoother = smoothingSlider(smoothing, (weight) => { smoothing = weight; drawCharts(); });
  const toolbar = h("div.row.chart-bar", { hidden: true }, h("h2.grow", {}, t("charts")), unzoom, smoother, segments);
  const grid = h("div.charts", { id: "charts", hidden: true });
  place.append(h("div", {}, link("/", { class: "small soft row back" }, icon("back", 15), t("all_runs"))),
    h("div.head.run-head", {}, title, actions), problems, stats, nothing, toolbar, grid, tabs);

  // --- charts ---

  // The metric that decides first, then losses, other metrics, memory, speed and learning rate.
  function makeCharts() {
    const common = { onzoom: zoom };
    const metrics = evaluated(Object.keys(data.series), facts?.settings).filter(([metric]) => metric !== "loss");
    const deciding = facts?.metric ?? "loss", badge = t("decides"), decides = (names) => names.some(([, name]) => name === `eval_${deciding}`);
    const sets = evaluated(Object.keys(data.series), facts?.settings).find(([metric]) => metric === "loss")?.[1] ?? [];
    const best = (draw, now, shown) => {
      const k = shown.steps.findLastIndex((step) => step <= now.bestStep);
      if (now.bestStep !== null && k >= 0 && shown.steps[k] + shown.width > now.bestStep) draw.ring(shown.steps[k], now.bestScore, "--second");
    };
    const losses = chart({ ...common, key: "loss", title: t("loss"), about: t("loss_about"), badge: decides(sets) ? badge : "", tells_nan: true, smooths: true, trims: true,
      height: 280, wide: true, marks: decides(sets) ? best : null,
      lines: [{ name: "loss", label: t("train_loss"), colour: "--accent" },
        ...sets.map(([, name], n) => ({ name, label: metricName(name.slice(5)), colour: SET_COLOURS[n % SET_COLOURS.length], points: true }))],
      extra: data.not_a_number.length ? [["tri", "--over", t("not_a_number")]] : [], format: tick, read: (y) => figure(y, 4) });
    const scores = metrics.sort((a, b) => decides(b[1]) - decides(a[1]) || (a[0] === "perplexity") - (b[0] === "perplexity")).map(([metric, names], n, all) => chart({
      ...common, key: `eval_${metric}`, title: metricName(metric), about: has(`about_${metric}`) ? t(`about_${metric}`) : t("about_metric"), badge: decides(names) ? badge : "",
      wide: decides(names) || (n === all.length - 1 && (all.length - decides(all[0][1])) % 2 === 1), trims: metric === "perplexity", marks: decides(names) ? best : null,
      lines: names.map(([, name], k) => ({ name, label: metricName(name.slice(5)), colour: SET_COLOURS[k % SET_COLOURS.length], points: true })),
      format: tick, read: (y) => scoreText(metric, y) }));
    const memory = chart({ ...common, key: "memory", title: t("memory_against_budget"), about: t("memory_about"), wide: true, filled: true, height: 250,
      lines: [{ name: "memory", label: t("memory"), colour: "--third" }],
      extra: [["dash", "--over", t("budget")], ["dash", "--faint", t("planned_peak")], ["tri", "--accent", t("cleanup")], ["dot", "--second", t("evaluation")], ["dash", "--second", t("save_or_eval")]],
      incrs: Array.from({ length: 30 }, (_, k) => 2 ** (16 + k)), format: (y) => (y === 0 ? "0" : bytes(y, y >= 2 ** 30 && y % 2 ** 30 ? 1 : 0)), read: (y) => bytes(y),
      limits: (now, low, high) => {
        const top = Math.max(high, now.planned || 0);
        return [0, now.budget && now.budget < 2.5 * top ? now.budget * 1.16 : top * 1.25];
      },
      marks: (draw, now, shown) => {
        shown.series.eval_loss.mean.forEach((loss, k) => { if (loss !== null) draw.dot(shown.steps[k], "--second"); });
        for (const step of now.saves ?? []) draw.vertical(step, "--second");
        for (const [step] of now.cleanups ?? []) draw.triangle(step, "--accent");
        if (now.planned) draw.horizontal(now.planned, "--faint", [2, 4], `${t("planned_peak")} ${bytes(now.planned)}`, "left");
        if (!now.budget) return;
        if (draw.level(now.budget) >= draw.top) draw.horizontal(now.budget, "--over", [7, 5], `${t("budget")} ${bytes(now.budget)}`);
        else draw.note(`↑ ${t("budget_above", { budget: bytes(now.budget) })}`, "--over", "right");
      } });
    const speed = chart({ ...common, key: "speed", title: t("speed"), about: t("speed_about"), zero: true, smooths: true, lines: [{ name: "speed", label: t("tokens_per_second"), colour: "--violet" }],
      format: tick, read: (y) => count(y) });
    const rate = chart({ ...common, key: "learning_rate", title: t("learning_rate"), about: t("learning_rate_about"), zero: true, lines: [{ name: "learning_rate", label: t("learning_rate"), colour: "--second" }],
      format: (y) => (y === 0 ? "0" : y.toPrecision(2)), read: (y) => (y === 0 ? "0" : figure(y, 5)) });
    const first = metrics.length && decides(metrics[0][1]) ? [scores.shift()] : [];
    return [...first, losses, ...scores, memory, speed, rate];
  }

  function drawCharts() {
    const shown = zoomed ?? data;
    const some = !!shown && shown.steps.length > 0;
    toolbar.hidden = grid.hidden = !some;
    unzoom.hidden = !zoomed;
    if (!some) return;
    const made = JSON.stringify([Object.keys(data.series), data.not_a_number.length > 0, facts?.metric, facts?.settings?.validation_file]);
    if (made !== madeOf) {
      madeOf = made;
      charts.forEach((one) => one.end());
      charts = makeCharts();
      grid.replaceChildren(...charts.map((one) => one.node));
    }
    const each = facts?.train_rows / facts?.plan?.effective_batch_size;
    const now = {
      run: name, budget: facts?.budget_bytes, planned: facts?.planned_peak_bytes, cleanups: facts?.cleanups, saves: facts?.saves, isZoomed: !!zoomed, smoothing,
      stepsPerEpoch: each > 1 ? each : 0, bestStep: facts?.best_step ?? null, bestScore: facts?.best_score,
    };
    for (const one of charts) one.draw(shown, byTime, now);
  }

  async function zoom(low, high, time) {
    if (low === null) { zoomed = null; drawCharts(); return; }
    const shown = zoomed ?? data;
    const step = (x) => (time ? shown.steps[Math.max(0, shown.seconds.findIndex((s) => s >= x))] : x);
    const first = Math.max(0, Math.floor(step(low))), last = Math.ceil(step(high));
    const window = await ask(`${path}/window?first=${first}&last=${Math.max(first + 1, last)}`);
    if (window.steps?.length > 1) { zoomed = window; drawCharts(); }
  }

  function drawSegments() {
    segments.replaceChildren(...axisButtons(byTime, (time) => { byTime = time; drawSegments(); drawCharts(); }));
  }

  // --- head ---

  function drawHead() {
    const f = facts, alive = ALIVE.includes(f.state), asked = (word, body = {}, said = `asked_${word}`) => async () => {
      const told = await ask(`${path}/wish`, { word, ...body });
      told.problems ? toast(told.problems.join("\n"), "bad") : toast(t(said));
      if (word === "withdraw" && !told.problems) go("/");
    };
    title.replaceChildren(h("div.row", {}, h("h1", {}, f.name), pill(f.state)),
      h("p", {}, [f.model, f.model && work(f), f.model && (f.data ? f.data.split("/").pop() : t("sample_text")), t(f.state === "waiting" ? "asked_at" : "since", { time: when(f.started) })].filter(Boolean).join(" · ")));
    const some = [];
    if (f.state === "running") some.push(button(t("save_now"), { glyph: "save", id: "save", onclick: asked("save") }), button(t("stop"), { glyph: "stop", id: "stop", onclick: asked("stop") }));
    if (f.state === "starting" && f.hears) some.push(button(t("stop_now"), { glyph: "stop", id: "stop", onclick: asked("stop", {}, "asked_stop_now") }));
    if (f.state === "waiting") some.push(button(t("withdraw"), { glyph: "close", onclick: asked("withdraw") }));
    if (!alive && f.state !== "waiting" && f.has_checkpoint && f.state !== "done") some.push(button(t("resume"), { kind: "primary", glyph: "play", id: "resume", onclick: asked("resume") }));
    if (f.state === "done") some.push(link(`/chat?model=${encodeURIComponent(f.name)}`, { class: "button primary" }, icon("chat"), t("try_it")));
    if (f.state === "done" && f.max_steps) some.push(button(t("train_on"), { glyph: "play", onclick: async () => {
      if (await confirmed(t("train_on"), t("train_on_about", { most: count(2 * f.max_steps) }), t("train_on"), "primary")) asked("resume", { max_steps: 2 * f.max_steps })();
    } }));
    if (!alive && f.state !== "waiting") some.push(button(t("delete"), { glyph: "trash", onclick: async () => { if (await deleteRun(f.name)) go("/"); } }));
    const sameButtons = some.map((node) => node.textContent).join() === [...actions.children].map((node) => node.textContent).join();
    if (!sameButtons) actions.replaceChildren(...some);
    const told = f.state === "failed" ? f.reason || t("failed_about") : f.state === "waiting" ? (f.reason ? t("waits_for", { others: f.reason }) : t("waits")) : f.state === "died" ? t("died_about") : f.state === "paused" ? t("paused_about") : f.state === "stopped" && !f.step && !f.has_checkpoint ? t("stopped_about") : "";
    problems.replaceChildren(told ? h(f.state === "failed" || f.state === "died" ? "div.problems" : "div.note", { role: "status" }, told) : "");
  }

  function drawStats() {
    stats.hidden = facts.state === "waiting" && !facts.step;
    const f = facts, alive = ALIVE.includes(f.state), share = f.max_steps ? Math.min(1, f.step / f.max_steps) : 0;
    const stat = (label, value, under, kind = "") => h(`div.stat${kind}`, {}, h("div.label", {}, label), h("div.value", {}, value), under ? h("div.under", {}, under) : null);
    const first = h("div.stat.progress-stat", {}, h("div.label", {}, t("progress")), h("div.value", {}, f.max_steps ? t("steps_of", { n: count(f.step), most: count(f.max_steps) }) : f.doing?.rows ? t("rows_so_far", { n: count(f.doing.rows) }) : count(f.step)),
      progressBar(share, alive));
    const phase = f.phase && has(`phase_${f.phase}`) ? t(`phase_${f.phase}`) : "";
    stats.replaceChildren(first,
      alive ? stat(t("time_left"), duration(f.seconds_left), phase) : stat(t("took"), duration(f.end?.seconds ?? data?.seconds?.at(-1)), f.ended ? t("ended_at", { time: when(f.ended) }) : ""),
      stat(t("loss_now"), f.loss_is_number ? figure(f.loss) : t("not_a_number")),
      f.best_score === null ? "" : stat(t("best_score", { metric: metricInText(f.metric) }), scoreText(f.metric, f.best_score), t("at_step_small", { n: count(f.best_step) })),
      stat(t("tokens_per_second"), count(f.end?.tokens_per_second ?? f.tokens_per_second), t("tokens_about")),
      h("div.stat", {}, h("div.label", {}, t("peak_memory")), h("div.value", {}, bytes(f.peak_bytes)), h("div.under", {}, t("of_budget", { budget: bytes(f.budget_bytes) })), h("div.progress-gap", { style: { "margin-top": "9px" } }, memoryBar(f.peak_bytes, f.budget_bytes, { planned: f.planned_peak_bytes }))));
  }

  // --- tabs ---

  const TABS = { samples: drawSamples, measured: drawMeasured, log: drawLog, settings: drawSettings };

  function drawTabs() {
    const key = JSON.stringify([tab, tab === "samples" ? [facts.samples, ALIVE.includes(facts.state)] : tab === "measured" ? [facts.plan, facts.phase_peaks, facts.end, facts.peak_bytes, facts.notes] : tab === "settings" ? [facts.settings, facts.command] : 0]);
    if (key === drawnTab) return;
    drawnTab = key;
    clearInterval(logTimer);
    const body = h("div.stack", { role: "tabpanel" });
    tabs.replaceChildren(h("div.tabs", { role: "tablist" }, Object.keys(TABS).map((one) => h("button", { type: "button", role: "tab", "aria-selected": String(one === tab), onclick: () => { tab = one; drawTabs(); } }, t(`tab_${one}`)))), body);
    TABS[tab](body);
  }

  function drawSamples(body) {
    if (!facts.samples.length) { body.append(h("p.soft", {}, t(ALIVE.includes(facts.state) || facts.state === "waiting" ? "no_samples_yet" : "no_samples"))); return; }
    const gaps = facts.samples.some((one) => one.prompt.includes("<extra_id_"));
    body.append(h("p.small.soft", {}, [t("samples_about"), gaps && t("samples_gap")].filter(Boolean).join(" ")));
    const steps = [...new Set(facts.samples.map((one) => one.step))], rows = new Map();
    for (const one of facts.samples) {
      const key = JSON.stringify([one.prompt, one.reference]);
      rows.set(key, { ...(rows.get(key) ?? {}), prompt: one.prompt, reference: one.reference, [`at ${one.step}`]: one.answer });
    }
    const title = (step) => (step === null ? t("at_the_end") : t("at_step", { n: count(step) }));
    const cell = (label, text, kind = "") => h(`td${kind}`, { "data-label": label }, h("div.text", {}, text === "" ? h("span.faint", {}, t("empty_answer")) : text ?? "–"));
    const scroll = h("div.scroll", {}, h("table.samples", {},
      h("thead", {}, h("tr", {}, [t("prompt"), ...steps.map(title)].map((label) => h("th", { scope: "col" }, label)))),
      h("tbody", {}, [...rows.values()].map((row) => h("tr", {}, h("td", { "data-label": t("prompt") }, h("div.text", {}, row.prompt, row.reference && h("div.small.soft", {}, t("reference_said", { text: row.reference })))), steps.map((step) => cell(title(step), row[`at ${step}`], ".answer")))))));
    body.append(scroll);
    scroll.scrollLeft = scroll.scrollWidth; // to the newest
  }

  function drawMeasured(body) {
    const plan = facts.plan ?? {}, measured = facts.peak_bytes;
    if (!plan.peak_bytes) { body.append(h("p.soft", {}, t("no_plan_yet"))); return; }
    const parts = partsOf(facts.planned_parts);
    body.append(h("p.small.soft", {}, t("measured_about")), h("div.stack.tight", {}, h("h3", {}, t("planned_parts", { peak: bytes(plan.peak_bytes) })), partBar(parts, plan.peak_bytes), partList(parts)));
    const trains = ["loss", "decoder backward", "encoder backward", "block update", "last update"].map((phase) => plan.phases?.[phase] ?? 0);
    const planned = { load: plan.phases?.load, evaluation: plan.phases?.evaluation, train: Math.max(...trains) || undefined, save: plan.phases?.save };
    const peaks = facts.end?.phase_peaks ?? facts.phase_peaks;
    const off = measured && plan.peak_bytes ? `${measured >= plan.peak_bytes ? "+" : "−"}${Math.abs(100 * (measured / plan.peak_bytes - 1)).toFixed(0)}%` : "–";
    const rows = [[t("whole_run_peak"), plan.peak_bytes, measured, off], ...["prepare", "load", "train", "evaluation", "save"].filter((phase) => peaks[phase] || planned[phase]).map((phase) => [t(`phase_${phase}`), planned[phase], peaks[phase], ""])];
    body.append(h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, [t("phase"), t("planned"), t("measured"), t("deviation")].map((label, n) => h(n ? "th.num" : "th", { scope: "col" }, label)))),
      h("tbody", {}, rows.map(([label, p, m, d]) => h("tr", {}, h("td", {}, label), h("td.num", {}, bytes(p)), h("td.num", {}, bytes(m)), h("td.num", {}, d)))))));
    if (plan.seconds_total && facts.end?.seconds_since_plan) body.append(h("p.small.soft", {}, t("time_told", { planned: duration(plan.seconds_total), low: duration(plan.seconds_low), high: duration(plan.seconds_high), took: duration(facts.end.seconds_since_plan) })));
    for (const note of facts.notes) body.append(h("div.note.small", {}, `${t("at_step", { n: count(note.step) })}: ${note.text}`));
  }

  function drawLog(body) {
    const box = h("pre.log", { tabindex: "0", "aria-label": t("tab_log") });
    body.append(h("p.small.soft", {}, t("log_about")), box);
    const load = async () => {
      const text = await fetch(`${path}/log`).then((answer) => answer.text()).catch(() => "");
      if (text === box.textContent) return;
      const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 20 || !box.textContent;
      box.textContent = text || t("no_log");
      if (atEnd) box.scrollTop = box.scrollHeight;
    };
    load();
    logTimer = setInterval(load, 3000);
  }

  function drawSettings(body) {
    if (facts.command) body.append(h("p.small.soft", {}, t("command_about")), copyable(facts.command));
    const entries = Object.entries(facts.settings ?? {});
    if (!entries.length) { body.append(h("p.soft", {}, t("no_plan_yet"))); return; }
    const find = h("input.input", { type: "search", placeholder: t("find_setting"), "aria-label": t("find_setting"), oninput: () => fill() }), rows = h("tbody");
    const fill = () => rows.replaceChildren(...entries.filter(([key]) => key.includes(find.value.trim().toLowerCase().replaceAll(" ", "_"))).map(([key, value]) => h("tr", {}, h("td.mono", {}, key), h("td.num.mono", {}, value === null ? t("none") : String(value)))));
    fill();
    body.append(find, h("div.scroll", { style: { "max-height": "420px" } }, h("table", {}, rows)));
  }

  // --- what comes in ---

  function drawNothing() {
    const none = !data || !data.steps.length;
    nothing.hidden = !none || facts.state === "failed";
    if (none) nothing.replaceChildren(icon(facts.state === "waiting" ? "auto" : "runs", 36), h("h2", {}, t(facts.state === "waiting" ? "in_queue" : ALIVE.includes(facts.state) ? "getting_ready" : "no_steps_yet")), facts.state === "waiting" || ALIVE.includes(facts.state) ? h("p", {}, t(facts.state === "waiting" ? "in_queue_about" : "getting_ready_about")) : "");
  }
  const stop = listen(`${path}/stream`, {
    chart: (change) => { data = merged(data, change); if (!zoomed) drawCharts(); if (facts) drawNothing(); },
    facts: (told) => { facts = told; drawHead(); drawStats(); drawTabs(); drawNothing(); if (!zoomed) drawCharts(); },
    gone: () => {
      if (!facts) { showMissing(place, t("run_not_found", { name }), t("run_not_found_about")); return; }
      toast(t(facts.state === "starting" ? "gone_early" : "gone"));
      go("/");
    },
  });
  drawSegments();
  return () => { stop(); clearInterval(logTimer); charts.forEach((one) => one.end()); };
}

// [[part, bytes], ...], the largest first.
export const partsOf = (components) => Object.entries(components).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
export function partBar(parts, top) {
  return h("div.parts", { role: "img", "aria-label": parts.map(([part, size]) => `${partName(part)} ${bytes(size)}`).join(", ") },
    parts.map(([part, size], n) => h("div", { title: `${partName(part)} ${bytes(size)}`, style: { width: `${(100 * size) / top}%`, background: `var(${PART_COLOURS[n % PART_COLOURS.length]})` } })));
}
export function partList(parts, most = 8) {
  const rest = parts.slice(most).reduce((sum, [, size]) => sum + size, 0);
  const shown = rest ? [...parts.slice(0, most), ["other", rest]] : parts;
  return h("div.part-list", {}, shown.map(([part, size], n) => h("div", {}, h("i", { style: { background: `var(${PART_COLOURS[n % PART_COLOURS.length]})` } }), partName(part), h("b", {}, bytes(size)))));
}
const partName = (part) => (has(`part_${part}`) ? t(`part_${part}`) : part);
