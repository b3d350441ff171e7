"""Style sheet and script of the report page."""

from __future__ import annotations

CSS = """
:root { color-scheme: light; --ink: #24292f; --soft: #59636e; --rule: #dfe3e8; --paper: #fbfbfa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 28px 64px; }
h1 { font-size: 27px; line-height: 1.25; font-weight: 650; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 20px; font-weight: 650; margin: 32px 0 14px; padding-top: 14px;
  border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
h3 { font-size: 15px; font-weight: 650; margin: 0; }
p { margin: 0 0 10px; max-width: 78ch; }
.soft, figcaption { color: var(--soft); }
.status { color: var(--soft); margin-bottom: 22px; }
.warn { border-left: 3px solid #d9822b; background: #fdf5ea; padding: 8px 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 1px;
  padding: 1px; margin: 0 0 24px; }
.tiles div { background: #fff; padding: 11px 14px 12px; box-shadow: 0 0 0 1px var(--rule); }
.tiles dt { font-size: 12.5px; color: var(--soft); line-height: 1.35; }
.tiles dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles .first dd { color: #1b6ca8; }
.setup { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0 0 18px;
  font-size: 14px; }
.setup dt { color: var(--soft); }
.setup dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr));
  gap: 26px 28px; }
.maps { grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 18px 20px; }
figure { margin: 0; min-width: 0; display: flex; flex-direction: column; }
figcaption { font-size: 13.5px; line-height: 1.45; margin: 2px 0 6px; max-width: 70ch; }
.plot { width: 100%; margin-top: auto; }
.remark { padding: 12px 0; }
.scale { max-width: 520px; margin: 10px 0 18px; font-size: 12.5px; color: var(--soft); }
.scale .bar { height: 14px; border: 1px solid var(--rule); }
.scale .ticks { position: relative; height: 20px; font-variant-numeric: tabular-nums; }
.scale .ticks span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.scale .ticks span:first-child { transform: none; }
.scale .ticks span:last-child { transform: translateX(-100%); }
.table { overflow-x: auto; margin: 0 0 18px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 18px 5px 0; text-align: left; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: anywhere; }
thead th { font-weight: 650; vertical-align: bottom; min-width: 90px; }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; }
td.best { font-weight: 700; }
.key { position: sticky; top: 0; z-index: 5; background: rgba(251, 251, 250, 0.96); padding: 8px 0;
  border-bottom: 1px solid var(--rule); display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 14px; }
.key label { display: inline-flex; align-items: center; gap: 7px; cursor: pointer; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; flex: none; }
details { margin: 0 0 12px; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; }
pre { font: 12.5px/1.5 ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace;
  background: #fff; border: 1px solid var(--rule); padding: 12px 14px; overflow-x: auto; }
footer { margin-top: 52px; border-top: 1px solid var(--rule); padding-top: 12px; font-size: 13px;
  color: var(--soft); }
@media print { .key { position: static; } figure { break-inside: avoid; } }
"""

SCRIPT = """
const options = { responsive: true, displaylogo: false, displayModeBar: "hover",
  modeBarButtons: [["toImage", "resetScale2d"]] };
const hidden = new Set();
const shown = trace => !hidden.has(trace.meta);

function draw(box) {
  if (box.dataset.drawn) return;
  box.dataset.drawn = "yes";
  const figure = JSON.parse(document.getElementById(box.dataset.figure).textContent);
  for (const trace of figure.data) trace.visible = shown(trace);
  Plotly.newPlot(box, figure.data, figure.layout, options);
}

// Charts are drawn as they come into view, one at a time: a page may hold hundreds.
const boxes = document.querySelectorAll(".plot");
const waiting = [];
function drawNext() {
  draw(waiting.shift());
  if (waiting.length) setTimeout(drawNext);
}
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    if (waiting.push(entry.target) === 1) setTimeout(drawNext);
  }
}, { rootMargin: "800px" });
boxes.forEach(box => watcher.observe(box));
addEventListener("beforeprint", () => boxes.forEach(draw));

for (const input of document.querySelectorAll(".key input")) {
  input.addEventListener("change", () => {
    const run = Number(input.value);
    if (input.checked) hidden.delete(run); else hidden.add(run);
    for (const box of boxes) {
      if (box.dataset.drawn && box.closest(".shared")) {
        Plotly.restyle(box, { visible: box.data.map(shown) });
      }
    }
  });
}
"""
