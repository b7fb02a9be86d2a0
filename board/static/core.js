// What every part of the page uses: elements, words, numbers, requests, theme and language.
import { TEXTS } from "./texts.js";

const stored = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
export const recalled = (key, fallback) => { const value = Number(stored(key) ?? fallback); return Number.isFinite(value) ? value : fallback; };
export const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* not kept */ } };

const spoken = (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
export const state = { language: stored("language") || spoken, theme: stored("theme") || "auto" };

// --- words ---

export function t(key, values = {}) {
  const text = TEXTS[state.language][key] ?? TEXTS.en[key] ?? key;
  const filled = text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
  return filled.replace(/([\u4e00-\u9fff]) (?=[\u4e00-\u9fff])/g, "$1"); // a blank beside a Latin word is too much between two Chinese ones
}
export const has = (key) => key in TEXTS[state.language] || key in TEXTS.en;

// --- elements: text is always text, never markup ---

export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const svg = ["svg", "path", "rect", "circle", "line", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name || "div");
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [rule, what] of Object.entries(value)) node.style.setProperty(rule, what);
    else if (key === "value" || key === "checked" || key === "disabled" || key === "selected") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

const ICONS = {
  runs: "M3 17l5-6 4 4 8-9M15 6h5v5", plus: "M12 5v14M5 12h14", plan: "M4 20V10M10 20V4M16 20v-8M22 20H2",
  chat: "M4 5h16v11H9l-5 4z", sun: "M12 4V2M12 22v-2M4 12H2M22 12h-2M5.600 5.600L4.200 4.200M19.800 19.800l-1.400-1.400M18.400 5.600l1.400-1.400M4.200 19.800l1.400-1.400M12 16a4 4 0 100-8 4 4 0 000 8z",
  moon: "M20 14.500A8.500 8.500 0 019.500 4a8.500 8.500 0 1010.500 10.500z", save: "M5 4h11l3 3v13H5zM8 4v5h7V4M8 20v-6h8v6",
  stop: "M7 7h10v10H7z", play: "M8 5l11 7-11 7z", trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13", copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  back: "M15 5l-7 7 7 7", file: "M6 3h8l5 5v13H6zM14 3v5h5", upload: "M12 16V4M7 9l5-5 5 5M4 20h16", send: "M4 12l16-8-6 16-3-7z",
  check: "M5 12l5 5 9-10", warn: "M12 4l9 16H3zM12 10v4M12 17v.500", close: "M6 6l12 12M18 6L6 18", search: "M11 18a7 7 0 100-14 7 7 0 000 14zM16 16l5 5",
  auto: "M12 3a9 9 0 100 18zM12 3a9 9 0 010 18",
};
export function icon(name, size = 18) {
  return h("svg", { viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true" },
    h("path", { d: ICONS[name] }));
}
export const button = (label, { kind = "", glyph, ...attributes } = {}) =>
  h(`button.button${kind ? "." + kind : ""}`, { type: "button", ...attributes }, glyph && icon(glyph), h("span", {}, label));

export function link(path, attributes, ...children) {
  return h("a", { href: path, ...attributes, onclick: (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    go(path);
  } }, ...children);
}
export function go(path) {
  history.pushState(null, "", path);
  dispatchEvent(new Event("popstate"));
  scrollTo(0, 0);
}

// --- numbers ---

const locale = () => (state.language === "zh" ? "zh-CN" : "en-GB");
export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString(locale()));
export function bytes(n, digits) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size, places] of [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 0], ["KiB", 2 ** 10, 0]])
    if (Math.abs(n) >= size) return `${(n / size).toFixed(digits ?? places)} ${unit}`;
  return `${n} B`;
}
export function figure(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) return x.toExponential(1).replace("e-", "e−").replace("e+", "e");
  return Math.abs(x) >= 1000 ? count(x) : x.toFixed(Math.abs(x) >= 100 ? 1 : digits);
}
// A number at an axis: as short as it can be.
export const tick = (y) => (y !== 0 && (Math.abs(y) < 1e-3 || Math.abs(y) >= 1e6) ? figure(y) : y.toLocaleString(locale(), { maximumFractionDigits: 3 }));
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return t("sec", { n: s });
  if (s < 3600) return t("min", { n: Math.floor(s / 60), s: String(s % 60).padStart(2, "0") });
  if (s < 172800 && s % 3600 < 30) return t("hours", { n: Math.floor(s / 3600) });
  if (s < 172800) return t("hour", { n: Math.floor(s / 3600), m: Math.round((s % 3600) / 60) });
  return t("day", { n: Math.floor(s / 86400), h: Math.round((s % 86400) / 3600) });
}
export function when(epoch) {
  if (!epoch) return "–";
  const date = new Date(epoch * 1000), today = new Date().toDateString() === date.toDateString();
  const time = date.toLocaleTimeString(locale(), { hour: "2-digit", minute: "2-digit" });
  return today ? time : `${date.toLocaleDateString(locale(), { day: "numeric", month: "short" })} ${time}`;
}

// --- the server ---

export async function ask(path, body, method = "POST") {
  const headers = { "Accept-Language": state.language };
  const options = body === undefined ? { headers } : { method, headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try { answer = await fetch(path, options); } catch { return { problems: [t("offline")] }; }
  const content = await answer.json().catch(() => ({ problems: [`${answer.status} ${answer.statusText}`] }));
  return answer.ok || content.problems ? content : { problems: [`${answer.status}`] };
}

// How a stream would be answered; nothing of it is read.
async function statusOf(path) {
  const asking = new AbortController();
  try { return (await fetch(path, { signal: asking.signal })).status; } catch { return 0; } finally { asking.abort(); }
}

// A stream of events, opened again where it breaks off, but where there is none (`gone`). Returns what ends it.
export function listen(path, handlers) {
  let source, timer, ended = false;
  const open = () => {
    source = new EventSource(path);
    for (const [name, handler] of Object.entries(handlers))
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    source.addEventListener("open", () => document.body.classList.remove("offline"));
    source.addEventListener("error", async () => {
      const isClosed = source.readyState === EventSource.CLOSED; // by any answer but 200; else the browser tries again
      if (isClosed && (await statusOf(path)) === 404) { handlers.gone?.(); return; }
      if (ended) return;
      document.body.classList.add("offline");
      if (isClosed) timer = setTimeout(open, 5000);
    });
  };
  open();
  return () => { ended = true; clearTimeout(timer); source.close(); };
}

// --- small things ---

let toastTimer;
export function toast(text, kind = "") {
  document.querySelector(".toast")?.remove();
  document.body.append(h(`div.toast${kind && "." + kind}`, { role: "status" }, text));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => document.querySelector(".toast")?.remove(), 6000);
}

export function confirmed(title, text, label, kind = "danger") {
  return new Promise((resolve) => {
    const done = (answer) => { dialog.close(); dialog.remove(); resolve(answer); };
    const dialog = h("dialog.dialog", { "aria-label": title, oncancel: () => done(false) },
      h("h2", {}, title), h("p", {}, text),
      h("div.row.end", {}, button(t("cancel"), { onclick: () => done(false) }), button(label, { kind, onclick: () => done(true) })));
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function memoryBar(used, budget, { planned, label, unlimited } = {}) {
  const top = Math.max(used || 0, planned || 0, budget || 0) || 1;
  const share = (x) => `${Math.min(100, (100 * (x || 0)) / top)}%`;
  const kind = unlimited ? "quiet" : budget && used > budget ? "over" : budget && used > 0.93 * budget ? "tight" : "";
  return h("div.membar", { role: "img", "aria-label": label || `${bytes(used)} / ${bytes(budget)}` },
    used && h(`div.fill${kind && "." + kind}`, { style: { width: share(used) } }),
    planned ? h("div.planned", { style: { left: share(planned) }, title: `${t("planned")} ${bytes(planned)}` }) : null,
    budget && !unlimited ? h("div.limit", { style: { left: share(budget) } }) : null);
}

export const ALIVE = ["running", "starting", "paused"];

// How far a run is: `share` from 0 to 1.
export function progressBar(share, isAlive) {
  return h(`div.progress${isAlive ? "" : ".idle"}`, { role: "progressbar", "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": t("progress") }, h("div", { style: { width: `${100 * share}%` } }));
}

// Buttons of a chart's axis: steps or time.
export const axisButtons = (byTime, change) =>
  [[false, "by_steps"], [true, "by_time"]].map(([time, key]) => h("button", { type: "button", "aria-pressed": String(time === byTime), onclick: () => change(time) }, t(key)));

// Seconds of a step.
export const stepTime = (seconds) => (seconds < 1 ? `${seconds.toFixed(2)} s` : duration(seconds));

// What a run is for; as long as nobody has looked at its rows, only that it begins anew.
export const work = (run) => t(`kind_${run.kind === "pretrain" ? { text: "pretrain", answers: "pairs" }[run.learns] ?? "scratch" : run.kind}`);

export const pill = (name) => h(`span.pill.${name}`, {}, h("i", {}), t(`state_${name}`));

export function copyable(text) {
  return h("div.command", {}, h("code", {}, text), h("button.ghost", { type: "button", title: t("copy"), "aria-label": t("copy"),
    onclick: async () => { try { await navigator.clipboard.writeText(text); toast(t("copied")); } catch { toast(t("copy_failed")); } } }, icon("copy")));
}

export async function deleteRun(name) {
  const path = `/api/runs/${encodeURIComponent(name)}`, size = await ask(`${path}/size`);
  if (!(await confirmed(t("delete_title", { name }), t("delete_about", { size: bytes(size.bytes) }), t("delete")))) return false;
  const told = await ask(`${path}/wish`, { word: "delete" });
  told.problems ? toast(told.problems.join("\n"), "bad") : toast(t("deleted", { name }));
  return !told.problems;
}

export function showMissing(place, title, about) {
  document.title = `${title} · FrugalT5`;
  place.replaceChildren(h("div.card.empty", {}, icon("search", 36), h("h1", {}, title), h("p", {}, about), link("/", { class: "button primary" }, t("all_runs"))));
}

// A slider for the weight of the moving average; what is chosen is remembered.
export function smoothingSlider(value, change) {
  return h("label.row.tight.small.soft", { title: t("smoothing_about") }, t("smoothing"),
    h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value, id: "smoothing", oninput: (event) => { remember("smoothing", event.target.value); change(Number(event.target.value)); } }));
}
