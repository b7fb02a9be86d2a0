// The frame around every part: navigation, theme, language, and which part an address shows.
import { ask, bytes, h, icon, link, memoryBar, remember, showMissing, state, t } from "./core.js";
import { showRuns } from "./runs.js";
import { showRun } from "./run.js";
import { showNew } from "./new.js";
import { showPlan } from "./plan.js";
import { showChat } from "./chat.js";

const PARTS = [["/", "runs", "runs"], ["/new", "plus", "new_run"], ["/plan", "plan", "plan"], ["/chat", "chat", "chat"]];
let leave = null;

function isDark() {
  return state.theme === "dark" || (state.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}
function applyTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  dispatchEvent(new Event("themechange"));
}

function frame() {
  const themes = ["auto", "light", "dark"];
  const here = (path) => (path === "/" ? location.pathname === "/" || location.pathname.startsWith("/run/") : location.pathname === path);
  const glyph = { auto: "auto", light: "sun", dark: "moon" }[state.theme];
  return h("aside.side", {},
    link("/", { class: "brand", "aria-label": "FrugalT5" }, h("img", { src: "/static/icon.svg", alt: "" }), "FrugalT5"),
    h("nav", { "aria-label": t("navigation") }, PARTS.map(([path, picture, key]) =>
      link(path, { class: here(path) ? "here" : "", "aria-current": here(path) ? "page" : undefined }, icon(picture, 20), h("span", {}, t(key))))),
    h("div.machine", { id: "machine" }),
    h("div.toggles", {},
      h("button.ghost", { type: "button", id: "theme", title: t(`theme_${state.theme}`), "aria-label": t(`theme_${state.theme}`), onclick: () => {
        state.theme = themes[(themes.indexOf(state.theme) + 1) % 3];
        remember("theme", state.theme);
        applyTheme();
        draw(true);
      } }, icon(glyph)),
      h("button.ghost", { type: "button", id: "language", "aria-label": t("other_language"), onclick: () => {
        state.language = state.language === "zh" ? "en" : "zh";
        remember("language", state.language);
        draw();
      } }, state.language === "zh" ? "English" : "中文")));
}

export function showMachine(machine) {
  const place = document.getElementById("machine");
  if (!place || !machine?.total_bytes) return;
  const used = machine.free_bytes === null ? null : machine.total_bytes - machine.free_bytes;
  place.replaceChildren(h("span", {}, t("this_machine")),
    used === null ? null : memoryBar(used, machine.total_bytes, { unlimited: true }),
    h("span", {}, used === null ? bytes(machine.total_bytes) : t("free_of", { free: bytes(machine.free_bytes, 1), total: bytes(machine.total_bytes, 1) })));
}
addEventListener("machine", (event) => showMachine(event.detail));

function draw(frameOnly = false) {
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  const app = document.getElementById("app");
  if (frameOnly) {
    const machine = document.getElementById("machine");
    app.querySelector(".side").replaceWith(frame());
    document.getElementById("machine").replaceWith(machine);
    return;
  }
  leave?.();
  const main = h("main", { id: "main", tabindex: "-1" }, h("div.offline-note", { role: "status" }, t("offline")));
  const place = h("div.stack");
  main.append(place);
  app.replaceChildren(frame(), main);
  const path = location.pathname;
  const run = path.match(/^\/run\/([^/]+)$/);
  const parts = { "/": showRuns, "/new": showNew, "/plan": showPlan, "/chat": showChat };
  const missing = () => showMissing(place, t("not_found"), t("not_found_about", { path }));
  const show = run ? () => showRun(place, decodeURIComponent(run[1])) : () => (parts[path] ?? missing)(place);
  document.title = "FrugalT5";
  leave = show() ?? null;
  ask("/api/runs").then((told) => showMachine(told.machine));
}

addEventListener("popstate", () => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.theme === "auto") applyTheme(); });
draw();
