"""The report's style sheet and script, both inline in its one file. The script only adds values under the pointer."""

STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1c2430; --soft: #5d6878; --rule: #e2e6ec;
  --a: #2563eb; --b: #e2660c; --c: #0f8a5f; --d: #8b3fc7; --alarm: #cc1f3b; }
@media (prefers-color-scheme: dark) { :root { --page: #11151b; --card: #1a2029; --text: #e4e9f0; --soft: #98a4b5;
  --rule: #2c3541; --a: #6ea1ff; --b: #ff9a4d; --c: #4fd1a1; --d: #c792ff; --alarm: #ff6b81; }
  .heat image { filter: brightness(.9); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 18px; margin: 34px 0 12px; } h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 4px 0; color: var(--soft); max-width: 80ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; margin-top: 20px; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tile b + span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px; }
.wide { grid-column: 1 / -1; overflow-x: auto; } .wide .chart { min-width: 620px; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .cursor { stroke: var(--soft); visibility: hidden; }
text { fill: var(--text); font-size: 13px; } .tick { fill: var(--soft); font-size: 12px; } .label { fill: var(--soft); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.band { opacity: .3; stroke-width: 1; } .flag { fill: var(--alarm); }
.line.a, .band.a { stroke: var(--a); } .line.b, .band.b { stroke: var(--b); }
.line.c, .band.c { stroke: var(--c); } .line.d, .band.d { stroke: var(--d); }
.band.a, .dot.a { fill: var(--a); } .band.b, .dot.b { fill: var(--b); }
.band.c, .dot.c { fill: var(--c); } .band.d, .dot.d { fill: var(--d); }
.heat image { image-rendering: pixelated; } .scale { max-width: 600px; }
.legend { display: flex; gap: 18px; font-size: 13px; color: var(--soft); padding-left: 62px; }
.legend i { display: inline-block; width: 16px; height: 4px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
i.a { background: var(--a); } i.b { background: var(--b); } i.c { background: var(--c); } i.d { background: var(--d); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.bad { color: var(--alarm); font-weight: 700; }
.config { columns: 330px; column-gap: 26px; }
.config section { break-inside: avoid; margin-bottom: 16px; }
.config div { display: flex; gap: 12px; justify-content: space-between; border-bottom: 1px solid var(--rule);
  font-size: 13px; }
.config code { overflow-wrap: anywhere; text-align: right; } .config .set { font-weight: 700; }
#tip { position: fixed; pointer-events: none; display: none; background: var(--text); color: var(--page);
  font-size: 12.5px; padding: 5px 9px; border-radius: 6px; white-space: pre; z-index: 9;
  font-variant-numeric: tabular-nums; }
"""

# Geometry (L, R, T, B) is that of charts.py, filled in by the report.
SCRIPT = """
const G = {geometry}, COLORS = {palette}, tip = document.getElementById("tip");
const show = (event, text) => {
  tip.textContent = text; tip.style.display = "block";
  const left = event.clientX + 16, room = window.innerWidth - tip.offsetWidth - 8;
  tip.style.left = Math.min(left, room) + "px"; tip.style.top = event.clientY + 14 + "px";
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] > x) high = mid; else low = mid; }
  return x - xs[low] > xs[high] - x ? high : low;
};
const format = (value) => value === null ? "not finite"
  : Math.abs(value) >= 1000 ? value.toLocaleString("en") : String(+value.toPrecision(5));
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot);
  const cursor = svg.querySelector(".cursor"), image = svg.querySelector("image");
  let pixels = null;
  if (image) {
    const picture = new Image();
    picture.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = plot.columns; canvas.height = plot.experts;
      const context = canvas.getContext("2d");
      context.drawImage(picture, 0, 0);
      pixels = context.getImageData(0, 0, plot.columns, plot.experts).data;
    };
    picture.src = image.getAttribute("href");
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const scale = Math.min(box.width / view.width, box.height / view.height);
    const px = (event.clientX - box.left - (box.width - view.width * scale) / 2) / scale;
    const py = (event.clientY - box.top - (box.height - view.height * scale) / 2) / scale;
    const across = (px - G.L) / (view.width - G.L - G.R), down = (py - G.T) / (view.height - G.T - G.B);
    if (across < 0 || across > 1 || down < 0 || down > 1) { tip.style.display = cursor.style.visibility = ""; return; }
    if (!image) {
      const x = plot.x0 + across * (plot.x1 - plot.x0);
      const lines = plot.series.map((s) => {
        const i = nearest(s.x, x);
        return [s.x[i], s.name + "  " + format(s.y[i])];
      });
      const at = lines[0][0], span = plot.x1 - plot.x0 || 1;
      cursor.setAttribute("x1", G.L + (at - plot.x0) / span * (view.width - G.L - G.R));
      cursor.setAttribute("x2", cursor.getAttribute("x1"));
      cursor.style.visibility = "visible";
      show(event, "step " + Math.round(at) + "\\n" + lines.map(([step, text]) =>
        text + (step === at ? "" : "  (step " + Math.round(step) + ")")).join("\\n"));
      return;
    }
    const column = Math.min(plot.columns - 1, Math.floor(across * plot.columns));
    const expert = Math.min(plot.experts - 1, Math.floor(down * plot.experts));
    const first = plot.x0 + column * plot.width, last = first + plot.width - 1;
    let load = "";
    if (pixels) {
      const at = 4 * (expert * plot.columns + column);
      const level = pixels[at + 3] ? COLORS.findIndex((c, i) => i && c.every((v, k) => v === pixels[at + k])) : 0;
      load = level === 0 ? "not recorded" : level === 1 ? "no token" :
        "load " + Math.pow(2, ((level - 2) / 253 * 2 - 1) * G.range).toPrecision(2) + " of the mean";
    }
    const steps = first === last ? "step " + first : "steps " + first + " to " + last;
    show(event, "expert " + expert + "\\n" + steps + "\\n" + load);
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = cursor.style.visibility = ""; });
}
"""
