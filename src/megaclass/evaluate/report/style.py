"""The report's style sheet: colours are named once for light and once for dark, the charts use the names."""

STYLE = """
:root {
  --page: #ffffff; --panel: #ffffff; --ink: #1b1f24; --quiet: #5d6670; --rule: #dde1e6; --grid: #eceff2;
  --s0: #2a6db0; --s1: #d07a1e; --s2: #6f7f8f; --s3: #3f8f5f;
  --s4: #8a5bb5; --s5: #b8467a; --s6: #2b8c96; --s7: #8f7a2a; --wrong: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1a1e23; --ink: #e4e7ea; --quiet: #9aa4ae; --rule: #323941; --grid: #282e35;
    --s0: #6aaaea; --s1: #e7a04f; --s2: #97a5b3; --s3: #74c08f;
    --s4: #b993de; --s5: #e58ab3; --s6: #6cc3cc; --s7: #cbb45c; --wrong: #f2857d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Liberation Sans", Arial, sans-serif; -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 20px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 0 0 8px; }
h3 { font-size: 16px; margin: 20px 0 8px; } h4 { font-size: 14px; margin: 8px 0; }
section { margin-top: 44px; padding-top: 24px; border-top: 1px solid var(--rule); }
p { margin: 0 0 16px; color: var(--quiet); max-width: 46em; }
.quiet { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 16px; }
.tile { border: 1px solid var(--rule); border-radius: 6px; padding: 14px 16px; background: var(--panel); }
.tile-name { font-size: 14px; color: var(--quiet); }
.tile-value { font-size: 30px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile-value small { font-size: 18px; color: var(--quiet); }
.tile-value.long { font-size: 20px; line-height: 1.875; }
.tile-note { font-size: 13px; color: var(--quiet); font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin-bottom: 24px; }
table { border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { padding: 6px 0 6px 28px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
thead th, thead td { border-bottom: 1px solid var(--ink); }
tbody tr:last-child > * { border-bottom: 1px solid var(--ink); }
th[scope=row] { text-align: left; font-weight: 400; color: var(--quiet); padding-left: 0; }
tbody td.best { font-weight: 600; }
.charts, .columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 24px 32px; }
figure { margin: 0; min-width: 0; }
.three { grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
figcaption { font-size: 15px; margin-bottom: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; min-height: 20px; font-size: 13px; color: var(--quiet); }
.key { display: inline-block; width: 16px; height: 3px; margin-right: 7px; vertical-align: 4px; border-radius: 1px; }
.key.series-0 { background: var(--s0); }
.key.series-1 { background: var(--s1); }
.key.series-2 { background: var(--s2); }
.key.series-3 { background: var(--s3); }
.key.series-4 { background: var(--s4); }
.key.series-5 { background: var(--s5); }
.key.series-6 { background: var(--s6); }
.key.series-7 { background: var(--s7); }
.key.faint { opacity: 0.4; }
.key.marker { height: 0; border-top: 2px dashed var(--ink); border-radius: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; fill: var(--quiet); }
svg .tick { font-size: 12px; font-variant-numeric: tabular-nums; }
svg .axis-label { font-size: 12.5px; fill: var(--ink); }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .axis { stroke: var(--quiet); stroke-width: 1; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
svg .line.faint { stroke-width: 1; opacity: 0.4; }
svg .line.series-0 { stroke: var(--s0); }
svg .line.series-1 { stroke: var(--s1); }
svg .line.series-2 { stroke: var(--s2); }
svg .line.series-3 { stroke: var(--s3); }
svg .line.series-4 { stroke: var(--s4); }
svg .line.series-5 { stroke: var(--s5); }
svg .line.series-6 { stroke: var(--s6); }
svg .line.series-7 { stroke: var(--s7); }
svg .area { fill-opacity: 0.28; stroke-width: 1.3; stroke-linejoin: round; }
svg .area.series-0 { fill: var(--s0); stroke: var(--s0); } svg .area.series-1 { fill: var(--s1); stroke: var(--s1); }
svg .marker { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 4 3; }
[role=tablist] { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 4px 0 16px; border-bottom: 1px solid var(--rule); }
[role=tablist][hidden] { display: none; }
[role=tab] {
  font: inherit; color: var(--quiet); background: none; border: 0; border-bottom: 2px solid transparent;
  padding: 6px 0; margin-bottom: -1px; cursor: pointer;
}
[role=tab][aria-selected=true] { color: var(--ink); border-bottom-color: var(--s0); }
[role=tablist]:not([hidden]) ~ [role=tabpanel] > h3:first-child { display: none; }
.toggle { font: inherit; color: inherit; background: none; border: 0; padding: 0; }
.toggle:enabled { cursor: pointer; }
.toggle[aria-pressed=false] { opacity: 0.45; text-decoration: line-through; }
button:focus-visible { outline: 2px solid var(--s0); outline-offset: 2px; }
.time .bar { display: flex; height: 14px; border-radius: 3px; overflow: hidden; max-width: 46em; margin-bottom: 4px; }
.part-0 { background: var(--s0); } .part-1 { background: var(--s1); }
.failed { margin: 0 0 16px; padding-left: 20px; overflow-wrap: anywhere; }
.names { font-size: 12px; overflow-wrap: anywhere; }
.empty { padding: 48px 0; text-align: center; border: 1px dashed var(--rule); border-radius: 6px; }
.identities { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px 32px; }
.faces { display: flex; gap: 4px; }
.faces img {
  flex: 1 1 0; min-width: 0; max-width: 112px; width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 3px;
}
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 16px; }
.caption { display: flex; justify-content: space-between; gap: 8px; font-size: 13px; }
.caption, dd { font-variant-numeric: tabular-nums; }
.wrong { color: var(--wrong); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px 24px; margin: 0 0 16px; }
dt { font-size: 13px; color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
pre {
  margin: 0; padding: 16px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  border: 1px solid var(--rule); border-radius: 6px; background: var(--panel);
}
@media (max-width: 760px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 24px; }
  .charts, .columns, .identities { grid-template-columns: minmax(0, 1fr); }
  .pairs { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); gap: 8px; }
  .tile { padding: 10px; }
  .tile-name, .tile-value.long { font-size: 20px; line-height: 1.875; }
.tile-note { font-size: 12px; }
  .tile-value { font-size: 21px; } .tile-value small { font-size: 14px; }
  table { width: 100%; font-size: 14px; }
  th, td { padding-left: 10px; } th { white-space: normal; }
  .legend { min-height: 0; }
}
@media print { :root { --page: #fff; --panel: #fff; } section { break-inside: avoid; } }
"""
