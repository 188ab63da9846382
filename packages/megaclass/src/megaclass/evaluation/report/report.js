// The only script of the report: tabs, legend keys that hide a line, tables that sort, smoothing, and the values of a chart under the
// pointer. Without it the page shows everything at once.
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
// Numbers begin with the largest, texts with A; a second press turns the order around. Rows without a value come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, place) => head.firstChild.addEventListener("click", () => {
    const cell = (row) => row.querySelectorAll("td")[place];
    const rows = [...table.tBodies[0].rows];
    const isNumber = rows.some((row) => cell(row).dataset.number !== undefined);
    const value = (row) => isNumber ? Number(cell(row).dataset.number ?? NaN) : cell(row).textContent;
    const isRising = head.hasAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : !isNumber;
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isRising ? "ascending" : "descending");
    const order = (a, b) => (isRising ? 1 : -1) * (isNumber ? a - b : a.localeCompare(b));
    rows.sort((a, b) => Number.isNaN(value(a)) - Number.isNaN(value(b)) || order(value(a), value(b)));
    table.tBodies[0].append(...rows);
  }));
  heads.forEach((head) => { head.firstChild.disabled = false; });
}
// A chart says how its axes map values to positions; its lines hold the positions. A pointer reads the values back.
const shown = (value) => {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", {maximumSignificantDigits: 5});
};
for (const chart of document.querySelectorAll("svg[data-x]")) {
  const scale = (name) => {
    const [low, high, first, last, isLog] = chart.dataset[name].split(" ").map(Number);
    return (at) => {
      const share = (at - first) / (last - first);
      return isLog ? low * Math.pow(high / low, share) : low + share * (high - low);
    };
  };
  const [x, y] = [scale("x"), scale("y")];
  // Of several runs only the means are read: with the single values behind them the line would be twice as long.
  const paths = [...chart.querySelectorAll("path.line")];
  const readable = paths.filter((path) => paths.length <= 2 || !path.classList.contains("faint"));
  const lines = () => readable.map((path) => ({
    path,
    name: path.dataset.name,
    points: path.getAttribute("d").split(/[ML]/).filter(Boolean).map((point) => point.split(" ").map(Number)),
  })).filter((line) => line.points.length);
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.setAttribute("aria-live", "off");
  chart.after(readout);
  const cursor = document.createElementNS(chart.namespaceURI, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("visibility", "hidden");
  const [bottom, top] = chart.dataset.y.split(" ").slice(2, 4);
  cursor.setAttribute("y1", top);
  cursor.setAttribute("y2", bottom);
  chart.append(cursor);
  const read = (event) => {
    const box = chart.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const visible = lines().filter((line) => line.path.style.display !== "none");
    if (!visible.length) return;
    const nearest = (line) => line.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
    const found = visible.map((line) => [line.name, nearest(line)]);
    const place = found[0][1][0];
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const values = found.map(([name, point]) => (found.length > 1 ? name + " " : "") + shown(y(point[1])));
    readout.textContent = chart.dataset.xLabel + " " + shown(x(place)) + ": " + chart.dataset.yLabel + " " + values.join(", ");
  };
  chart.addEventListener("pointermove", read);
  chart.addEventListener("pointerdown", read);
  chart.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
}
// Each mean is drawn over its single values: the slider computes it again from them, over more or fewer neighbours.
for (const label of document.querySelectorAll(".smoothing")) {
  label.hidden = false;
  label.querySelector("input").addEventListener("input", (event) => {
    const share = Number(event.target.value) / 100;
    for (const chart of label.parentElement.querySelectorAll("svg[data-x]")) {
      for (const faint of chart.querySelectorAll("path.faint")) {
        const colour = [...faint.classList].find((name) => name.startsWith("series-"));
        const mean = chart.querySelector("path." + colour + ":not(.faint)");
        const pieces = faint.getAttribute("d").split("M").filter(Boolean)
          .map((piece) => piece.split("L").map((point) => point.split(" ").map(Number)));
        const span = Math.round(share * pieces.reduce((sum, piece) => sum + piece.length, 0));
        mean.setAttribute("d", pieces.map((piece) => "M" + piece.map(([x], place) => {
          const near = piece.slice(Math.max(0, place - span), place + span + 1);
          return x.toFixed(1) + " " + (near.reduce((sum, point) => sum + point[1], 0) / near.length).toFixed(1);
        }).join("L")).join(""));
      }
    }
  });
}
