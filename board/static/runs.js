// Part one: every run, how it stands, and several in one picture.
import { ask, bytes, button, confirmed, count, duration, figure, go, h, icon, link, listen, memoryBar, pill, state, t, toast, when, work } from "./core.js";
import { COLOURS, comparison } from "./charts.js";

export function showRuns(place) {
  document.title = `${t("runs")} · FrugalT5`;
  const chosen = new Set();
  const list = h("div"), compare = h("div");
  place.append(
    h("div.head", {}, h("div.grow", {}, h("h1", {}, t("runs")), h("p", {}, t("runs_about"))),
      link("/new", { class: "button primary" }, icon("plus"), t("new_run"))),
    compare, list);
  let pressed = false;
  list.addEventListener("pointerdown", (event) => { pressed = event.button === 0; });
  const release = () => setTimeout(() => { pressed = false; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, release);
  let runs = null, picture = null, drawn = "", quantity = "loss", byTime = false;

  function row(run) {
    const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0;
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": t("compare_this", { name: run.name }), onchange: (event) => {
      event.target.checked ? chosen.add(run.name) : chosen.delete(run.name);
      showComparison();
    } });
    const alive = ["running", "starting", "paused"].includes(run.state);
    const second = run.state === "running" && run.seconds_left !== null ? t("left", { time: duration(run.seconds_left) }) : when(run.started);
    return h("div.run-row", { "data-run": run.name, role: "listitem" },
      run.step ? box : h("span"),
      h("div", {}, link(`/run/${encodeURIComponent(run.name)}`, { class: "name" }, run.name),
        h("div.sub", {}, pill(run.state), run.model && h("span", {}, `${run.model} · ${work(run)}`))),
      h("div.where", {}, h(`div.progress${alive ? "" : ".idle"}`, { role: "progressbar", "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": t("progress") }, h("div", { style: { width: `${share * 100}%` } })),
        h("div.sub", {}, run.max_steps ? t("steps_of", { n: count(run.step), most: count(run.max_steps) }) : run.doing?.rows ? t("rows_so_far", { n: count(run.doing.rows) }) : t(run.state === "starting" ? "preparing" : run.state === "waiting" ? "queued" : "no_steps"))),
      h("div.lossy", {}, h("div.big-number", {}, run.loss_is_number ? figure(run.loss) : "NaN"), h("div.sub", {}, t("loss"))),
      h("div.memory", {}, memoryBar(run.peak_bytes, run.budget_bytes, { planned: run.planned_peak_bytes, label: t("memory_said", { peak: bytes(run.peak_bytes), budget: bytes(run.budget_bytes) }) }),
        h("div.sub", {}, run.peak_bytes ? t("peak_of", { peak: bytes(run.peak_bytes), budget: bytes(run.budget_bytes) }) : "–")),
      h("div.left.small.soft", {}, second));
  }

  function show() {
    if (!runs.length) {
      list.replaceChildren(h("div.card.empty", {}, icon("runs", 40), h("h2", {}, t("no_runs")), h("p", {}, t("no_runs_about")),
        h("div.row", {}, button(t("start_sample"), { kind: "primary", glyph: "play", id: "start-sample", onclick: startSample }), link("/new", { class: "button" }, t("own_data")))));
      return;
    }
    if (pressed) { drawn = ""; return; } // what is under the pointer stays, or its click would open nothing
    const held = document.activeElement, focus = held?.closest?.("[data-run]")?.dataset.run;
    list.replaceChildren(h("div.card.list", {}, h("div.runs", { role: "list" },
      h("div.run-row.labels", { "aria-hidden": "true" }, h("span"), h("span", {}, t("run")), h("span", {}, t("progress")), h("span", {}, t("loss_now")), h("span", {}, t("peak_against_budget")), h("span.left", {}, t("time"))),
      runs.map(row))));
    if (focus) list.querySelector(`[data-run="${CSS.escape(focus)}"] ${held.matches("a") ? "a.name" : "input"}`)?.focus();
  }

  async function startSample() {
    const told = await ask("/api/start", { flags: {} });
    told.name ? go(`/run/${encodeURIComponent(told.name)}`) : toast(told.problems.join("\n"), "bad");
  }

  async function showComparison() {
    const names = [...chosen];
    if (names.length < 2) { compare.replaceChildren(names.length ? h("p.small.soft", {}, t("choose_another")) : ""); drawn = ""; return; }
    const told = await ask(`/api/compare?${names.map((name) => `name=${encodeURIComponent(name)}`).join("&")}`);
    const plot = h("div.plot", { role: "img", "aria-label": t("compare_said", { names: names.join(", ") }) });
    const pick = (options, now, change) => h("div.segments", {}, options.map(([key, label]) => h("button", { type: "button", "aria-pressed": String(key === now), onclick: () => { change(key); showComparison(); } }, label)));
    compare.replaceChildren(h("section.card.stack", { id: "comparison" },
      h("div.row", {}, h("h2.grow", {}, t("compared")),
        pick([["loss", t("loss")], ["eval_loss", t("eval_loss")], ["memory", t("memory")], ["speed", t("speed")]], quantity, (key) => { quantity = key; }),
        pick([[false, t("by_steps")], [true, t("by_time")]], byTime, (key) => { byTime = key; })),
      plot,
      h("div.chart.legend.row", {}, names.map((name, n) => { const swatch = h("i"); swatch.style.setProperty("background", `var(${COLOURS[n]})`); return h("span", {}, swatch, name); }))));
    picture?.destroy();
    picture = comparison(plot, told.runs, quantity, byTime, quantity === "memory" ? (y) => bytes(y, 0) : (y) => figure(y, 2));
  }

  const redraw = () => chosen.size > 1 && showComparison();
  addEventListener("themechange", redraw);
  const stop = listen("/api/stream", { overview: (told) => {
    dispatchEvent(new CustomEvent("machine", { detail: told.machine }));
    const now = JSON.stringify([told.runs, state.language]);
    if (now === drawn) return;
    drawn = now; runs = told.runs;
    show();
  } });
  return () => { stop(); picture?.destroy(); removeEventListener("themechange", redraw); removeEventListener("pointerup", release); removeEventListener("pointercancel", release); };
}
