// Part two: one run, live. Charts, what it says of itself, and what can be asked of it.
import { ask, bytes, button, confirmed, copyable, count, duration, figure, go, h, has, icon, link, listen, memoryBar, pill, t, toast, when, work } from "./core.js";
import { chart, merged } from "./charts.js";

const PART_COLOURS = ["--accent", "--third", "--second", "--violet", "--warn", "--faint", "--over", "--soft"];
const ALIVE = ["running", "starting", "paused"];

export function showRun(place, name) {
  document.title = `${name} · FrugalT5`;
  const path = `/api/runs/${encodeURIComponent(name)}`;
  let facts = null, data = null, zoomed = null, byTime = false, tab = "samples", drawnTab = "", logTimer = null;

  const title = h("div.grow"), actions = h("div.row"), stats = h("div.stats"), problems = h("div");
  const nothing = h("div.card.empty", { hidden: true }), tabs = h("section.card.stack", { id: "tabs" });
  const unzoom = button(t("whole_run"), { glyph: "back", onclick: () => { zoomed = null; drawCharts(); } });
  const segments = h("div.segments", { role: "group", "aria-label": t("axis") });
  const charts = makeCharts((first, last, time) => zoom(first, last, time));
  const toolbar = h("div.row", { hidden: true }, h("h2.grow", {}, t("charts")), unzoom, segments);
  const grid = h("div.charts", { id: "charts", hidden: true }, charts.map((one) => one.node));
  place.append(h("div", {}, link("/", { class: "small soft row back" }, icon("back", 15), t("all_runs"))),
    h("div.head", {}, title, actions), problems, stats, nothing, toolbar, grid, tabs);

  // --- charts ---

  function makeCharts(onzoom) {
    const common = { onzoom, group: "run" };
    return [
      chart({ ...common, title: t("loss"), about: t("loss_about"), tells_nan: true, height: 280, wide: true,
        lines: [{ name: "loss", label: t("train_loss"), colour: "--accent" }, { name: "eval_loss", label: t("eval_loss"), colour: "--second", points: true }],
        extra: [["tri", "--over", t("not_a_number")]], format: (y) => figure(y, 2), read: (y) => figure(y, 4) }),
      chart({ ...common, title: t("memory_against_budget"), about: t("memory_about"), wide: true, filled: true, height: 250,
        lines: [{ name: "memory", label: t("memory"), colour: "--third" }],
        extra: [["dash", "--over", t("budget")], ["dash", "--faint", t("planned_peak")], ["tri", "--accent", t("cleanup")], ["dot", "--second", t("evaluation")], ["dash", "--second", t("save_or_eval")]],
        incrs: Array.from({ length: 30 }, (_, k) => 2 ** (16 + k)), format: (y) => (y === 0 ? "0" : bytes(y, y >= 2 ** 30 && y % 2 ** 30 ? 1 : 0)), read: (y) => bytes(y),
        limits: (now, low, high) => {
          const top = Math.max(high, now.planned || 0);
          return [0, now.budget && now.budget < 2.5 * top ? now.budget * 1.16 : top * 1.25];
        },
        marks: (tools, now, shown) => {
          const top = tools.bbox.top;
          shown?.eval_loss.mean.forEach((loss, k) => { if (loss !== null) tools.dot(shown.steps[k], "--second"); });
          for (const step of now.saves ?? []) tools.vertical(step, "--second");
          for (const [step] of now.cleanups ?? []) tools.triangle(step, "--accent");
          if (now.planned) tools.horizontal(now.planned, "--faint", [2, 4], `${t("planned_peak")} ${bytes(now.planned)}`, "left");
          if (!now.budget) return;
          if (tools.level(now.budget) >= top) tools.horizontal(now.budget, "--over", [7, 5], `${t("budget")} ${bytes(now.budget)}`);
          else {
            const { ctx, ratio, bbox, css } = tools;
            ctx.fillStyle = css("--over"); ctx.font = `${12 * ratio}px ${css("--font")}`; ctx.textAlign = "right";
            ctx.fillText(`↑ ${t("budget_above", { budget: bytes(now.budget) })}`, bbox.left + bbox.width - 4 * ratio, top + 13 * ratio);
          }
        } }),
      chart({ ...common, title: t("speed"), about: t("speed_about"), zero: true, lines: [{ name: "speed", label: t("tokens_per_second"), colour: "--violet" }], format: (y) => (y < 10 ? figure(y, 1) : count(y)), read: (y) => count(y) }),
      chart({ ...common, title: t("learning_rate"), about: t("learning_rate_about"), zero: true, lines: [{ name: "learning_rate", label: t("learning_rate"), colour: "--second" }], format: (y) => (y === 0 ? "0" : y.toPrecision(2)), read: (y) => figure(y, 5) }),
    ];
  }

  function drawCharts() {
    const shown = zoomed ?? data;
    const some = !!shown && shown.steps.length > 0;
    toolbar.hidden = grid.hidden = !some;
    unzoom.hidden = !zoomed;
    if (!some) return;
    const now = { budget: facts?.budget_bytes, planned: facts?.planned_peak_bytes, cleanups: facts?.cleanups, saves: facts?.saves };
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
    segments.replaceChildren(...[[false, "by_steps"], [true, "by_time"]].map(([time, key]) => h("button", { type: "button", "aria-pressed": String(time === byTime), onclick: () => { byTime = time; drawSegments(); drawCharts(); } }, t(key))));
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
    if (!alive && f.state !== "waiting") some.push(button(t("delete"), { glyph: "trash", onclick: async () => {
      const size = await ask(`${path}/size`);
      if (!(await confirmed(t("delete_title", { name: f.name }), t("delete_about", { size: bytes(size.bytes) }), t("delete")))) return;
      const told = await ask(`${path}/wish`, { word: "delete" });
      told.problems ? toast(told.problems.join("\n"), "bad") : go("/");
    } }));
    const sameButtons = some.map((node) => node.textContent).join() === [...actions.children].map((node) => node.textContent).join();
    if (!sameButtons) actions.replaceChildren(...some);
    const told = f.state === "failed" ? f.reason : f.state === "waiting" ? (f.reason ? t("waits_for", { others: f.reason }) : t("waits")) : f.state === "died" ? t("died_about") : f.state === "paused" ? t("paused_about") : f.state === "stopped" && !f.step && !f.has_checkpoint ? t("stopped_about") : "";
    problems.replaceChildren(told ? h(f.state === "failed" || f.state === "died" ? "div.problems" : "div.note", { role: "status" }, told) : "");
  }

  function drawStats() {
    stats.hidden = facts.state === "waiting" && !facts.step;
    const f = facts, alive = ALIVE.includes(f.state), share = f.max_steps ? Math.min(1, f.step / f.max_steps) : 0;
    const best = f.end?.best_eval_loss ?? f.best_eval?.loss;
    const stat = (label, value, under, kind = "") => h(`div.stat${kind}`, {}, h("div.label", {}, label), h("div.value", {}, value), under ? h("div.under", {}, under) : null);
    const first = h("div.stat.progress-stat", {}, h("div.label", {}, t("progress")), h("div.value", {}, f.max_steps ? t("steps_of", { n: count(f.step), most: count(f.max_steps) }) : f.doing?.rows ? t("rows_so_far", { n: count(f.doing.rows) }) : count(f.step)),
      h(`div.progress${alive ? "" : ".idle"}`, { role: "progressbar", "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": t("progress") }, h("div", { style: { width: `${100 * share}%` } })));
    const phase = f.phase && has(`phase_${f.phase}`) ? t(`phase_${f.phase}`) : "";
    stats.replaceChildren(first,
      alive ? stat(t("time_left"), duration(f.seconds_left), phase) : stat(t("took"), duration(f.end?.seconds ?? data?.seconds?.at(-1)), f.ended ? t("ended_at", { time: when(f.ended) }) : ""),
      stat(t("loss_now"), f.loss_is_number ? figure(f.loss) : "NaN", best === undefined ? "" : t("best_eval", { loss: figure(best) })),
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
    for (const one of facts.samples.slice().reverse()) body.append(h("dl.sample", {}, h("dt", {}, t("prompt")), h("dd", {}, one.prompt), h("dt", {}, t("answer")), h("dd.answer", {}, one.answer || "…"), one.reference && h("dt", {}, t("reference")), one.reference && h("dd.soft", {}, one.reference)));
  }

  function drawMeasured(body) {
    const plan = facts.plan ?? {}, measured = facts.peak_bytes;
    if (!plan.peak_bytes) { body.append(h("p.soft", {}, t("no_plan_yet"))); return; }
    const parts = Object.entries(facts.planned_parts).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
    body.append(h("p.small.soft", {}, t("measured_about")), h("div.stack.tight", {}, h("h3", {}, t("planned_parts", { peak: bytes(plan.peak_bytes) })), partBar(parts, plan.peak_bytes), partList(parts)));
    const trains = ["loss", "decoder backward", "encoder backward", "block update", "last update"].map((phase) => plan.phases?.[phase] ?? 0);
    const planned = { load: plan.phases?.load, evaluation: plan.phases?.evaluation, train: Math.max(...trains) || undefined, save: plan.phases?.save };
    const peaks = facts.end?.phase_peaks ?? facts.phase_peaks;
    const off = measured && plan.peak_bytes ? `${measured >= plan.peak_bytes ? "+" : "−"}${Math.abs(100 * (measured / plan.peak_bytes - 1)).toFixed(0)}%` : "–";
    const rows = [[t("whole_run_peak"), plan.peak_bytes, measured, off], ...["prepare", "load", "train", "evaluation", "save"].filter((phase) => peaks[phase] || planned[phase]).map((phase) => [t(`phase_${phase}`), planned[phase], peaks[phase], ""])];
    body.append(h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, [t("phase"), t("planned"), t("measured"), t("deviation")].map((label, n) => h(n ? "th.num" : "th", { scope: "col" }, label)))),
      h("tbody", {}, rows.map(([label, p, m, d]) => h("tr", {}, h("td", {}, label), h("td.num", {}, bytes(p)), h("td.num", {}, bytes(m)), h("td.num", {}, d)))))));
    if (plan.seconds_total && facts.end?.seconds_since_plan) body.append(h("p.small.soft", {}, t("time_told", { planned: duration(plan.seconds_total), low: duration(plan.seconds_low), high: duration(plan.seconds_high), took: duration(facts.end.seconds_since_plan) })));
    for (const note of facts.notes) body.append(h("div.note.small", {}, `${t("step")} ${count(note.step)}: ${note.text}`));
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
    gone: () => { toast(t(facts?.state === "starting" ? "gone_early" : "gone")); go("/"); },
  });
  drawSegments();
  return () => { stop(); clearInterval(logTimer); charts.forEach((one) => one.end()); };
}

export function partBar(parts, top) {
  return h("div.parts", { role: "img", "aria-label": parts.map(([part, size]) => `${partName(part)} ${bytes(size)}`).join(", ") },
    parts.map(([part, size], n) => h("div", { title: `${partName(part)} ${bytes(size)}`, style: { width: `${(100 * size) / top}%`, background: `var(${PART_COLOURS[n % PART_COLOURS.length]})` } })));
}
export function partList(parts, most = 8) {
  return h("div.part-list", {}, parts.slice(0, most).map(([part, size], n) => h("div", {}, h("i", { style: { background: `var(${PART_COLOURS[n % PART_COLOURS.length]})` } }), partName(part), h("b", {}, bytes(size)))));
}
export const partName = (part) => (has(`part_${part}`) ? t(`part_${part}`) : part);
