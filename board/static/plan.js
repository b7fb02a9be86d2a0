// Part four: which model would fit which machine, and what its memory is made of.
import { ask, bytes, h, has, stepTime, t } from "./core.js";
import { partBar, partList, partsOf } from "./run.js";

export function showPlan(place) {
  document.title = `${t("plan")} · FrugalT5`;
  let gone = false, mode = "", chosen = null, turn = 0;
  const table = h("div.scroll"), detail = h("section.card.stack", { hidden: true, "aria-live": "polite" });
  const pick = h("select.input", { "aria-label": t("mode"), style: { width: "auto" }, onchange: () => { mode = pick.value; fill(); } }, ["", "standard", "low", "ultra"].map((one) => h("option", { value: one }, t(`mode_${one || "auto"}`))));
  const hint = h("p.small.soft.row.tight");
  let families = {}, machines = [];
  const family = h("select.input", { "aria-label": t("model"), style: { width: "auto" }, onchange: () => fill() });
  place.append(h("div.head", {}, h("div.grow", {}, h("h1", {}, t("plan")), h("p", {}, t("plan_about"))), family, pick),
    h("section.card.stack", {}, table, hint), detail);

  ask("/api/form").then((form) => {
    if (gone) return;
    if (form.problems) { table.replaceChildren(h("p.note", { role: "alert" }, form.problems.join("\n"))); return; }
    machines = ["auto", ...form.machines];
    const named = [["T5", /^t5-(?!v1)/], ["T5 1.1", /^t5-v1/], ["mT5", /^mt5-/], ["UMT5", /^umt5-/], ["ByT5", /^byt5-/]];
    families = Object.fromEntries(named.map(([label, pattern]) => [label, form.models.filter((name) => pattern.test(name))]));
    families.T5 = ["tiny", "chatlm-0.2b", ...families.T5].filter((name) => form.models.includes(name));
    family.replaceChildren(...Object.keys(families).map((label) => h("option", { value: label }, label)));
    fill();
  });

  const named = (machine) => (machine === "auto" ? t("this_one") : machine.replaceAll("_", " ").replace(/(\d+)gb/, "$1 GB").replace("amx", "AMX").replace(/^[a-z]+/, (word) => (has(`machine_${word}`) ? t(`machine_${word}`) : word[0].toUpperCase() + word.slice(1))));

  async function fill() {
    const mine = ++turn, models = families[family.value] ?? [], cells = new Map();
    table.replaceChildren(h("table.matrix", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("model")), machines.map((machine) => h("th", { scope: "col" }, named(machine))))),
      h("tbody", {}, models.map((model) => h("tr", {}, h("th", { scope: "row" }, model), machines.map((machine) => { const cell = h("td", {}, h("span.wait")); cells.set(`${model} ${machine}`, cell); return cell; }))))));
    hint.replaceChildren(h("span.spinner"), t("planning"));
    for (const model of models) {
      const told = await ask(`/api/plans?model_preset=${encodeURIComponent(model)}&memory_mode=${mode}`);
      if (mine !== turn || gone) return;
      for (const machine of machines) put(cells.get(`${model} ${machine}`), model, machine, told[machine] ?? told);
    }
    hint.replaceChildren(t("plan_hint"));
  }

  function put(cell, model, machine, told) {
    const p = told.plan;
    cell.replaceChildren(h(`button${p ? "" : ".no"}`, { type: "button", "aria-pressed": "false", title: p ? "" : t("too_large"), onclick: (event) => {
      for (const one of table.querySelectorAll("[aria-pressed=true]")) one.setAttribute("aria-pressed", "false");
      event.currentTarget.setAttribute("aria-pressed", "true");
      show(model, machine, told);
    } }, p ? bytes(p.peak_bytes) : "–"));
    if (!chosen && p && model !== "tiny") { chosen = true; cell.firstChild.click(); }
  }

  function show(model, machine, told) {
    detail.hidden = false;
    const title = h("h2", {}, t("parts_of", { model, machine: named(machine) }));
    if (!told.plan) { detail.replaceChildren(title, h("div.problems.small", {}, (told.problems ?? []).join("\n"))); return; }
    const p = told.plan, parts = partsOf(p.components);
    detail.replaceChildren(title,
      h("p.small.soft", {}, [`${t("predicted_peak")} ${bytes(p.peak_bytes)} / ${bytes(p.budget_bytes)}`, t("per_step", { time: stepTime(p.seconds) }), t("storage_said", { dtype: p.choice.storage })].join(" · ")),
      partBar(parts, p.budget_bytes), partList(parts, 12));
  }
  return () => { gone = true; };
}
