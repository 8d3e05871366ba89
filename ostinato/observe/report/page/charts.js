// Draws the charts of the page as SVG: lines with bands, or stacked bars. One cursor for all of them.
"use strict";
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
addEventListener("unhandledrejection", (event) => { document.documentElement.dataset.error = String(event.reason); });
const Charts = (() => {
  const charts = JSON.parse(document.getElementById("chart-data")?.textContent ?? "{}");
  const marks = JSON.parse(document.getElementById("plots")?.dataset.marks ?? "[]");  // [step, word]
  const HEIGHT = 176, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;
  const drawn = [];
  let pointed = null;  // [place, axis] under the cursor

  function node(tag, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function niceStep(range, count, factors = [1, 2, 2.5, 5]) {
    const raw = range / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    return power * (factors.find((m) => m * power >= raw * 0.999) || 10);
  }

  function linearTicks(low, high, count, factors) {
    const step = niceStep(high - low, count, factors), ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return ticks;
  }

  const SI = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function short(value, digits = 3) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, letter] of SI) if (size >= unit * 0.9995) return +(value / unit).toPrecision(digits) + letter;
    return size < 1e-3 ? value.toExponential(digits - 1).replace(/\.?0+e/, "e") : String(+value.toPrecision(digits));
  }

  function words(value, chart, digits) {
    if (value === null || value === undefined) return "–";
    return (chart.unit === "%" ? +(value * 100).toPrecision(digits || 3) + " %" : short(value, digits)).replace("-", "−");
  }

  function known(values) { return values.filter((v) => v !== null && v !== undefined); }

  function totals(chart) { return chart.steps.map((_, i) => chart.series.reduce((sum, s) => sum + (s.values[i] || 0), 0)); }

  function domain(chart) {
    if (chart.stacked) return [0, chart.high || (chart.unit === "%" ? 1 : Math.max(...totals(chart)) || 1)];
    const all = chart.series.flatMap((s) => known([...s.values, ...(s.low || []), ...(s.high || [])]));
    if (chart.log) {
      const positive = all.filter((v) => v > 0);
      if (!positive.length) return [1e-8, 1];
      const low = Math.floor(Math.log10(Math.min(...positive))), high = Math.ceil(Math.log10(Math.max(...positive)));
      return [10 ** low, 10 ** Math.max(high, low + 1)];
    }
    if (chart.mark) all.push(...(Math.max(...all) > chart.mark[0] / 4 ? [chart.mark[0]] : []));
    if (chart.low !== null) all.push(chart.low);
    if (chart.high !== null) all.push(chart.high);
    let low = Math.min(...all), high = Math.max(...all);
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {  // a constant: give it room
      const room = (Math.abs(high) || 1) * 0.05;
      [low, high] = [chart.low === null ? low - room : low, high + room];
    }
    const step = niceStep(high - low, 4);
    return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }

  function scales(chart, width) {
    const [low, high] = domain(chart), first = chart.steps[0], last = chart.steps[chart.steps.length - 1];
    const bar = chart.stacked ? (width - LEFT - RIGHT) / chart.steps.length : 0;
    const along = chart.log_x ? Math.log : (step) => step, span = along(last) - along(first);
    const room = width - LEFT - RIGHT - bar;
    const flat = (v) => (v - low) / (high - low);
    const steep = (v) => (v > 0 ? Math.log(v / low) / Math.log(high / low) : 0);
    const part = chart.log ? steep : flat;
    return {
      low, high, bar,
      x: (step) => LEFT + bar / 2 + (first === last ? room / 2 : (room * (along(step) - along(first))) / span),
      y: (v) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, Math.max(0, part(v)))),
    };
  }

  // What stands below the horizontal axis: [place, name], as many as have room.
  function places(chart, scale, width) {
    const first = chart.steps[0], last = chart.steps[chart.steps.length - 1];
    if (first === last) return [[first, chart.labels[0] ?? first]];
    if (!chart.labels.length && !chart.log_x) {
      return linearTicks(first, last, Math.min(6, width / 48), [1, 2, 5]).filter(Number.isInteger).map((step) => [step, step]);
    }
    const low = Math.ceil(Math.log10(first) - 1e-9), high = Math.floor(Math.log10(last) + 1e-9);
    const wanted = chart.labels.length
      ? chart.labels.map((name, i) => [chart.steps[i], name])
      : Array.from({ length: high - low + 1 }, (_, i) => [10 ** (low + i), short(10 ** (low + i)).replace("-", "−")]);
    let end = -Infinity;
    return wanted.filter(([step, name]) => {
      const half = 3.4 * name.length + 4, fits = scale.x(step) - half > end;
      if (fits) end = scale.x(step) + half;
      return fits;
    });
  }

  // Steps of note in a chart over steps.
  function milestones(svg, chart, scale, width) {
    if (chart.along !== "step #") return;
    for (const [step, word] of marks.filter(([at]) => at >= chart.steps[0] && at <= chart.steps[chart.steps.length - 1])) {
      const x = scale.x(step), left = x > width - 60;
      node("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: `step ${word}` }, svg);
      if (!chart.stacked) node("text", { x: x + (left ? -4 : 4), y: TOP + 8, "text-anchor": left ? "end" : "start", class: `milestone ${word}` }, svg, word);
    }
  }

  function axes(svg, chart, scale, width) {
    const decades = Math.round(Math.log10(scale.high / scale.low)), every = Math.ceil(decades / 4);
    const ticks = chart.log
      ? Array.from({ length: Math.floor(decades / every) + 1 }, (_, i) => scale.low * 10 ** (i * every))
      : linearTicks(scale.low, scale.high, 4);
    const labels = (digits) => ticks.map((tick) => words(tick, chart, digits));
    const digits = [3, 4, 5, 6].find((d) => new Set(labels(d)).size === ticks.length) || 7;
    for (const tick of ticks) {
      const y = scale.y(tick);
      node("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "grid" }, svg);
      node("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, svg, words(tick, chart, digits));
    }
    node("line", { x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }, svg);
    for (const [step, name] of places(chart, scale, width)) node("text", { x: scale.x(step), y: HEIGHT - 6, "text-anchor": "middle" }, svg, name);
    if (chart.mark && chart.mark[0] >= scale.low && chart.mark[0] <= scale.high) {
      const y = scale.y(chart.mark[0]);
      node("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "mark" }, svg);
      node("text", { x: width - RIGHT, y: y - 4, "text-anchor": "end" }, svg, chart.mark[1]);
    }
  }

  // Where something begins or ends along the horizontal axis, its name at the top, on the side that has room.
  function edges(svg, chart, scale, width) {
    for (const [step, name] of chart.edges || []) {
      const x = scale.x(step), left = x > width - 8 * name.length - 20;
      node("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM, class: "mark edge" }, svg);
      node("text", { x: x + (left ? -4 : 4), y: TOP + 8, "text-anchor": left ? "end" : "start" }, svg, name);
    }
  }

  const GLYPHS = { dot: "●", ring: "○", cross: "×" };

  function marker(svg, s, cx, cy) {
    const x = Number(cx), y = Number(cy), color = `var(${s.color})`;
    if (s.marker === "cross")
      node("path", { d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`, class: "point cross", style: `stroke: ${color}` }, svg);
    else if (s.marker === "ring")
      node("circle", { cx, cy, r: 2.8, class: "point ring", style: `stroke: ${color}` }, svg);
    else node("circle", { cx, cy, r: 2.6, style: `fill: ${color}` }, svg);
  }

  // Runs of steps that have a value: a gap in the data is a gap in the line.
  function runs(values) {
    const found = [];
    values.forEach((value, i) => {
      if (value === null || value === undefined) return;
      const last = found[found.length - 1];
      if (last && last[last.length - 1] === i - 1) last.push(i); else found.push([i]);
    });
    return found;
  }

  function lines(svg, chart, scale) {
    const point = (i, v) => `${scale.x(chart.steps[i]).toFixed(1)},${scale.y(v).toFixed(1)}`;
    for (const s of chart.series) {
      if (!s.low) continue;
      for (const run of runs(s.low)) {
        const edge = [...run.map((i) => point(i, s.high[i])), ...run.reverse().map((i) => point(i, s.low[i]))];
        node("polygon", { points: edge.join(" "), class: "band", style: `fill: var(${s.color})` }, svg);
      }
    }
    for (const s of chart.series) {
      for (const run of runs(s.values)) {
        const line = { points: run.map((i) => point(i, s.values[i])).join(" "), class: "line", style: `stroke: var(${s.color})` };
        node("polyline", s.dashed ? { ...line, "stroke-dasharray": "7 4" } : line, svg);
        if (chart.steps.length > 24 && run.length > 1) continue;
        for (const i of run) {
          const [cx, cy] = point(i, s.values[i]).split(",");
          if (s.low && s.low[i] !== null && run.length === 1)  // a band without width
            node("line", { x1: cx, x2: cx, y1: scale.y(s.low[i]), y2: scale.y(s.high[i]), style: `stroke: var(${s.color}); opacity: .45` }, svg);
          marker(svg, s, cx, cy);
        }
      }
    }
  }

  function bars(svg, chart, scale) {
    const width = Math.max(0.5, Math.min(scale.bar > 8 ? scale.bar - 1.5 : scale.bar + 0.4, 46));
    chart.steps.forEach((step, i) => {
      let below = 0;
      for (const s of chart.series) {
        const value = s.values[i] || 0, top = scale.y(below + value), height = scale.y(below) - top;
        if (height > 0) node("rect", { x: scale.x(step) - width / 2, y: top, width, height, style: `fill: var(${s.color})` }, svg);
        below += value;
      }
    });
  }

  function place(chart, index) {
    const step = chart.steps[index];
    return chart.along.replace("#", chart.labels[index] ?? (chart.log_x ? short(step) : step));
  }

  // The legend is the read-out: the values at the cursor, or those of the last step.
  function legend({ box, at, chart }, index) {
    at.textContent = place(chart, index);
    box.replaceChildren(...chart.series.map((s) => {
      const entry = document.createElement("span"), swatch = document.createElement("i"), value = document.createElement("b");
      if (s.marker) Object.assign(swatch, { className: "glyph", textContent: GLYPHS[s.marker] }).style.color = `var(${s.color})`;
      else if (s.dashed) Object.assign(swatch, { className: "dashed" }).style.borderColor = `var(${s.color})`;
      else swatch.style.background = `var(${s.color})`;
      const band = s.low && s.low[index] !== null && s.low[index] !== undefined ? ` [${words(s.low[index], chart)}, ${words(s.high[index], chart)}]` : "";
      const unit = chart.unit && chart.unit !== "%" ? " " + chart.unit : "";
      value.textContent = words(s.values[index], chart) + band + (chart.series.length === 1 ? unit : "");
      entry.append(swatch, s.label, value);
      return entry;
    }));
  }

  function draw(item) {
    const { chart, plot } = item, width = Math.max(220, plot.clientWidth);
    if (width === item.width) return;
    item.width = width;
    const svg = node("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true" });
    item.scale = scales(chart, width);
    axes(svg, chart, item.scale, width);
    (chart.stacked ? bars : lines)(svg, chart, item.scale);
    milestones(svg, chart, item.scale, width);
    edges(svg, chart, item.scale, width);
    item.cursor = node("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" }, svg);
    plot.replaceChildren(svg);
    legend(item, chart.steps.length - 1);
  }

  function nearest(steps, wanted) {
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
    return best;
  }

  // Shows one place in every chart that has the same axis; null lets go.
  function point(step, along) {
    pointed = step === null ? null : [step, along];
    for (const item of drawn.filter((one) => one.chart.along === along)) {
      const { chart, cursor, scale } = item, last = chart.steps.length - 1;
      const index = step === null ? last : nearest(chart.steps, step);
      legend(item, index);
      cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
      const x = scale.x(chart.steps[index]);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      item.index = index;
    }
  }

  function watch(item) {
    const { plot } = item;
    plot.addEventListener("pointermove", (event) => {
      const { chart } = item, x = event.clientX - plot.getBoundingClientRect().left;
      point(chart.steps.reduce((best, step) => (Math.abs(item.scale.x(step) - x) < Math.abs(item.scale.x(best) - x) ? step : best)), chart.along);
    });
    plot.addEventListener("pointerleave", () => point(null, item.chart.along));
    plot.addEventListener("blur", () => point(null, item.chart.along));
    plot.addEventListener("keydown", (event) => {
      const { chart } = item, move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      point(chart.steps[Math.min(chart.steps.length - 1, Math.max(0, (item.index ?? chart.steps.length - 1) + move))], chart.along);
    });
  }

  function describe(chart) {
    const last = chart.steps.length - 1;
    const each = chart.series.map((s) => `${s.label} from ${words(s.values[0], chart)} to ${words(s.values[last], chart)}`);
    return `${chart.title}, ${place(chart, 0)} to ${place(chart, last)}: ${each.join("; ")}. Arrow keys read single values.`;
  }

  // Draws a chart into a figure; what comes back takes the chart as it is later.
  function mount(plot, chart) {
    const item = { chart, plot, box: plot.previousElementSibling, at: plot.parentElement.querySelector(".at"), width: 0 };
    update(item, chart);
    watch(item);
    drawn.push(item);
    return item;
  }

  function update(item, chart) {
    Object.assign(item, { chart, width: 0 });
    item.plot.setAttribute("aria-label", describe(chart));
    draw(item);
    if (pointed && pointed[1] === chart.along) point(...pointed);
  }

  function remove(item) { drawn.splice(drawn.indexOf(item), 1); }

  for (const plot of document.querySelectorAll(".plot")) mount(plot, charts[plot.dataset.chart]);
  new ResizeObserver(() => drawn.forEach(draw)).observe(document.body);
  document.documentElement.dataset.charts = drawn.length;
  return { mount, update, remove };
})();
