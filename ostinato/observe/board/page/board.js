// Follows a run: asks for what has changed once a second, and sets everything that a model said as text.
"use strict";
(() => {
  const EVERY = 1000, HIDDEN = 10000, REDRAW = 2000;  // milliseconds between two questions, while nobody looks, between two drawings
  const root = document.documentElement, at = (id) => document.getElementById(id);
  const mounted = new Map();  // charts by key
  const revisions = { charts: -1, timeline: -1 };
  const pick = document.querySelector(".pick"), choose = at("choose"), stretch = document.querySelector("#timeline [name=seconds]");
  const gantt = Gantt.mount(document.querySelector("figure.gantt"));
  let chosen = decodeURIComponent(location.hash.slice(1)).split(",").filter(Boolean), metrics = "", failing = "[]", serial = 0;

  function make(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  async function ask(path, parameters = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) for (const one of [value].flat()) query.append(name, one);
    const reply = await fetch(`${path}?${query}`);
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  }

  // ---- what the run says of itself

  function showState(state) {
    const { status, progress } = state, left = progress.left ? `, about ${progress.left} left` : "";
    at("status").className = `state ${status.tone}`;
    at("status").textContent = status.text;
    at("progress").value = progress.of ? progress.step / progress.of : 0;
    at("steps").textContent = `step ${progress.step}${progress.of ? ` of ${progress.of}` : ""}${status.tone === "live" ? left : ""}`;
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

  function showTimeline(pictures) {
    const picture = pictures[0];
    document.querySelector("figure.gantt").hidden = !picture;
    at("no-timeline").hidden = Boolean(picture);
    root.dataset.lanes = picture ? picture.lanes.length : 0;
    if (!picture) return;
    at("idle").textContent = "idle: " + Object.entries(picture.idle).map(([pool, share]) => `${pool} ${Math.round(share * 100)} %`).join(", ");
    gantt.show(pictures, true);
  }

  stretch.addEventListener("change", () => { revisions.timeline = -1; look(); });

  // ---- answers

  const number = (value) => (value === null || value === undefined ? "–" : String(+value.toFixed(3)).replace("-", "−"));
  let shown = null, next = null;  // the group that was shown last, where the next reply goes on

  function answerCard(answer) {
    const parts = Object.entries(answer.parts), [oldest, newest] = answer.versions;
    const box = make("article", `answer ${answer.tone}`, make("p", "verdict",
      make("b", "", answer.reward === null ? "no verdict" : `reward ${number(answer.reward)}`),
      parts.length > 1 ? make("span", "", parts.map(([name, value]) => `${name} ${number(value)}`).join(" · ")) : null,
      make("span", "", `${answer.turns.reduce((sum, turn) => sum + turn.tokens, 0)} tokens`),
      make("span", "", answer.stop === "length" ? "truncated" : `stop: ${answer.stop}`),
      answer.versions.length ? make("span", "", oldest === newest ? `policy ${oldest}` : `policies ${oldest} to ${newest}`) : null,
      make("span", "", `sample ${answer.sample}`),
      answer.error || answer.reason ? make("span", "why", answer.error || answer.reason) : null));
    answer.turns.forEach((turn, i) => box.append(
      ...(i ? [make("p", "role", `turn ${i + 1}`)] : []),
      turn.text ? make("pre", "", turn.text) : make("p", "role", `${turn.tokens} tokens, and no text of them`)));
    if (!answer.turns.length) box.append(make("p", "role", "nothing was sampled"));
    return box;
  }

  function promptCard(answer) {
    const box = make("div", "card prompt");
    for (const message of answer.messages) {
      if (message.role) box.append(make("p", "role", message.role));
      box.append(make("pre", "", message.content));
    }
    const columns = Object.entries(answer.columns).flatMap(([name, value]) => [`${name} `, make("b", "", value), "   "]);
    box.append(make("p", "columns", `step ${answer.step} · prompt ${answer.uid}   `, ...columns));
    return box;
  }

  async function browse(anew) {
    const mine = ++serial, form = Object.fromEntries(new FormData(choose)), asked = {};
    for (const [name, value] of Object.entries(form)) if (value !== "") asked[name] = value;
    if (!anew && next) asked.after = next;
    at("looked").textContent = "Looking …";
    const reply = await ask("/answers", asked);
    if (mine !== serial) return;  // something else was asked for meanwhile
    if (anew) { at("answers").replaceChildren(); shown = null; }
    for (const answer of reply.answers) {
      const group = `${answer.step} ${answer.uid}`;
      if (group !== shown) at("answers").append(promptCard(answer));
      shown = group;
      at("answers").append(answerCard(answer));
    }
    next = reply.next;
    at("more").hidden = next === null;
    at("more").textContent = reply.answers.length ? "Show more" : `Look on, before step ${reply.at}`;
    const any = at("answers").children.length;
    at("looked").textContent = !reply.steps.length ? "No answers are recorded yet (log.trajectories_every)." : next === null ? (any ? "That is all." : "No answer matches.") : any ? "" : `None down to step ${reply.at}.`;
    steps(reply.steps);
    root.dataset.answers = at("answers").querySelectorAll(".answer").length;
  }

  function steps(all) {
    if (choose.step.options.length === all.length + 1) return;
    const before = choose.step.value;
    choose.step.replaceChildren(new Option("the last", ""), ...all.toReversed().map((step) => new Option(step, step)));
    choose.step.value = before;
  }

  const failed = (error) => { at("looked").textContent = String(error.message || error); };
  choose.addEventListener("submit", (event) => { event.preventDefault(); browse(true).catch(failed); });
  choose.addEventListener("change", () => browse(true).catch(failed));
  at("more").addEventListener("click", () => browse(false).catch(failed));

  // ---- again and again

  let asking = false, drawn = -Infinity;

  async function look() {
    if (asking) return;
    asking = true;
    try {
      const state = await ask("/state"), now = performance.now(), due = now - drawn > REDRAW;
      showState(state);
      if (due || revisions.charts < 0 || revisions.timeline < 0) drawn = now;
      if (revisions.charts < 0 || (due && state.revisions.charts !== revisions.charts)) {
        const reply = await ask("/charts", { metric: chosen });
        revisions.charts = reply.revision;
        showCharts(reply.charts);
      }
      if (revisions.timeline < 0 || (due && state.revisions.timeline !== revisions.timeline)) {
        const reply = await ask("/timeline", { seconds: stretch.value });
        revisions.timeline = reply.revision;
        showTimeline(reply.pictures);
      }
      at("gone").hidden = true;
      root.dataset.looks = Number(root.dataset.looks || 0) + 1;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // fetch: nobody is there
      at("gone").hidden = false;
    } finally {
      asking = false;
    }
  }

  async function follow() {
    await look();
    setTimeout(follow, document.hidden ? HIDDEN : EVERY);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  showChosen();
  follow();
  browse(true).catch(failed);
})();
