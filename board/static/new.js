// Part three: a new run. What to learn from, what to do, and whether it fits, as one types.
import { ask, bytes, button, copyable, count, duration, go, h, has, icon, memoryBar, state, stepTime, t, toast } from "./core.js";
import { partBar, partList, partsOf } from "./run.js";

const PAIRED = ["pairs", "conversations"];

export function showNew(place) {
  document.title = `${t("new_run")} · FrugalT5`;
  const flags = new URLSearchParams(location.search).get("model") ? { is_finetune: "True", finetune_from: new URLSearchParams(location.search).get("model") } : {};
  let form = null, timer = null, asked = 0, models = [], gone = false;
  const left = h("div.stack"), right = h("aside.card.stack.sticky", { "aria-live": "polite", id: "plan" });
  place.append(h("div.head", {}, h("div.grow", {}, h("h1", {}, t("new_run")), h("p", {}, t("new_about")))), h("div.split", {}, left, right));

  Promise.all([ask("/api/form"), ask("/api/models")]).then(([told, trained]) => {
    if (gone) return;
    if (told.problems) { left.replaceChildren(h("p.note", { role: "alert" }, told.problems.join("\n"))); return; }
    form = told; models = trained.models ?? [];
    build();
    replan(0);
  });

  function set(name, value) {
    if (value === "" || value === undefined || value === null) delete flags[name]; else flags[name] = String(value);
    for (const other of document.querySelectorAll(`[data-flag="${name}"]`)) if (other !== document.activeElement) other.type === "checkbox" ? (other.checked = flags[name] === "True") : (other.value = flags[name] ?? "");
    replan(name === "run_name" ? 50 : 350);
  }

  // --- the form ---

  const section = (number, key, ...children) => h("section.card.stack", {}, h("div.row", {}, h("span.number", {}, String(number)), h("h2", {}, t(key))), ...children);
  const known = {};
  let task = null;

  function build() {
    for (const group of form.groups) for (const one of group.fields) known[one.name] = one;
    const rest = form.groups.map((group) => ({ ...group, fields: group.fields.filter((one) => !form.first.includes(one.name)) })).filter((group) => group.fields.length);
    left.replaceChildren(section(1, "data", dataPart()), section(2, "goal", goalPart()), section(3, "model", modelPart()),
      section(4, "length", h("div.fields", {}, ["max_steps", "epochs", "effective_batch_size", "max_seq_len", "learning_rate"].map((name) => field(known[name])))),
      section(5, "limits", h("div.fields", {}, field(known.memory_budget), field({ ...known.run_name, auto: false }))),
      everything(rest));
  }

  function field(one, plain = true) {
    const label = has(`label_${one.name}`) && plain ? t(`label_${one.name}`) : one.name, id = `f-${one.name}`;
    const hint = has(`hint_${one.name}`) ? t(`hint_${one.name}`) : state.language === "zh" ? one.help_zh : one.help;
    const common = { id, "data-flag": one.name, "aria-describedby": `${id}-hint`, autocomplete: "off" };
    const fallback = one.default === null ? t("none") : one.default;
    let input;
    if (one.kind === "bool" || one.choices.length) {
      const options = one.kind === "bool" ? ["True", "False"] : one.choices;
      input = h("select", { ...common, onchange: (event) => set(one.name, event.target.value) },
        h("option", { value: "" }, one.default === "auto" ? "auto" : `${fallback}`), options.filter((option) => option !== one.default).map((option) => h("option", { value: option }, option)));
    } else {
      const number = one.kind === "int" || one.kind === "float";
      input = h("input", { ...common, type: "text", inputmode: number ? "decimal" : "text", placeholder: one.name === "run_name" ? "" : fallback, spellcheck: "false", oninput: (event) => set(one.name, event.target.value.trim()) });
    }
    input.value = flags[one.name] ?? "";
    return h("div.field", { "data-field": one.name }, h("label", { for: id, class: plain ? "" : "mono" }, label),
      one.unit && input.tagName === "INPUT" && plain ? h("div.unit", {}, input) : input,
      h("span.hint", { id: `${id}-hint` }, plain ? hint : [hint, h("br"), h("span.faint", {}, one.allowed)]));
  }

  function everything(groups) {
    const total = groups.reduce((sum, group) => sum + group.fields.length, 0);
    const find = h("input.input", { type: "search", placeholder: t("search_settings"), "aria-label": t("search_settings"), oninput: () => fill() });
    const body = h("div.stack");
    const fill = () => {
      const words = find.value.trim().toLowerCase();
      body.replaceChildren(...groups.map((group) => [group, group.fields.filter((one) => !words || `${one.name} ${one.help} ${one.help_zh}`.toLowerCase().includes(words))]).filter(([, fields]) => fields.length)
        .map(([group, fields]) => h("details", { open: !!words }, h("summary", {}, has(`group_${group.name}`) ? t(`group_${group.name}`) : group.name, h("span.small.soft", {}, String(fields.length))),
          h("div.fields", { style: { "margin-top": "14px" } }, fields.map((one) => field(one, false))))));
    };
    const card = h("section.card", {}, h("details", { ontoggle: (event) => { if (event.target.open && !body.childElementCount) fill(); } },
      h("summary", {}, t("all_settings"), h("span.small.soft", {}, t("all_settings_about", { n: total }))), h("div.stack", { style: { "margin-top": "16px" } }, find, body)));
    return card;
  }

  // --- data ---

  function dataPart() {
    const files = h("div.choices.files", { role: "radiogroup", "aria-label": t("data") }), preview = h("div"), folder = h("p.small.soft"), picker = h("input", { type: "file", hidden: true, onchange: () => upload(picker.files[0]) });
    const drop = h("div.drop", { role: "button", tabindex: "0", id: "drop", onclick: () => picker.click(), onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); picker.click(); } },
      ondragover: (event) => { event.preventDefault(); drop.classList.add("over"); }, ondragleave: () => drop.classList.remove("over"),
      ondrop: (event) => { event.preventDefault(); drop.classList.remove("over"); if (event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]); } }, icon("upload"), h("span", {}, t("upload"), h("br"), h("span.small", {}, t("upload_kinds"))));

    function choose(name) {
      set("train_file", name ?? "");
      task = null;
      goal();
      if (!name && flags.is_finetune === undefined) set("is_finetune", "");
      mark();
      preview.replaceChildren();
      if (name) show(name);
    }
    function mark() {
      for (const node of files.children) node.setAttribute("aria-checked", String((node.dataset.file || "") === (flags.train_file ?? "")));
    }
    async function list() {
      const told = await ask("/api/data");
      const choice = (name, title, about) => h("button.choice", { type: "button", role: "radio", "data-file": name ?? "", onclick: () => choose(name) }, h("b", {}, title), h("span", {}, about));
      files.replaceChildren(choice(null, t("sample"), t("sample_about")), ...(told.files ?? []).slice(0, 40).map((file) => choice(file.name, file.name, bytes(file.bytes))));
      folder.textContent = told.files?.length ? "" : t("no_files", { folder: told.folder });
      mark();
    }
    async function show(name) {
      preview.replaceChildren(h("p.small.soft", {}, "…"));
      const told = await ask(`/api/preview?file=${encodeURIComponent(name)}`);
      if ((flags.train_file ?? "") !== name) return;
      if (told.problems) { preview.replaceChildren(h("div.problems", {}, told.problems.join("\n"))); return; }
      task = told.task;
      if (PAIRED.includes(task) && flags.is_finetune === undefined && models.length) set("is_finetune", "True");
      goal();
      const shown = told.shown;
      preview.replaceChildren(h("div.stack.preview", {},
        h("div.row", {}, h("h3.grow", {}, t("preview")), h("span.small.soft", {}, [t(told.is_whole ? "rows_counted" : "rows_at_least", { n: count(told.counted) }), told.broken ? t("broken_rows", { n: count(told.broken) }) : ""].filter(Boolean).join(" · "))),
        h("p.small.soft", {}, t(`task_${told.task ?? "none"}`)),
        shown.length ? h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, shown.map((column) => h("th", { scope: "col" }, column)))), h("tbody", {}, told.rows.slice(0, 5).map((row) => h("tr", {}, row.map((cell) => h("td", { title: cell }, cell))))))) : h("p.small", {}, told.columns.join(", ")),
        h("div.fields", {}, shown.map((column) => { const facts = told.lengths[column], most = Math.max(1, ...facts.bars); return h("div.stack.tight", {}, h("div.bars", { role: "img", "aria-label": t("letters", { column, median: count(facts.median), longest: count(facts.longest) }) }, facts.bars.map((bar) => h("div", { style: { height: `${(100 * bar) / most}%` } }))), h("span.small.soft", {}, t("letters", { column, median: count(facts.median), longest: count(facts.longest) }))); }))));
    }
    function upload(file) {
      const request = new XMLHttpRequest();
      request.open("PUT", `/api/data/${encodeURIComponent(file.name)}`);
      request.setRequestHeader("Content-Type", "application/octet-stream");
      request.setRequestHeader("Accept-Language", state.language);
      request.upload.onprogress = (event) => drop.replaceChildren(icon("upload"), t("uploading", { share: Math.round((100 * event.loaded) / event.total) }));
      request.onloadend = async () => {
        drop.replaceChildren(icon("upload"), h("span", {}, t("upload"), h("br"), h("span.small", {}, t("upload_kinds"))));
        let told = {};
        try { told = JSON.parse(request.responseText); } catch { /* the connection was lost */ }
        if (request.status !== 200) { toast((told.problems ?? [t("offline")]).join("\n"), "bad"); return; }
        await list();
        choose(file.name);
      };
      request.send(file);
    }
    list();
    return h("div.stack", {}, h("p.small.soft", {}, t("data_about")), files, folder, drop, picker, preview);
  }

  // --- goal and model ---

  let goal = () => {};
  function goalPart() {
    const box = h("div.choices", { role: "radiogroup", "aria-label": t("goal") });
    goal = () => {
      const options = [["", PAIRED.includes(task) ? "learn_pairs" : "learn_language"], ["True", "learn_answer"]];
      box.replaceChildren(...options.map(([value, key]) => h("button.choice", { type: "button", role: "radio", "data-goal": key, "aria-checked": String((flags.is_finetune === "True") === (value === "True")), onclick: () => { set("is_finetune", value); if (!value) set("finetune_from", ""); goal(); drawModel(); } }, h("b", {}, t(key)), h("span", {}, t(`${key}_about`)))));
      drawModel();
    };
    queueMicrotask(goal);
    return box;
  }

  const modelBox = h("div.fields");
  function modelPart() { drawModel(); return modelBox; }
  function drawModel() {
    if (!form) return;
    const tuned = flags.is_finetune === "True";
    const pick = (name, options, first) => { const id = `f-${name}`, select = h("select", { id, "data-flag": name, onchange: (event) => set(name, event.target.value) }, h("option", { value: "" }, first), options.map((option) => h("option", { value: option }, option))); select.value = flags[name] ?? ""; return h("div.field", {}, h("label", { for: id }, t(`label_${name}`)), select, h("span.hint", {}, t(`hint_${name}`))); };
    modelBox.replaceChildren(tuned ? pick("finetune_from", models.filter((model) => !model.is_adapter).map((model) => model.name), "auto") : pick("model_preset", form.models.filter((name) => name !== form.default_model), form.default_model),
      ...(tuned ? [field(known.lora_rank)] : []));
    if (tuned) delete flags.model_preset;
  }

  // --- the plan, as one types ---

  function replan(wait) {
    clearTimeout(timer);
    const mine = ++asked;
    drawBusy();
    timer = setTimeout(async () => {
      const told = await ask("/api/plan", { flags });
      if (mine !== asked || gone) return;
      right.classList.remove("busy");
      drawPlan(told);
    }, wait);
  }

  function verdict(kind, glyph, text) {
    return h(`div.verdict${kind && "." + kind}`, { id: "verdict" }, h("span.badge", {}, glyph === "wait" ? h("span.spinner") : icon(glyph, 22)), text);
  }

  // On a phone the plan stands below the form; this says the gist of it all the time.
  const quick = h("div.quick");
  place.append(quick);
  document.body.classList.add("has-quick");
  function drawQuick(told) {
    const text = !told.plan ? refusal(told) : t(told.fits_now === false ? "fits_later" : told.plan.peak_bytes > 0.9 * told.plan.budget_bytes ? "fits_tight" : "fits");
    quick.replaceChildren(h("div.grow.small", {}, h("b", {}, text), told.plan ? `${bytes(told.plan.peak_bytes)} / ${bytes(told.plan.budget_bytes)}` : ""),
      told.plan ? button(t(told.fits_now === false ? "start_queue" : "start"), { kind: "primary", glyph: "play", onclick: start }) : button("", { glyph: "warn", onclick: () => right.scrollIntoView({ block: "center" }) }));
  }

  // What was said of other settings is not true of these: the verdict goes until the plan is there, the rest is dimmed.
  function drawBusy() {
    right.classList.add("busy");
    const now = verdict("busy", "wait", t("planning")), old = right.querySelector("#verdict");
    old ? old.replaceWith(now) : right.replaceChildren(now);
    quick.querySelector("b")?.replaceChildren(t("planning"));
    quick.querySelector("b")?.nextSibling?.remove();
  }

  function refusal(told) {
    const n = Math.max(1, (told.problems ?? []).filter((problem) => problem.trim().startsWith("--")).length);
    return told.exit_code === 3 ? t("fits_not") : t(n === 1 ? "wrong_one" : "wrong_many", { n });
  }

  function drawPlan(told) {
    drawQuick(told);
    const command = told.command ? h("div.stack.tight", {}, h("h3", {}, t("command")), copyable(told.command)) : null;
    if (!told.plan) {
      right.replaceChildren(verdict("no", "warn", refusal(told)), h("div.problems.small", {}, (told.problems ?? []).join("\n")), suggestions(told), command ?? "");
      return;
    }
    const p = told.plan, share = p.peak_bytes / p.budget_bytes;
    const parts = partsOf(p.components), later = told.fits_now === false;
    const facts = [[t("predicted_peak"), `${bytes(p.peak_bytes)} / ${bytes(p.budget_bytes)}`],
      [t("duration_label"), p.seconds_total ? t("duration_between", { time: duration(p.seconds_total), low: duration(p.seconds_low), high: duration(p.seconds_high) }) : t("per_step", { time: stepTime(p.seconds) })],
      [t("label_effective_batch_size"), count(p.effective_batch_size)],
      [t("micro_batch"), t("micro_batch_said", { rows: p.choice.batch_size_per_gpu, times: p.gradient_accumulation_steps })],
      [t("numbers"), p.choice.compute]];
    right.replaceChildren(
      later ? verdict("tight", "auto", t("fits_later")) : share > 0.9 ? verdict("tight", "check", t("fits_tight")) : verdict("", "check", t("fits")),
      ...(later ? [h("div.note.small", {}, t("fits_later_about", { reserved: bytes(told.reserved_bytes) }))] : told.reserved_bytes ? [h("p.small.soft", {}, t("beside", { reserved: bytes(told.reserved_bytes) }))] : []),
      h("div", { style: { padding: "4px 0" } }, memoryBar(p.peak_bytes, p.budget_bytes, { label: t("memory_said", { peak: bytes(p.peak_bytes), budget: bytes(p.budget_bytes) }) })),
      h("dl.facts", {}, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
      p.seconds_total ? "" : h("p.small.soft", {}, t("unknown_time")),
      ...(told.start ?? []).map((text) => h("p.small.soft", { "data-start": "" }, text)),
      button(t(later ? "start_queue" : "start"), { kind: "primary.wide", glyph: "play", id: "start", onclick: start }),
      command,
      h("details", {}, h("summary", {}, t("made_of")), h("div.stack", { style: { "margin-top": "12px" } }, partBar(parts, p.peak_bytes), partList(parts, 12))),
      told.changes?.length ? h("details", { open: share > 0.7 }, h("summary", {}, t("cheaper")), h("div.stack.tight", { style: { "margin-top": "12px" } }, told.changes.map((change) => changeButton(change.label, t("saves", { size: bytes(p.peak_bytes - change.peak_bytes), times: (change.seconds / p.seconds).toFixed(2) }), bytes(change.peak_bytes))))) : "");
  }

  function changeButton(label, about, peak) {
    const [name, value] = label.split("=");
    return h("button.change", { type: "button", "data-change": label, onclick: () => set(name, value) }, h("code", {}, `${name} = ${value}`), h("b", {}, peak), about && h("span.small", {}, about));
  }

  // What a refusal says would help becomes buttons.
  function suggestions(told) {
    if (told.exit_code !== 3) return "";
    const found = [...new Set((told.problems ?? []).join("\n").match(/--([a-z_]+)=([\w.]+)/g) ?? [])].map((flag) => flag.slice(2));
    return found.length ? h("div.stack.tight", {}, h("h3", {}, t("cheaper")), found.map((label) => changeButton(label, "", ""))) : "";
  }

  async function start() {
    const told = await ask("/api/start", { flags });
    told.name ? go(`/run/${encodeURIComponent(told.name)}`) : toast((told.problems ?? []).join("\n"), "bad");
  }
  return () => { gone = true; clearTimeout(timer); document.body.classList.remove("has-quick"); };
}
