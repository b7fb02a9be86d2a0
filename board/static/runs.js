// Part one: every run, how it stands, and several in one picture.
import {
  ALIVE, ask, axisButtons, bytes, button, count, deleteRun, duration, figure, go, h, icon, link, listen, memoryBar, pill, progressBar, recalled, smoothingSlider, state, t, toast, when, work,
} from "./core.js";
import { COLOURS, comparison, evaluated, isLoss, metricName, scoreText } from "./charts.js";

const upwards = (a, b) => (a ?? Infinity) - (b ?? Infinity) || 0; // what is not known comes last
const errorOf = (run) => (run.best_score === null || isLoss(run.metric) ? run.best_score : -run.best_score);
const ORDERS = {
  newest: () => 0, // as the server sends them
  name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
  state: (a, b) => a.state.localeCompare(b.state),
  score: (a, b) => a.metric.localeCompare(b.metric) || upwards(errorOf(a), errorOf(b)),
  loss: (a, b) => upwards(a.loss, b.loss),
  memory: (a, b) => upwards(a.peak_bytes, b.peak_bytes),
};

export function showRuns(place) {
  document.title = `${t("runs")} · FrugalT5`;
  const chosen = new Set();
  const list = h("div"), compare = h("div");
  let words = "", order = "newest";
  const find = h("input.input", { type: "search", id: "find", placeholder: t("search_runs"), "aria-label": t("search_runs"), oninput: () => { words = find.value.trim().toLowerCase(); show(); } });
  const sort = h("select.input", { id: "sort", "aria-label": t("sort_by"), onchange: () => { order = sort.value; show(); } },
    Object.keys(ORDERS).map((key) => h("option", { value: key }, t(`sort_${key}`))));
  const controls = h("div.row.list-bar", { hidden: true }, find, h("label.row.tight.small.soft", {}, t("sort_by"), sort));
  place.append(
    h("div.head", {}, h("div.grow", {}, h("h1", {}, t("runs")), h("p", {}, t("runs_about"))),
      link("/new", { class: "button primary" }, icon("plus"), t("new_run"))),
    compare, controls, list);
  let pressed = false;
  list.addEventListener("pointerdown", (event) => { pressed = event.button === 0; });
  const release = () => setTimeout(() => { pressed = false; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, release);
  let runs = null, picture = null, drawn = "", quantity = "loss", byTime = false, isLog = false, smoothing = recalled("smoothing", 0);

  function row(run) {
    const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0, isAlive = ALIVE.includes(run.state);
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": t("compare_this", { name: run.name }), onchange: (event) => {
      event.target.checked ? chosen.add(run.name) : chosen.delete(run.name);
      showComparison();
    } });
    const steps = run.max_steps ? t("steps_of", { n: count(run.step), most: count(run.max_steps) })
      : run.doing?.rows ? t("rows_so_far", { n: count(run.doing.rows) })
      : t(run.state === "starting" ? "preparing" : run.state === "waiting" ? "queued" : "no_steps");
    const reason = run.state === "failed" ? run.reason || t("failed_about") : "";
    return h("div.run-row", { "data-run": run.name, role: "listitem" },
      run.step ? box : h("span"),
      h("div.title", {}, link(`/run/${encodeURIComponent(run.name)}`, { class: "name", title: run.name }, run.name),
        h("div.sub", {}, pill(run.state), run.model && h("span", {}, `${run.model} · ${work(run)}`)),
        reason && h("div.reason", { title: reason }, reason)),
      h("div.where", {}, progressBar(share, isAlive),
        h("div.sub", {}, steps)),
      h("div.lossy", {}, h("div.big-number", {}, run.loss_is_number ? figure(run.loss) : t("not_a_number")), h("div.sub", {}, t("loss"))),
      h("div.score", {}, h("div.big-number", {}, scoreText(run.metric, run.best_score)), run.best_score === null ? null : h("div.sub", {}, metricName(run.metric))),
      h("div.memory", {}, memoryBar(run.peak_bytes, run.budget_bytes, { planned: run.planned_peak_bytes, label: t("memory_said", { peak: bytes(run.peak_bytes), budget: bytes(run.budget_bytes) }) }),
        h("div.sub", {}, run.peak_bytes ? t("peak_of", { peak: bytes(run.peak_bytes), budget: bytes(run.budget_bytes) }) : "–")),
      h("div.left.small.soft", {}, when(run.started), run.state === "running" && run.seconds_left !== null ? h("div", {}, t("left", { time: duration(run.seconds_left) })) : null),
      isAlive || run.state === "waiting" ? h("span") : h("button.ghost.remove", { type: "button", title: t("delete_run", { name: run.name }), "aria-label": t("delete_run", { name: run.name }), onclick: () => deleteRun(run.name) }, icon("trash", 16)));
  }

  const matches = (run) => words.split(/\s+/).every((word) => [run.name, run.model, run.data, work(run), t(`state_${run.state}`), run.reason].some((text) => String(text ?? "").toLowerCase().includes(word)));

  function show() {
    controls.hidden = !runs.length;
    if (!runs.length) {
      list.replaceChildren(h("div.card.empty", {}, icon("runs", 40), h("h2", {}, t("no_runs")), h("p", {}, t("no_runs_about")),
        h("div.row", {}, button(t("start_sample"), { kind: "primary", glyph: "play", id: "start-sample", onclick: startSample }), link("/new", { class: "button" }, t("own_data")))));
      return;
    }
    if (pressed) { drawn = ""; return; } // what is under the pointer stays, or its click would open nothing
    const held = document.activeElement, focus = held?.closest?.("[data-run]")?.dataset.run;
    const shown = runs.filter(matches).sort(ORDERS[order]);
    if (!shown.length) { list.replaceChildren(h("p.card.soft", {}, t("none_match", { words: find.value.trim() }))); return; }
    const labels = [["title", "run"], ["where", "progress"], ["lossy", "loss"], ["score", "sort_score"], ["memory", "peak_memory"], ["left", "date"]];
    list.replaceChildren(h("div.card.list", {}, h("div.runs", { role: "list" },
      h("div.run-row.labels", { "aria-hidden": "true" }, h("span"), labels.map(([kind, key]) => h(`span.${kind}`, {}, t(key))), h("span")),
      shown.map(row))));
    if (focus) list.querySelector(`[data-run="${CSS.escape(focus)}"] ${held.matches("a") ? "a.name" : held.matches("button") ? "button" : "input"}`)?.focus();
  }

  async function startSample() {
    const told = await ask("/api/start", { flags: {} });
    told.name ? go(`/run/${encodeURIComponent(told.name)}`) : toast(told.problems.join("\n"), "bad");
  }

  // --- comparison ---

  const labelOf = (one) => ({ loss: t("train_loss"), memory: t("memory"), speed: t("speed"), learning_rate: t("learning_rate") }[one] ?? metricName(one.slice(5)));
  const textOf = (one) => (one === "memory" ? (y) => bytes(y) : one === "speed" ? (y) => count(y) : one === "learning_rate" ? (y) => (y === 0 ? "0" : y.toPrecision(3)) : (y) => figure(y, one.endsWith("loss") ? 3 : 2));

  async function showComparison() {
    const names = [...chosen];
    if (names.length < 2) { compare.replaceChildren(names.length ? h("p.small.soft", {}, t("choose_another")) : ""); drawn = ""; return; }
    const told = await ask(`/api/compare?${names.map((name) => `name=${encodeURIComponent(name)}`).join("&")}`);
    if (told.problems) { toast(told.problems.join("\n"), "bad"); return; }
    const found = new Set(Object.values(told.runs).flatMap((run) => Object.keys(run.series).filter((one) => run.series[one].mean.some((y) => y !== null))));
    const scores = evaluated([...found], null).map(([, [[, one]]]) => one);
    const options = ["loss", ...scores, "memory", "speed", "learning_rate"].filter((one) => found.has(one));
    if (!options.includes(quantity)) quantity = options[0] ?? "loss";
    const plot = h("div.plot", { role: "img", "aria-label": t("compare_said", { names: names.join(", ") }) }), buttons = h("div.tools");
    const pick = h("select.input", { id: "quantity", "aria-label": t("quantity"), onchange: () => { quantity = pick.value; showComparison(); } }, options.map((one) => h("option", { value: one }, labelOf(one))));
    pick.value = quantity;
    const axis = h("div.segments", {}, axisButtons(byTime, (time) => { byTime = time; showComparison(); }));
    const draw = () => {
      picture?.destroy();
      picture = comparison(plot, buttons, told.runs, quantity, { byTime, isLog, smoothing, format: textOf(quantity), trims: quantity.endsWith("loss") || quantity === "eval_perplexity",
        title: labelOf(quantity), change: () => { isLog = !isLog; draw(); } });
    };
    compare.replaceChildren(h("section.card.stack", { id: "comparison" },
      h("div.row.chart-bar", {}, h("h2.grow", {}, t("compared")), pick, smoothingSlider(smoothing, (weight) => { smoothing = weight; draw(); }), axis, buttons),
      options.length ? plot : h("p.soft", {}, t("nothing_to_compare")), valuesTable(names, told.runs), differencesTable(names, told.differ)));
    if (options.length) draw();
  }

  const marked = (name, n) => { const swatch = h("i.dot"); swatch.style.setProperty("background", `var(${COLOURS[n]})`); return h("span.marked", {}, swatch, name); };
  const numbers = (labels) => h("thead", {}, h("tr", {}, labels.map((label, n) => h(n ? "th.num" : "th", { scope: "col" }, label))));

  function valuesTable(names, series) {
    const text = textOf(quantity), facts = Object.fromEntries(runs.map((run) => [run.name, run]));
    const rows = names.map((name, n) => {
      const one = series[name].series[quantity] ?? { mean: [], low: [], high: [] }, some = (values) => values.filter((y) => y !== null), shown = (y) => (y === undefined || !Number.isFinite(y) ? "–" : text(y));
      const { metric, best_score, step, peak_bytes } = facts[name] ?? {};
      return [marked(name, n), shown(some(one.mean).at(-1)), shown(Math.min(...some(one.low))), shown(Math.max(...some(one.high))),
        best_score === null || best_score === undefined ? "–" : `${metricName(metric)} ${scoreText(metric, best_score)}`, count(step), bytes(peak_bytes)];
    });
    return h("div.scroll", {}, h("table", {}, numbers([labelOf(quantity), t("last_value"), t("lowest_value"), t("highest_value"), t("sort_score"), t("by_steps"), t("peak_memory")]),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, n) => h(n ? "td.num" : "td", {}, cell)))))));
  }

  function differencesTable(names, differ) {
    const entries = Object.entries(differ), shown = (value) => (value === null ? t("none") : String(value));
    if (!entries.length) return h("p.small.soft", {}, t("settings_same"));
    return h("div.stack.tight", {}, h("h3", {}, t("settings_differ")), h("div.scroll", { style: { "max-height": "420px" } }, h("table", { id: "differences" },
      h("thead", {}, h("tr", {}, h("th"), names.map((name, n) => h("th", { scope: "col" }, marked(name, n))))),
      h("tbody", {}, entries.map(([key, values]) => h("tr", {}, h("td.mono", {}, key), values.map((value) => h("td.mono", {}, shown(value)))))))));
  }

  const redraw = () => chosen.size > 1 && showComparison();
  addEventListener("themechange", redraw);
  const stop = listen("/api/stream", { overview: (told) => {
    dispatchEvent(new CustomEvent("machine", { detail: told.machine }));
    const now = JSON.stringify([told.runs, state.language]);
    if (now === drawn) return;
    drawn = now; runs = told.runs;
    for (const name of chosen) if (!runs.some((run) => run.name === name)) { chosen.delete(name); showComparison(); }
    show();
  } });
  return () => { stop(); picture?.destroy(); removeEventListener("themechange", redraw); removeEventListener("pointerup", release); removeEventListener("pointercancel", release); };
}
