// Before anything is drawn: the theme that was chosen, so that a dark page never flashes white.
(() => {
  let theme = "auto";
  try { theme = localStorage.getItem("theme") || "auto"; } catch { /* private windows may refuse */ }
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
