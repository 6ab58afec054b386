// Draw each figure.chart with uPlot from its data-points. The other scripts are vendored.
(function () {
  "use strict";
  const drawn = new Map();
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => value === null || value === undefined ? "–" : value.toLocaleString("en", { notation: value >= 1e5 ? "compact" : "standard", maximumFractionDigits: 1 });
  function draw(figure) {
    const points = JSON.parse(figure.dataset.points), names = JSON.parse(figure.dataset.names);
    const last = points[0].at(-1) ?? Date.now() / 1e3, first = Math.min(points[0][0] ?? last, last - 600);
    const colours = [style("--accent"), style("--second")];
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const series = names.map((label, i) => ({ label, stroke: colours[i], width: 2, points: { show: points[0].length < 3 }, value: (_, v) => short(v) }));
    const chart = new uPlot({
      width: Math.max(200, figure.clientWidth), height: 180, cursor: { y: false }, legend: { live: true },
      tzDate: (s) => uPlot.tzDate(new Date(s * 1e3), "Etc/UTC"),
      scales: { x: { range: () => [first, last] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
      axes: [{ ...axis, space: 70, values: (_, all) => all.map((s) => new Date(s * 1e3).toISOString().slice(11, 16)) }, { ...axis, size: 60, values: (_, all) => all.map(short) }],
      series: [{ label: "UTC", value: "{HH}:{mm}:{ss}" }, ...series],
    }, points, figure);
    drawn.set(figure, chart);
  }
  function drawAll() {
    for (const [figure, chart] of drawn) if (!figure.isConnected) { chart.destroy(); drawn.delete(figure); }
    for (const figure of document.querySelectorAll("figure.chart")) if (!drawn.has(figure)) draw(figure);
  }
  addEventListener("resize", () => { for (const [figure, chart] of drawn) chart.setSize({ width: Math.max(200, figure.clientWidth), height: 180 }); });
  document.addEventListener("htmx:afterSwap", drawAll);
  drawAll();
})();
