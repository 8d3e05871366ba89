// Draws the charts of the page by uPlot: lines with bands, or stacked bars. Charts of one axis share their cursor.
"use strict";
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
addEventListener("unhandledrejection", (event) => { document.documentElement.dataset.error = String(event.reason); });
const Charts = (() => {
  let marks = [];  // [step, word]
  const HEIGHT = 176, FONT = "11px ui-sans-serif, system-ui, sans-serif", POINTS = 24;  // so few places have a dot each
  const SI = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const drawn = new Set();

  function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  function short(value, digits = 3) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, letter] of SI) if (size >= unit * 0.9995) return +(value / unit).toPrecision(digits) + letter;
    return size < 1e-3 ? value.toExponential(digits - 1).replace(/\.?0+e/, "e") : String(+value.toPrecision(digits));
  }

  function words(value, chart, digits = 3) {
    if (value === null || value === undefined) return "–";
    return (chart.unit === "%" ? +(value * 100).toPrecision(digits) + " %" : short(value, digits)).replace("-", "−");
  }

  function place(chart, i) { return chart.along.replace("#", chart.labels[i] ?? (chart.log_x ? short(chart.steps[i]) : chart.steps[i])); }

  // Columns as uPlot has them: the places, then each series with the edges of its band. Stacks are drawn from the top
  // layer down, each over the sum of those below it; on a logarithmic axis what is not positive lies at its foot.
  function columns(chart) {
    const foot = chart.log ? Math.min(...chart.series.flatMap((s) => [...s.values, ...(s.low ?? [])]).filter((v) => v > 0)) : 0;
    const shown = (values) => (chart.log ? values.map((v) => (v === null || v > 0 ? v : foot)) : values);
    if (!chart.stacked) return [chart.steps, ...chart.series.flatMap((s) => [s.values, ...(s.low ? [s.high, s.low] : [])].map(shown))];
    const sums = chart.steps.map(() => 0);
    return [chart.steps, ...chart.series.map((s) => s.values.map((v, i) => (sums[i] += v || 0))).reverse()];
  }

  function series(item) {
    const { chart } = item, all = [{}];
    const bands = [], paint = (s) => () => color(s.color);
    const value = (s, k) => (u, v, si, i) => {
      const { chart } = item, now = chart.series[k], at = i ?? chart.steps.length - 1, unit = chart.unit && chart.unit !== "%" ? ` ${chart.unit}` : "";
      const band = now.low && now.low[at] !== null ? ` [${words(now.low[at], chart)}, ${words(now.high[at], chart)}]` : "";
      return words(now.values[at], chart) + band + (chart.series.length === 1 ? unit : "");
    };
    const entries = chart.series.map((s, k) => [s, k]);
    for (const [s, k] of chart.stacked ? entries.reverse() : entries) {
      const one = { label: s.label, tint: s.color, stroke: paint(s), width: 1.8, spanGaps: Boolean(chart.joined), value: value(s, k), class: s.marker || "line" };
      if (chart.stacked) Object.assign(one, { fill: paint(s), width: 0, paths: uPlot.paths.bars({ size: [1, 46], gap: chart.steps.length < 40 ? 1 : 0 }), points: { show: false } });
      else one.points = {
        show: s.marker || chart.steps.length <= POINTS, size: 6, width: 1.6, fill: paint(s),
      };
      all.push(one);
      if (!s.low || chart.stacked) continue;
      bands.push({ series: [all.length, all.length + 1], fill: () => color(s.color) + "29" });
      for (let edge = 0; edge < 2; edge++) all.push({ label: "", class: "edge", width: 0, stroke: paint(s), points: { show: false } });
    }
    return { series: all, bands };
  }

  function vertical(item, low, high) {
    const { chart } = item;
    if (low === null) return [0, 1];
    if (chart.stacked) return [0, chart.high || (chart.unit === "%" ? 1 : high * 1.05 || 1)];
    if (chart.log) return uPlot.rangeLog(low, high, 10, true);
    const mark = chart.mark && high > chart.mark[0] / 4 ? [chart.mark[0]] : [];
    const least = Math.min(low, chart.low ?? low, ...mark), most = Math.max(high, chart.high ?? high, ...mark);
    const [first, last] = uPlot.rangeNum(least, most > least ? most : least + (Math.abs(least) || 1), 0.06, true);
    return [chart.low !== null && least >= chart.low ? chart.low : first, chart.high !== null && most <= chart.high ? chart.high : last];
  }

  function horizontal({ chart }) {
    const first = chart.steps[0], last = chart.steps[chart.steps.length - 1], room = chart.stacked ? (last - first) / Math.max(1, chart.steps.length - 1) / 2 || 0.5 : 0;
    return first === last && !room ? [first - (chart.log_x ? 0 : 0.5), first * (chart.log_x ? 2 : 1) + 0.5] : [first - room, last + room];
  }

  // What stands below the axis of named places: as many as have room.
  function named(u, { chart }) {
    let end = -Infinity;
    return chart.steps.filter((step, i) => {
      const half = 3.4 * chart.labels[i].length + 5, x = u.valToPos(step, "x"), fits = x - half > end;
      if (fits) end = x + half;
      return fits;
    });
  }

  function axes(item) {
    const common = { font: FONT, stroke: () => color("--dim"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { show: false } };
    const labels = item.chart.labels.length > 0, whole = item.chart.steps.every(Number.isInteger);
    const across = { ...common, size: 22, gap: 4, space: 44, grid: { show: false }, values: (u, at) => at.map((v) => (v === null ? "" : labels ? item.chart.labels[item.chart.steps.indexOf(v)] : whole && !item.chart.log_x ? String(v) : short(v))) };
    if (labels) Object.assign(across, { splits: (u) => named(u, item), filter: (u, at) => at });
    else if (whole && !item.chart.log_x) across.incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
    const upward = { ...common, size: 46, gap: 4, space: 28, values: (u, at) => {
      const known = at.filter((v) => v !== null), digits = [3, 4, 5, 6].find((d) => new Set(known.map((v) => words(v, item.chart, d))).size === known.length) || 7;
      return at.map((v) => (v === null ? "" : words(v, item.chart, digits)));
    } };
    return [across, upward];
  }

  // Dashed lines over the chart: a limit, the window of a fit, and steps of note.
  function annotate(u, { chart }) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
    const line = (from, to, name, x, y, align, ink, dash) => {
      ctx.save();
      Object.assign(ctx, { strokeStyle: ink, fillStyle: ink, lineWidth: ratio, font: FONT.replace("11", 11 * ratio), textAlign: align });
      ctx.setLineDash(dash.map((d) => d * ratio));
      ctx.beginPath(); ctx.moveTo(...from); ctx.lineTo(...to); ctx.stroke();
      ctx.fillText(name, x, y);
      ctx.restore();
    };
    const dim = color("--dim");
    if (chart.mark && chart.mark[0] >= u.scales.y.min && chart.mark[0] <= u.scales.y.max) {
      const y = u.valToPos(chart.mark[0], "y", true);
      line([left, y], [left + width, y], chart.mark[1], left + width, y - 4 * ratio, "right", dim, [3, 3]);
    }
    const steps = chart.along === "step #" ? marks : [];
    for (const [at, name] of steps) {
      const x = u.valToPos(at, "x", true), back = x > left + width - 8 * name.length * ratio;
      if (x < left - 1 || x > left + width + 1) continue;
      line([x, top], [x, top + height], chart.stacked ? "" : name, x + (back ? -4 : 4) * ratio, top + 9 * ratio, back ? "right" : "left", name === "collapse" ? color("--red") : dim, [6, 3]);
    }
  }

  function describe(chart) {
    const last = chart.steps.length - 1;
    const each = chart.series.map((s) => `${s.label} from ${words(s.values[0], chart)} to ${words(s.values[last], chart)}`);
    return `${chart.title}, ${place(chart, 0)} to ${place(chart, last)}: ${each.join("; ")}. Arrow keys read single values.`;
  }

  // What a drawing is made for: with another of these it is made anew.
  function form(chart) {
    const lines = chart.series.map((s) => [s.label, s.color, Boolean(s.low), s.marker]);
    return JSON.stringify([lines, chart.stacked, chart.log, chart.labels.length > 0, chart.steps.length <= POINTS]);
  }

  function make(item) {
    const { chart, plot } = item, last = () => item.chart.steps.length - 1, at = plot.parentElement.querySelector(".at");
    item.u?.destroy();
    item.form = form(chart);
    item.u = new uPlot({
      width: Math.max(220, plot.clientWidth), height: HEIGHT, padding: [8, 14, 0, 0], ...series(item), axes: axes(item),
      scales: { x: { time: false, distr: chart.log_x ? 3 : 1, range: () => horizontal(item) }, y: { distr: chart.log ? 3 : 1, range: (u, low, high) => vertical(item, low, high) } },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !chart.stacked, size: 6 }, sync: { key: chart.along, scales: ["x", null] } },
      legend: { markers: { width: 0, fill: (u, i) => `var(${u.series[i].tint})` }, mount: (u, legend) => plot.previousElementSibling.replaceChildren(legend) },
      hooks: {
        draw: [(u) => annotate(u, item)], ready: [(u) => u.setLegend({ idx: last() })],
        setLegend: [(u) => { at.textContent = place(item.chart, u.legend.idx ?? last()); }],
        setCursor: [(u) => { if (u.cursor.idx === null || u.cursor.idx === undefined) u.setLegend({ idx: last() }); }],
      },
    }, columns(chart), plot);
  }

  function update(item, chart) {
    const before = item.form;
    item.chart = chart;
    item.plot.setAttribute("aria-label", describe(chart));
    if (form(chart) !== before) return make(item);
    item.u.setData(columns(chart));
    if ((item.u.cursor.idx ?? null) === null) item.u.setLegend({ idx: chart.steps.length - 1 });
  }

  function read(item, event) {
    const { u, chart } = item, last = chart.steps.length - 1, move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const i = Math.min(last, Math.max(0, (u.cursor.idx ?? last) + move));
    u.setCursor({ left: u.valToPos(chart.steps[i], "x"), top: 0 }, true, true);
  }

  // Draws a chart into a figure; ``update`` takes it as it is later.
  function mount(plot, chart) {
    const item = { chart, plot };
    plot.setAttribute("aria-label", describe(chart));
    make(item);
    plot.addEventListener("keydown", (event) => read(item, event));
    plot.addEventListener("blur", () => item.u.setCursor({ left: -10, top: -10 }));
    drawn.add(item);
    return item;
  }

  function remove(item) { item.u.destroy(); drawn.delete(item); }

  function mark(found) { marks = found; }

  new ResizeObserver(() => drawn.forEach(({ u, plot }) => { if (u.width !== Math.max(220, plot.clientWidth)) u.setSize({ width: Math.max(220, plot.clientWidth), height: HEIGHT }); })).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(({ u }) => u.redraw(false)));
  return { mount, update, remove, color, mark, short };
})();
