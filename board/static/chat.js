// Part five: talk with what was trained, one model or two side by side.
import { ask, bytes, button, figure, h, icon, link, state, t } from "./core.js";

const SHOWN = 10; // labels of a text, the likeliest first, and numbers of a vector

// The answer of a model that writes no text: a label with its probabilities, a number, labels of words or letters, or a vector.
function columns(text, { label, labels, number, numbers, probabilities, embedding }) {
  if (embedding) return h("div", {}, h("b", {}, t("vector_of", { count: embedding.length })), h("p.soft", {}, `${embedding.slice(0, SHOWN).map((value) => figure(value)).join("  ")} …`));
  if (number !== undefined) return h("b", {}, figure(number));
  if (label !== undefined) {
    const likeliest = Object.entries(probabilities).sort((one, other) => other[1] - one[1]).slice(0, SHOWN);
    return h("div.shares", {}, h("b", {}, label), likeliest.map(([name, share]) => h("div.share", {}, h("span", {}, name), h("div.progress", { "aria-hidden": "true" }, h("div", { style: { width: `${100 * share}%` } })), h("span", {}, figure(share)))));
  }
  const words = text.split(/\s+/), each = labels ?? numbers, parts = words.length === each.length ? words : [...text.replace(/\s/g, "")];
  return h("div.labelled", {}, parts.map((part, index) => h("span.labelled-part", { title: probabilities ? figure(probabilities[index]) : undefined }, h("span", {}, part), h("b", {}, labels ? each[index] ?? "–" : figure(each[index])))));
}

export function showChat(place) {
  document.title = `${t("chat")} · FrugalT5`;
  const asked = new URLSearchParams(location.search).get("model");
  let models = [], panes = [], gone = false;
  const holder = h("div.panes"), box = h("textarea", { rows: 1, placeholder: t("ask_something"), "aria-label": t("ask_something"), id: "question",
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } },
    oninput: () => { box.style.setProperty("height", "auto"); box.style.setProperty("height", `${Math.min(180, box.scrollHeight + 2)}px`); } });
  const both = button(t("compare_models"), { glyph: "plus", id: "both", onclick: () => { panes.length > 1 ? drop(panes[1]) : add(); } });
  const temperature = h("input.input", { type: "number", min: 0, max: 2, step: 0.1, value: "0", id: "temperature", style: { width: "84px" }, "aria-describedby": "freedom" });
  const turns = h("input.input", { type: "number", min: 0, max: 20, step: 1, value: "0", id: "turns", style: { width: "76px" } });
  const controls = h("div.row.small", {}, h("label.row.tight", { for: "temperature" }, t("temperature"), temperature), h("span.soft", { id: "freedom" }, t("temperature_about")), h("label.row.tight", { for: "turns" }, t("history_turns"), turns));
  const sending = button(t("send"), { kind: "primary", glyph: "send", id: "send", onclick: () => (busy() ? panes.forEach((pane) => pane.stop?.()) : send()) });
  const busy = () => panes.some((pane) => pane.stop);
  const showBusy = () => { sending.replaceChildren(icon(busy() ? "stop" : "send"), h("span", {}, t(busy() ? "halt" : "send"))); };
  place.append(h("div.head", {}, h("div.grow", {}, h("h1", {}, t("chat")), h("p", {}, t("chat_about"))), both), holder);

  ask("/api/models").then((told) => {
    if (gone) return;
    if (told.problems) { both.hidden = true; holder.replaceChildren(h("p.note", { role: "alert" }, told.problems.join("\n"))); return; }
    models = told.models ?? [];
    if (!models.length) { both.hidden = true; holder.replaceChildren(h("div.card.empty", {}, icon("chat", 40), h("h2", {}, t("no_models")), h("p", {}, t("no_models_about")), link("/new", { class: "button primary" }, icon("plus"), t("new_run")))); return; }
    place.append(h("div.composer", {}, box, sending), controls);
    add(asked);
  });

  const label = (model) => (model.is_checkpoint ? t("checkpoint_of", { run: model.run, step: Number(model.name.match(/(\d+)$/)?.[1] ?? 0) }) : model.name);

  function add(name) {
    const pane = { turns: h("div.turns", { role: "log", "aria-live": "polite" }), stop: null, history: [] };
    pane.pick = h("select.input", { "aria-label": t("choose_model") }, models.map((model) => h("option", { value: model.name }, `${label(model)} · ${bytes(model.bytes)}`)));
    const other = panes[0]?.pick.value;
    pane.pick.value = models.find((model) => model.name === name)?.name ?? models.find((model) => model.name !== other)?.name ?? models[0].name;
    pane.node = h("section.card.pane", {}, h("header", {}, pane.pick, h("button.ghost", { type: "button", title: t("begin_anew"), "aria-label": t("begin_anew"), onclick: () => begin() }, icon("trash"))), pane.turns);
    const begin = () => {
      pane.stop?.();
      pane.history = [];
      const filling = models.find((model) => model.name === pane.pick.value)?.kind === "pretrain";
      pane.turns.replaceChildren(filling ? h("p.note.small", {}, t("gap_hint")) : "");
    };
    pane.pick.addEventListener("change", begin);
    begin();
    panes.push(pane);
    holder.append(pane.node);
    both.replaceChildren(icon(panes.length > 1 ? "close" : "plus"), h("span", {}, t(panes.length > 1 ? "one_model" : "compare_models")));
  }
  function drop(pane) {
    pane.stop?.();
    panes = panes.filter((one) => one !== pane);
    pane.node.remove();
    both.replaceChildren(icon("plus"), h("span", {}, t("compare_models")));
  }

  function send() {
    const text = box.value.trim();
    if (!text || busy()) return;
    box.value = "";
    box.style.setProperty("height", "auto");
    for (const pane of panes) answer(pane, text);
    showBusy();
    box.focus();
  }

  async function answer(pane, text) {
    const waiting = h("span.dots", {}, h("i"), h("i"), h("i")), its = h("div.turn.its", {}, waiting), words = document.createTextNode("");
    const remembered = 2 * Math.max(0, Math.round(Number(turns.value) || 0)), history = remembered ? pane.history.slice(-remembered) : [];
    pane.turns.append(h("div.turn.mine", {}, text), its);
    const follow = () => { pane.turns.scrollTop = pane.turns.scrollHeight; };
    follow();
    let said = "", isWhole = false;
    const abort = new AbortController();
    pane.stop = () => abort.abort();
    const show = (told) => {
      if (told.loading) waiting.replaceChildren(t("loading_model"));
      else if (told.problem) { its.classList.add("bad"); its.replaceChildren(told.problem); }
      else if (told.piece !== undefined) { said += told.piece; words.data = said.trimStart().replace(/\n{3,}/g, "\n\n"); if (words.data && waiting.isConnected) waiting.replaceWith(words); }
      else if (told.is_cut !== undefined) {
        isWhole = true;
        if (waiting.isConnected) waiting.replaceWith(h("span.faint", {}, t("empty_answer")));
        if (told.is_cut) its.after(h("p.note.small", {}, t("cut_answer")));
      } else waiting.replaceWith(columns(text, told));
      follow();
    };
    try {
      const question = { model: pane.pick.value, text, history, temperature: Number(temperature.value) || 0 };
      const reply = await fetch("/api/talk", { method: "POST", headers: { "Content-Type": "application/json", "Accept-Language": state.language }, body: JSON.stringify(question), signal: abort.signal });
      if (!reply.ok) { show({ problem: ((await reply.json()).problems ?? []).join("\n") }); return; }
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line) show(JSON.parse(line));
      }
    } catch (error) {
      if (error.name !== "AbortError") show({ problem: t("offline") });
      else if (waiting.isConnected) its.remove();
    } finally {
      if (said || isWhole) pane.history.push({ role: "user", content: text }, { role: "assistant", content: said });
      pane.stop = null;
      showBusy();
    }
  }
  return () => { gone = true; for (const pane of panes) pane.stop?.(); };
}
