// Draws what workers did and when: a lane for each, on a canvas. Drag to look closer, double-click for all.
"use strict";
const Gantt = (() => {
  const COLORS = {
    prefill: "--purple", decode: "--blue", publish: "--pink", grade: "--orange", pack: "--gold",
    train: "--teal", save: "--grey", start: "--grey", wait: "--grey",
  };
  const THIN = new Set(["wait", "start"]);  // lines, not bars: nothing comes of them
  const AXIS = 22, RIGHT = 44, FIELDS = 5, CLOSEST = 5;  // pixels; numbers of a span; milliseconds
  const TICKS = [1, 10, 100, 1000, 60000, 3600000].flatMap((unit) => (unit < 1000 ? [1, 2, 5] : [1, 2, 5, 10, 15, 30]).map((n) => n * unit));
  const two = (n) => String(n).padStart(2, "0"), { color } = Charts;

  function words(ms) {
    if (Math.abs(ms) < 1000) return `${Math.round(ms)} ms`;
    return Math.abs(ms) < 60000 ? `${+(ms / 1000).toPrecision(3)} s` : `${Math.floor(ms / 60000)} min ${two(Math.round((ms % 60000) / 1000))} s`;
  }

  // A place on the axis: 1:05, 2:01:05, 5.25 s; with a minus where the picture counts from its end.
  function clock(ms, step) {
    const sign = ms < 0 ? "−" : "", size = Math.abs(ms), s = Math.floor(size / 1000 + 1e-6), h = Math.floor(s / 3600);
    if (step < 1000) return `${sign}${+(size / 1000).toFixed(3)} s`;
    return sign + (h ? `${h}:${two(Math.floor(s / 60) % 60)}` : Math.floor(s / 60)) + `:${two(s % 60)}`;
  }

  function mount(figure) {
    const canvas = figure.querySelector("canvas"), at = figure.querySelector(".at"), legend = figure.querySelector(".legend");
    const note = figure.querySelector("figcaption p"), pen = canvas.getContext("2d");
    let picture = null, from = 0, to = 1, dragged = null, hovered = null, left = 80, row = 20, zoomed = false;

    const length = () => picture.seconds * 1000;
    const wide = () => Math.max(1, canvas.clientWidth - left - RIGHT);
    const x = (ms) => left + ((ms - from) / (to - from)) * wide();
    const time = (px) => from + ((px - left) / wide()) * (to - from);
    const px = (event) => event.clientX - canvas.getBoundingClientRect().left;

    function eachSpan(lane, visit) {
      for (let i = 0; i < lane.spans.length; i += FIELDS) {
        const [kind, start, ms, step, amount] = lane.spans.slice(i, i + FIELDS);
        if (start + ms >= from && start <= to) visit({ kind: picture.kinds[kind], start, ms, step, amount });
      }
    }

    function draw() {
      if (!picture) return;
      const ratio = devicePixelRatio, width = canvas.clientWidth, lanes = picture.lanes;
      row = lanes.length <= 12 ? 24 : lanes.length <= 40 ? 16 : 9;
      const height = lanes.length * row + AXIS, thick = row >= 16 ? row - 6 : row - 2;
      canvas.style.height = `${height}px`;
      [canvas.width, canvas.height] = [width * ratio, height * ratio];
      pen.scale(ratio, ratio);
      Object.assign(pen, { font: "11px ui-sans-serif, system-ui, sans-serif", textBaseline: "middle" });
      left = Math.min(width * 0.3, 10 + Math.max(...lanes.map((lane) => pen.measureText(lane.worker).width)));
      drawAxis(height - AXIS);
      const inks = Object.fromEntries(Object.entries(COLORS).map(([kind, name]) => [kind, color(name)])), dim = color("--dim");
      lanes.forEach((lane, i) => {
        const middle = i * row + row / 2;
        pen.fillStyle = dim;
        pen.textAlign = "right";
        pen.fillText(lane.worker, left - 8, middle);
        pen.textAlign = "left";
        pen.fillText(`${Math.round(lane.used * 100)} %`, width - RIGHT + 8, middle);
        eachSpan(lane, ({ kind, start, ms }) => {
          const first = Math.max(left, x(start)), size = Math.max(0.6, Math.min(width - RIGHT, x(start + ms)) - first);
          const high = THIN.has(kind) ? Math.max(2, thick / 6) : thick;
          pen.fillStyle = inks[kind];
          pen.fillRect(first, middle - high / 2, size > 3 ? size - 0.5 : size, high);
        });
      });
      if (!dragged) return;
      pen.globalAlpha = 0.12;
      pen.fillStyle = color("--ink");
      pen.fillRect(Math.min(dragged.from, dragged.to), 0, Math.abs(dragged.to - dragged.from), height - AXIS);
      pen.globalAlpha = 1;
    }

    function drawAxis(bottom) {
      const zero = picture.end ? length() : 0, step = TICKS.find((one) => (to - from) / one <= Math.max(2, wide() / 90)) || 86400000;
      const [dim, grid] = ["--dim", "--grid"].map(color);
      pen.textAlign = "center";
      for (let tick = Math.ceil((from - zero) / step) * step; tick + zero <= to + 1e-6; tick += step) {
        const place = x(tick + zero);
        pen.fillStyle = grid;
        pen.fillRect(place, 0, 1, bottom);
        pen.fillStyle = dim;
        pen.fillText(picture.end && tick === 0 ? picture.end : clock(tick, step), Math.min(canvas.clientWidth - 20, place), bottom + 13);
      }
      Object.assign(pen, { strokeStyle: dim, lineWidth: 1 });
      pen.setLineDash([1, 3]);
      pen.beginPath();
      let free = -Infinity;
      for (const [, , stop] of picture.steps) {
        const place = x(stop);
        if (place < left || place > left + wide() || place - free < 7) continue;
        free = place;
        pen.moveTo(place, 0);
        pen.lineTo(place, bottom);
      }
      pen.stroke();
      pen.setLineDash([]);
    }

    // What the colours mean, with the seconds that are in view.
    function legendOf() {
      const sums = {};
      for (const lane of picture.lanes) eachSpan(lane, ({ kind, start, ms }) => {
        const seen = Math.min(to, start + ms) - Math.max(from, start);
        if (seen > 0) sums[kind] = (sums[kind] || 0) + seen;
      });
      legend.replaceChildren(...picture.kinds.filter((kind) => sums[kind]).map((kind) => {
        const [entry, swatch, sum] = ["span", "i", "b"].map((tag) => document.createElement(tag));
        swatch.style.background = `var(${COLORS[kind]})`;
        if (THIN.has(kind)) swatch.className = "thin";
        sum.textContent = words(sums[kind]);
        entry.append(swatch, kind, sum);
        return entry;
      }));
      const most = picture.lanes.map((lane) => `${lane.worker} worked ${Math.round(lane.used * 100)} %`).slice(0, 12).join(", ");
      canvas.setAttribute("aria-label", `${picture.name || "timeline"}, ${words(length())}: ${most}. Arrow keys move, plus and minus zoom, Home shows all.`);
      figure.dataset.window = `${Math.round(from)}-${Math.round(to)}`;
      read();
    }

    // What is under the pointer: a span, else a step, else how much is shown.
    function read() {
      const { lane, span, ms } = hovered ?? {}, step = picture.steps.find(([, start, stop]) => start <= ms && ms < stop);
      if (!span) at.textContent = step ? `step ${step[0]} · ${words(step[2] - step[1])}` : `${words(to - from)} shown`;
      else {
        const amount = span.amount ? `, ${span.amount.toLocaleString("en")} ${span.kind === "publish" ? "bytes" : "tokens"}` : "";
        at.textContent = `${lane.worker} · ${span.kind} ${words(span.ms)}${span.step >= 0 ? `, step ${span.step}` : ""}${amount}`;
      }
    }

    function hover(event) {
      const lane = picture.lanes[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / row)];
      const ms = time(px(event)), near = (to - from) / 400;
      let span = null;
      if (lane) eachSpan(lane, (one) => { if (one.start - near <= ms && ms <= one.start + one.ms + near && (!span || one.start <= ms)) span = one; });
      hovered = { lane, span, ms };
      read();
    }

    function go(start, stop) {
      const size = Math.min(length(), Math.max(CLOSEST, stop - start));
      from = Math.min(Math.max(0, start), length() - size);
      to = from + size;
      zoomed = size < length() - 1e-6;
      draw();
      legendOf();
    }

    canvas.addEventListener("pointermove", (event) => {
      if (!picture) return;
      hover(event);
      if (dragged) { dragged.to = px(event); draw(); }
    });
    canvas.addEventListener("pointerleave", () => { hovered = null; if (picture) read(); });
    canvas.addEventListener("pointerdown", (event) => {
      dragged = { from: px(event), to: px(event) };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => {
      const drag = dragged;
      dragged = null;
      if (drag && Math.abs(drag.to - drag.from) > 5) go(...[time(drag.from), time(drag.to)].sort((a, b) => a - b));
    });
    canvas.addEventListener("pointercancel", () => { dragged = null; });
    canvas.addEventListener("dblclick", () => go(0, length()));

    const move = (first, last) => go(from + first * (to - from), to + last * (to - from));
    const MOVES = { back: () => move(-0.5, -0.5), on: () => move(0.5, 0.5), in: () => move(0.25, -0.25), out: () => move(-0.5, 0.5), all: () => go(0, length()) };
    for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", () => picture && MOVES[button.dataset.do]());
    canvas.addEventListener("keydown", (event) => {
      const key = { ArrowLeft: "back", ArrowRight: "on", "+": "in", "=": "in", "-": "out", Home: "all" }[event.key];
      if (!key || !picture) return;
      event.preventDefault();
      MOVES[key]();
    });

    // Shows a picture; one that goes on keeps the part that is looked at.
    function show(found, keep = false) {
      const before = picture;
      picture = found;
      if (!picture) return;
      const thinned = picture.coarse ? "Short spans are joined, the seconds of each kind kept. " : "";
      const hidden = picture.hidden ? `${picture.hidden} more workers have no room. ` : "";
      note.textContent = `${thinned}${hidden}Thin lines: waiting or starting; empty: idle; dotted: a step ends; right: time worked. Drag to look closer, double-click for all.`;
      const moved = keep && zoomed && before ? (before.start - picture.start) * 1000 : null;
      if (moved !== null && from + moved >= 0) go(from + moved, to + moved); else go(0, length());
    }

    new ResizeObserver(() => draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return { show };
  }

  return { mount };
})();
