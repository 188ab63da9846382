// The only script of the report: tabs, and legend keys that hide a line. Without it the page shows everything at once.
"use strict";
for (const list of document.querySelectorAll("[role=tablist]")) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const show = (chosen) => tabs.forEach((tab) => {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
  });
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      const next = tabs[(place + step + tabs.length) % tabs.length];
      show(next);
      next.focus();
    });
  });
  list.hidden = false;
  show(tabs[0]);
}
for (const key of document.querySelectorAll("button.toggle")) {
  key.disabled = false;
  key.addEventListener("click", () => {
    const isOn = key.getAttribute("aria-pressed") !== "true";
    key.setAttribute("aria-pressed", isOn);
    for (const drawn of key.closest("figure").querySelectorAll("svg ." + key.dataset.series)) {
      drawn.style.display = isOn ? "" : "none";
    }
  });
}
