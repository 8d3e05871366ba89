// Follows a run: requests what has changed once a second, and sets everything that a model wrote as text.
"use strict";
(() => {
  const EVERY = 1000, HIDDEN = 10000, REDRAW = 2000;  // milliseconds between two requests, while the page is hidden, between two drawings
  const root = document.documentElement, at = (id) => document.getElementById(id), { make } = Samples;
  const mounted = new Map();  // charts by key
  const revisions = { charts: -1, timeline: -1 };
  const pick = document.querySelector(".pick"), choose = at("choose"), stretch = document.querySelector("#timeline [name=seconds]");
  const gantt = Gantt.mount(document.querySelector("figure.gantt"));
  let chosen = decodeURIComponent(location.hash.slice(1)).split(",").filter(Boolean), metrics = "", failing = "[]";

  async function request(path, parameters = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) for (const one of [value].flat()) query.append(name, one);
    const reply = await fetch(`${path}?${query}`);
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  }

  // ---- state

  function showState(state) {
    const { status, progress } = state, left = progress.left ? `, about ${progress.left} left` : "";
    at("status").className = `state ${status.tone}`;
    at("status").textContent = status.text;
    at("progress").value = progress.share;
    at("steps").textContent = `step ${progress.step}${progress.of ? ` of ${progress.of}` : progress.share ? `, ${Math.round(100 * progress.share)} % of what it may spend` : ""}${status.tone === "live" ? left : ""}`;
    document.title = `${progress.step}${progress.of ? `/${progress.of}` : ""} ${state.name} · Ostinato`;
    at("tiles").replaceChildren(...state.tiles.map((tile) => make("li", "", make("b", "", tile.value), tile.name, tile.note ? make("small", "", tile.note) : null)));
    at("notes").replaceChildren(...state.notes.map((note) => make("li", "look", note)));
    at("alarms").replaceChildren(...state.alarms.map((alarm) => make("li", alarm.tone === "bad" ? "bad" : "look", alarm.text)));
    showFailed(state.failed);
    at("no-alarms").hidden = state.alarms.length + state.failed.length > 0;
    at("forecast").hidden = !state.forecast;
    at("forecast").textContent = `Forecast: ${state.forecast}`;
    showWorkers(state.workers);
    if (state.metrics.join() !== metrics) {
      metrics = state.metrics.join();
      at("metrics").replaceChildren(...state.metrics.map((name) => new Option(name, name)));
    }
  }

  function showFailed(failed) {
    if (JSON.stringify(failed) === failing) return;  // what a reader has opened stays open
    failing = JSON.stringify(failed);
    at("failed").replaceChildren(...failed.map((one) => make("details", "", make("summary", "", one.sentence), make("pre", "", `${one.trace}\n${one.answer}`.trim()))));
  }

  function showWorkers(workers) {
    at("workers").replaceChildren(...workers.flatMap((one) => {
      const row = make("tr", "", make("th", "", one.worker), make("td", `dot ${one.tone}`, one.state));
      row.cells[1].dataset.label = "state";
      for (const [name, label] of [["since", "since"], ["version", "policy"], ["running", "running"], ["sampled", "tokens"], ["heard", "heard"]]) {
        const made = make("td", "num", one[name] ? one[name] + (name === "heard" ? " ago" : "") : "–");
        made.dataset.label = label;
        row.append(made);
      }
      if (!one.cause) return [row];
      const why = make("td", "why", one.cause);
      why.colSpan = 7;
      return [row, make("tr", "", why)];
    }));
    at("no-workers").hidden = workers.length > 0;
    at("workers").closest(".card").hidden = workers.length === 0;
    root.dataset.workers = workers.length;
  }

  // ---- curves

  function showCharts(charts) {
    at("no-charts").hidden = charts.length > 0;
    for (const [key, { item, figure }] of mounted) {
      if (charts.some((chart) => chart.key === key)) continue;
      Charts.remove(item);
      figure.remove();
      mounted.delete(key);
    }
    charts.forEach((chart, i) => {
      if (!mounted.has(chart.key)) {
        const plot = make("div", "plot");
        Object.assign(plot, { tabIndex: 0, role: "img" });
        const figure = make("figure", "chart", make("figcaption", "", make("h3", "", chart.title), make("span", "at"), make("p", "", chart.note)), make("div", "legend"), plot);
        at("charts").insertBefore(figure, at("charts").children[i] || null);
        mounted.set(chart.key, { figure, item: Charts.mount(plot, chart) });
      } else {
        const { item, figure } = mounted.get(chart.key);
        figure.querySelector("p").textContent = chart.note;
        Charts.update(item, chart);
      }
    });
    root.dataset.charts = charts.length;
  }

  function showChosen() {
    history.replaceState(null, "", chosen.length ? `#${encodeURIComponent(chosen.join())}` : location.pathname);
    at("chosen").replaceChildren(...chosen.map((name) => {
      const button = make("button", "", `${name} ×`);
      button.type = "button";
      button.setAttribute("aria-label", `remove ${name}`);
      button.addEventListener("click", () => { chosen = chosen.filter((one) => one !== name); rechoose(); });
      return button;
    }));
  }

  function rechoose() { showChosen(); revisions.charts = -1; look(); }

  pick.addEventListener("submit", (event) => event.preventDefault());
  pick.metric.addEventListener("change", () => {
    const name = pick.metric.value.trim();
    if (name && !chosen.includes(name)) chosen.push(name);
    pick.metric.value = "";
    rechoose();
  });

  // ---- timeline

  function showTimeline(picture) {
    document.querySelector("figure.gantt").hidden = !picture;
    at("no-timeline").hidden = Boolean(picture);
    root.dataset.lanes = picture ? picture.lanes.length : 0;
    if (!picture) return;
    at("idle").textContent = "idle: " + Object.entries(picture.idle).map(([pool, share]) => `${pool} ${Math.round(share * 100)} %`).join(", ");
    gantt.show(picture, true);
  }

  stretch.addEventListener("change", () => { revisions.timeline = -1; look(); });

  // ---- answers

  Samples.mount({
    list: (step) => request("/groups", step === undefined ? {} : { step }),
    open: (group, place) => request("/group", { step: group.step, place }),
  }, Number(at("samples").dataset.solvedAt));

  // ---- again and again

  let waiting = false, drawn = -Infinity, step = null;

  async function look() {
    if (waiting) return;
    waiting = true;
    try {
      const state = await request("/state"), now = performance.now(), due = now - drawn > REDRAW;
      showState(state);
      if (step !== null && state.progress.step !== step) Samples.refresh();
      step = state.progress.step;
      if (due || revisions.charts < 0 || revisions.timeline < 0) drawn = now;
      if (revisions.charts < 0 || (due && state.revisions.charts !== revisions.charts)) {
        const reply = await request("/charts", { metric: chosen });
        revisions.charts = reply.revision;
        showCharts(reply.charts);
      }
      if (revisions.timeline < 0 || (due && state.revisions.timeline !== revisions.timeline)) {
        const reply = await request("/timeline", { seconds: stretch.value });
        revisions.timeline = reply.revision;
        showTimeline(reply.picture);
      }
      at("gone").hidden = true;
      root.dataset.looks = Number(root.dataset.looks || 0) + 1;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // fetch: no server
      at("gone").hidden = false;
    } finally {
      waiting = false;
    }
  }

  async function follow() {
    await look();
    setTimeout(follow, document.hidden ? HIDDEN : EVERY);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  showChosen();
  follow();
})();
