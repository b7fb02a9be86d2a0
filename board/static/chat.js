// Part five: talk with what was trained, one model or two side by side.
import { ask, bytes, button, h, icon, link, state, t } from "./core.js";

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
    const pane = { id: crypto.getRandomValues(new Uint32Array(2)).join(""), turns: h("div.turns", { role: "log", "aria-live": "polite" }), stop: null, answered: 0 };
    pane.pick = h("select.input", { "aria-label": t("choose_model") }, models.map((model) => h("option", { value: model.name }, `${label(model)} · ${bytes(model.bytes)}`)));
    const other = panes[0]?.pick.value;
    pane.pick.value = models.find((model) => model.name === name)?.name ?? models.find((model) => model.name !== other)?.name ?? models[0].name;
    pane.node = h("section.card.pane", {}, h("header", {}, pane.pick, h("button.ghost", { type: "button", title: t("begin_anew"), "aria-label": t("begin_anew"), onclick: () => { pane.pick.dispatchEvent(new Event("change")); ask("/api/talk/reset", { pane: pane.id }); } }, icon("trash"))), pane.turns);
    const begin = () => {
      pane.stop?.();
      pane.answered = 0;
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
    const mine = h("div.turn.mine", {}, text), goes_on = pane.answered > 0 && Number(turns.value) > 0;
    pane.turns.append(mine, its);
    const follow = () => { pane.turns.scrollTop = pane.turns.scrollHeight; };
    follow();
    let said = "";
    const abort = new AbortController();
    pane.stop = () => abort.abort();
    const options = { temperature: temperature.value || "0", history_turns: turns.value || "0" };
    const say = (told) => {
      if (told.loading) waiting.replaceChildren(t("loading_model"));
      else if (told.piece !== undefined) { said += told.piece; words.data = said.trimStart().replace(/\n{3,}/g, "\n\n"); if (words.data && waiting.isConnected) waiting.replaceWith(words); }
      else if (told.forgotten) mine.before(h("p.note.small", {}, t("forgotten")));
      else if (told.note) mine.after(h("p.note.small", {}, told.note));
      else if (told.problem) { its.classList.add("bad"); its.replaceChildren(told.problem); }
      else if (told.end) { pane.answered += 1; if (waiting.isConnected) waiting.replaceWith(h("span.faint", {}, t("empty_answer"))); }
      follow();
    };
    try {
      const reply = await fetch("/api/talk", { method: "POST", headers: { "Content-Type": "application/json", "Accept-Language": state.language }, body: JSON.stringify({ pane: pane.id, model: pane.pick.value, text, options, goes_on }), signal: abort.signal });
      if (!reply.ok) { say({ problem: ((await reply.json()).problems ?? []).join("\n") }); return; }
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line) say(JSON.parse(line));
      }
    } catch (error) {
      if (error.name !== "AbortError") say({ problem: t("offline") });
      else if (waiting.isConnected) its.remove();
    } finally { pane.stop = null; showBusy(); }
  }
  return () => { gone = true; for (const pane of panes) pane.stop?.(); };
}
