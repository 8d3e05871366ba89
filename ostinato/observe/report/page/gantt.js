// Draws what workers did and when: a lane for each, on a canvas. Drag to look closer, double-click for all.
"use strict";
const Gantt = (() => {
  const COLORS = {
    prefill: "--purple", decode: "--blue", publish: "--pink", grade: "--orange", pack: "--gold",
    train: "--teal", save: "--grey", start: "--grey", wait: "--grey",
  };
  const THIN = new Set(["wait", "start"]);  // lines, not bars: nothing comes of them
  const AXIS = 22, RIGHT = 44, FIELDS = 5, CLOSEST = 5;  // pixels; numbers of a span; milliseconds

  function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  function words(ms, digits = 3) {
    if (Math.abs(ms) < 1000) return `${Math.round(ms)} ms`;
    return Math.abs(ms) < 60000 ? `${+(ms / 1000).toPrecision(digits)} s` : `${Math.floor(ms / 60000)} min ${String(Math.round((ms % 60000) / 1000)).padStart(2, "0")} s`;
  }

  // A place on the axis: 1:05, 2:01:05, 5.25 s; with a minus where the picture counts from its end.
  function clock(ms, step) {
    const sign = ms < 0 ? "−" : "", size = Math.abs(ms), seconds = Math.floor(size / 1000 + 1e-6);
    if (step < 1000) return `${sign}${+(size / 1000).toFixed(3)} s`;
    const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
    const tail = `${String(m).padStart(h ? 2 : 1, "0")}:${String(s).padStart(2, "0")}`;
    return sign + (h ? `${h}:${tail}` : tail);
  }

  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 15000, 30000, 60000, 120000, 300000, 600000, 900000, 1800000, 3600000, 7200000, 14400000, 28800000, 86400000];

  function mount(figure) {
    const canvas = figure.querySelector("canvas"), at = figure.querySelector(".at"), legend = figure.querySelector(".legend");
    const note = figure.querySelector("figcaption p"), select = figure.querySelector(".picture");
    let pictures = [], picture = null, from = 0, to = 1, dragged = null, hovered = null, left = 80, row = 20, zoomed = false;

    const length = () => picture.seconds * 1000;
    const x = (ms) => left + ((ms - from) / (to - from)) * (canvas.clientWidth - left - RIGHT);
    const time = (px) => from + ((px - left) / Math.max(1, canvas.clientWidth - left - RIGHT)) * (to - from);
    const zero = () => (picture.end ? length() : 0);

    function look(start, stop) {
      const wide = Math.min(length(), Math.max(CLOSEST, stop - start));
      from = Math.min(Math.max(0, start), length() - wide);
      to = from + wide;
      zoomed = wide < length() - 1e-6;
      draw();
    }

    function eachSpan(lane, visit) {
      const spans = lane.spans;
      for (let i = 0; i < spans.length; i += FIELDS) {
        const [kind, start, ms, step, amount] = spans.slice(i, i + FIELDS);
        if (start + ms >= from && start <= to) visit({ kind: picture.kinds[kind], start, ms, step, amount });
      }
    }

    function draw() {
      if (!picture) return;
      const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, lanes = picture.lanes;
      row = lanes.length <= 12 ? 24 : lanes.length <= 40 ? 16 : 9;
      const height = lanes.length * row + AXIS;
      canvas.style.height = `${height}px`;
      [canvas.width, canvas.height] = [width * ratio, height * ratio];
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.font = "11px ui-sans-serif, system-ui, sans-serif";
      pen.textBaseline = "middle";
      left = Math.min(width * 0.3, 10 + Math.max(...lanes.map((lane) => pen.measureText(lane.worker).width)));
      const inks = Object.fromEntries(Object.entries(COLORS).map(([kind, name]) => [kind, color(name)]));
      const [dim, grid, card, ink] = ["--dim", "--grid", "--card", "--ink"].map(color);
      drawAxis(pen, width, height, dim, grid);
      lanes.forEach((lane, i) => {
        const top = i * row, middle = top + row / 2, fat = row >= 16 ? row - 6 : row - 2;
        pen.fillStyle = grid;
        pen.fillRect(left, top + row - 0.5, width - left - RIGHT, 0.5);
        if (row >= 9) {
          pen.fillStyle = hovered && hovered.lane === lane ? ink : dim;
          pen.textAlign = "right";
          pen.fillText(lane.worker, left - 8, middle);
          pen.textAlign = "left";
          pen.fillText(`${Math.round(lane.used * 100)} %`, width - RIGHT + 8, middle);
        }
        eachSpan(lane, (span) => drawSpan(pen, span, middle, fat, inks, card));
      });
      if (hovered && hovered.span) outline(pen, hovered, ink);
      if (dragged) {
        pen.fillStyle = ink;
        pen.globalAlpha = 0.12;
        pen.fillRect(Math.min(dragged.from, dragged.to), 0, Math.abs(dragged.to - dragged.from), height - AXIS);
        pen.globalAlpha = 1;
      }
    }

    function drawSpan(pen, span, middle, fat, inks, card) {
      const start = Math.max(left, x(span.start)), stop = Math.min(canvas.clientWidth - RIGHT, x(span.start + span.ms));
      const wide = Math.max(0.6, stop - start), thin = THIN.has(span.kind);
      const high = thin ? Math.max(2, fat / 6) : fat;
      pen.fillStyle = inks[span.kind];
      pen.fillRect(start, middle - high / 2, wide > 3 ? wide - 0.5 : wide, high);
      if (fat < 10 || wide < 34) return;
      const said = pen.measureText(span.kind).width;
      if (said + 10 > wide) return;
      if (thin) {
        pen.clearRect(start + 6, middle - 6, said + 8, 12);
        pen.fillText(span.kind, start + 10, middle);
      } else {
        pen.fillStyle = card;
        pen.fillText(span.kind, start + 6, middle + 0.5);
      }
    }

    function outline(pen, { span, index }, ink) {
      pen.strokeStyle = ink;
      pen.lineWidth = 1.5;
      const start = Math.max(left, x(span.start)), stop = Math.min(canvas.clientWidth - RIGHT, x(span.start + span.ms));
      pen.strokeRect(start - 0.5, index * row + 2, Math.max(2, stop - start), row - 4);
    }

    function drawAxis(pen, width, height, dim, grid) {
      const bottom = height - AXIS, shown = Math.max(2, (width - left - RIGHT) / 90);
      const step = STEPS.find((one) => (to - from) / one <= shown) || 86400000;
      pen.fillStyle = dim;
      pen.textAlign = "center";
      for (let tick = Math.ceil((from - zero()) / step) * step; tick + zero() <= to + 1e-6; tick += step) {
        const place = x(tick + zero());
        pen.fillText(picture.end && tick === 0 ? picture.end : clock(tick, step), Math.min(width - 20, place), bottom + 13);
        pen.fillStyle = grid;
        pen.fillRect(place, 0, 1, bottom);
        pen.fillStyle = dim;
      }
      pen.textAlign = "left";
      pen.strokeStyle = dim;
      pen.lineWidth = 1;
      let free = -Infinity;
      for (const [number, start, stop] of picture.steps) {
        const place = x(stop);
        if (place < left || place > width - RIGHT || place - free < 7) continue;
        free = place;
        pen.setLineDash([1, 3]);
        pen.beginPath();
        pen.moveTo(place, 0);
        pen.lineTo(place, bottom);
        pen.stroke();
        pen.setLineDash([]);
      }
    }

    // What the lines and colours mean, with the seconds that are in view.
    function tell() {
      const sums = {};
      for (const lane of picture.lanes) eachSpan(lane, (span) => {
        const seen = Math.min(to, span.start + span.ms) - Math.max(from, span.start);
        if (seen > 0) sums[span.kind] = (sums[span.kind] || 0) + seen;
      });
      legend.replaceChildren(...picture.kinds.filter((kind) => sums[kind]).map((kind) => {
        const entry = document.createElement("span"), swatch = document.createElement("i"), sum = document.createElement("b");
        swatch.style.background = `var(${COLORS[kind]})`;
        if (THIN.has(kind)) swatch.className = "thin";
        sum.textContent = words(sums[kind]);
        entry.append(swatch, kind, sum);
        return entry;
      }));
      const most = picture.lanes.map((lane) => `${lane.worker} worked ${Math.round(lane.used * 100)} %`).slice(0, 12).join(", ");
      canvas.setAttribute("aria-label", `${picture.name || "timeline"}, ${words(length())}: ${most}. Arrow keys move, plus and minus zoom, Home shows all.`);
      figure.dataset.window = `${Math.round(from)}-${Math.round(to)}`;
    }

    function told() {
      if (!hovered || !hovered.span) return stepAt(hovered ? hovered.ms : null);
      const { lane, span } = hovered, more = span.step >= 0 ? `, step ${span.step}` : "";
      const amount = span.amount ? `, ${span.amount.toLocaleString("en")} ${span.kind === "publish" ? "bytes" : "tokens"}` : "";
      return `${lane.worker} · ${span.kind} ${words(span.ms)}${more}${amount}`;
    }

    function stepAt(ms) {
      const found = ms === null ? null : picture.steps.find(([, start, stop]) => start <= ms && ms < stop);
      return found ? `step ${found[0]} · ${words(found[2] - found[1])}` : words(to - from) + " shown";
    }

    function hover(event) {
      const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, index = Math.floor((event.clientY - box.top) / row);
      const lane = picture.lanes[index], ms = time(px), near = (to - from) / 400;
      let span = null;
      if (lane) eachSpan(lane, (one) => { if (one.start - near <= ms && ms <= one.start + one.ms + near && (!span || one.start <= ms)) span = one; });
      hovered = { lane, index, span, ms };
      at.textContent = told();
    }

    canvas.addEventListener("pointermove", (event) => {
      if (!picture) return;
      if (dragged) dragged.to = event.clientX - canvas.getBoundingClientRect().left;
      hover(event);
      draw();
    });
    canvas.addEventListener("pointerleave", () => { hovered = null; if (picture) { at.textContent = told(); draw(); } });
    canvas.addEventListener("pointerdown", (event) => {
      const px = event.clientX - canvas.getBoundingClientRect().left;
      dragged = { from: px, to: px };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => {
      const drag = dragged;
      dragged = null;
      if (drag && Math.abs(drag.to - drag.from) > 5) go(...[time(drag.from), time(drag.to)].sort((a, b) => a - b));
    });
    canvas.addEventListener("pointercancel", () => { dragged = null; });
    canvas.addEventListener("dblclick", () => go(0, length()));

    function go(start, stop) { look(start, stop); tell(); at.textContent = told(); }

    const MOVES = {
      back: () => go(from - (to - from) / 2, to - (to - from) / 2),
      on: () => go(from + (to - from) / 2, to + (to - from) / 2),
      in: () => go(from + (to - from) / 4, to - (to - from) / 4),
      out: () => go(from - (to - from) / 2, to + (to - from) / 2),
      all: () => go(0, length()),
    };
    for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", () => picture && MOVES[button.dataset.do]());
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: "back", ArrowRight: "on", "+": "in", "=": "in", "-": "out", Home: "all" }[event.key];
      if (!move || !picture) return;
      event.preventDefault();
      MOVES[move]();
    });

    // Shows these pictures, the chosen one first; a picture that goes on keeps the part that is looked at.
    function show(found, keep = false) {
      pictures = found;
      const chosen = Math.min(Math.max(0, Number(select.value) || 0), pictures.length - 1), before = picture;
      select.replaceChildren(...pictures.map((one, i) => new Option(one.name, i)));
      select.value = chosen;
      select.parentElement.hidden = pictures.length < 2;
      picture = pictures[chosen] || null;
      if (!picture) return;
      const moved = keep && zoomed && before ? (before.start - picture.start) * 1000 : null;
      if (moved !== null && from + moved >= 0) [from, to] = [from + moved, to + moved]; else [from, to] = [0, length()];
      const thinned = picture.coarse ? "Short spans are joined, the seconds of each kind kept. " : "";
      const hidden = picture.hidden ? `${picture.hidden} more workers have no room. ` : "";
      note.textContent = `${thinned}${hidden}Thin lines: waiting or starting; empty: idle; dotted: a step ends; right: time worked. Drag to look closer, double-click for all.`;
      look(from, to);
      tell();
      if (!dragged) at.textContent = told();
    }

    select.addEventListener("change", () => { zoomed = false; show(pictures); });
    new ResizeObserver(() => draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return { show };
  }

  const data = document.getElementById("gantt-data"), figure = document.querySelector("figure.gantt");
  if (data && figure) {
    mount(figure).show(JSON.parse(data.textContent));
    document.documentElement.dataset.lanes = JSON.parse(data.textContent)[0].lanes.length;
  }
  return { mount };
})();
