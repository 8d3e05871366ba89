// The browser of samples: of a page that holds them, or of a server. What a model wrote is set as text, never as markup.
"use strict";
const Samples = (() => {
  const root = document.documentElement, PAGE = 8, NO_EXPERT = -1;
  const form = document.querySelector("form.samples"), view = document.getElementById("group"), card = document.getElementById("token");
  const tokens = new WeakMap();  // span -> what hovering over it shows
  let source = null, solvedAt = 1, groups = [], content = null, serial = 0;

  function make(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  const number = (value, digits = 3) => (value === null || value === undefined ? "–" : String(+value.toFixed(digits)).replace("-", "−"));
  const isSolved = (reward) => reward !== null && reward >= solvedAt;
  const logprobs = (answer) => answer.turns.flatMap((turn) => turn.logprobs).filter((v) => v !== null);
  const size = (answer) => answer.turns.reduce((sum, turn) => sum + turn.num_tokens, 0);
  const text = (answer) => answer.turns.map((turn) => turn.text || (turn.pieces || []).join("")).join("\n");
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  const FILTERS = {
    all: () => true,
    solved: (answer) => isSolved(answer.reward),
    unsolved: (answer) => answer.reward !== null && !isSolved(answer.reward),
    truncated: (answer) => answer.stop === "length",
    fault: (answer) => answer.reward === null || Boolean(answer.error),
  };
  const SORTS = {
    high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.sample - b.sample,
    low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || a.sample - b.sample,
    unlikely: (a, b) => (mean(logprobs(a)) ?? 0) - (mean(logprobs(b)) ?? 0),
    long: (a, b) => size(b) - size(a),
    order: (a, b) => a.sample - b.sample,
  };

  function heat(logprob) {
    if (logprob === null) return "p5";
    return "p" + [0.1, 0.5, 1, 2, 4].filter((limit) => -logprob > limit).length;
  }

  function turnTokens(turn, start) {
    const pre = make("pre", "tokens");
    const [layers, topK] = turn.routing || [0, 0];
    const putIn = new Set(turn.injected);
    turn.tokens.forEach((id, i) => {
      const piece = turn.pieces ? turn.pieces[i] : `${id} `;
      const span = make("span", `t ${putIn.has(i) ? "put" : heat(turn.logprobs[i])}${piece ? "" : " thin"}`, piece.replaceAll("\n", "⏎\n"));
      const version = turn.versions[turn.versions.length === 1 ? 0 : i];
      const experts = turn.experts && turn.experts.slice(i * layers * topK, (i + 1) * layers * topK);
      tokens.set(span, { id, piece: turn.pieces ? piece : null, position: start + i, logprob: turn.logprobs[i], version, putIn: putIn.has(i), experts, layers, topK });
      pre.append(span);
    });
    if (!turn.pieces && turn.text) return make("div", "", make("pre", "", turn.text), make("p", "role", "token ids"), pre);
    return pre;
  }

  function answerCard(answer) {
    const kind = answer.reward === null || answer.error ? "fault" : isSolved(answer.reward) ? "solved" : "";
    const parts = Object.entries(answer.parts || {}).filter(([name]) => Object.keys(answer.parts).length > 1 || name === "").map(([name, value]) => `${name} ${number(value)}`);
    const extra = Object.entries(answer.extra || {}).map(([name, value]) => `${name}: ${value}`);
    const versions = [...new Set(answer.turns.flatMap((turn) => turn.versions))].sort((a, b) => a - b);
    const spread = versions.length > 1 ? `policies ${versions[0]} to ${versions[versions.length - 1]}` : versions.length ? `policy ${versions[0]}` : "";
    const verdict = make("p", "verdict",
      make("b", "", answer.reward === null ? "no verdict" : `reward ${number(answer.reward)}`),
      parts.length ? make("span", "", parts.join(" · ")) : null,
      typeof answer.advantage === "number" ? make("span", "", `advantage ${number(answer.advantage)}`) : null,
      ...extra.map((text) => make("span", "", text)),
      make("span", "", `${size(answer)} tokens`),
      make("span", "", answer.stop === "length" ? "truncated" : `stop: ${answer.stop}`),
      answer.ended ? make("span", "", `environment: ${answer.ended}`) : null,
      make("span", "", `mean log p ${number(mean(logprobs(answer)), 2)}`),
      make("span", "", spread),
      make("span", "", `sample ${answer.sample}`),
      answer.error || answer.reason ? make("span", "why", answer.error || answer.reason) : null);
    const box = make("article", `answer ${kind}`, verdict);
    box.tabIndex = 0;
    let position = 0;
    answer.turns.forEach((turn, i) => {
      if (i > 0) box.append(make("div", "reply", make("p", "role", `context of turn ${i + 1}, ${turn.num_context} tokens`), make("pre", "", turn.context ?? "")));
      position += turn.num_context;
      if (turn.tokens.length) box.append(turnTokens(turn, position));
      position += turn.num_tokens;
      const hidden = turn.num_tokens - turn.tokens.length;
      if (hidden) box.append(make("p", "role", `${hidden} more tokens are in the run folder`));
    });
    if (answer.last_reply) box.append(make("div", "reply", make("p", "role", "last reply of the environment, not read"), make("pre", "", answer.last_reply)));
    if (!answer.turns.length) box.append(make("p", "role", "nothing was sampled"));
    return box;
  }

  function promptCard(group) {
    const box = make("div", "card prompt");
    for (const message of content.messages) {
      if (message.role) box.append(make("p", "role", message.role));
      box.append(make("pre", "", message.content));
    }
    const columns = Object.entries(content.columns);
    if (columns.length) box.append(make("p", "columns", ...columns.flatMap(([name, value]) => [`${name} `, make("b", "", value), "   "])));
    box.append(make("p", "columns", `prompt ${group.uid}, ${(content.answers[0]?.turns[0]?.num_context ?? "?")} tokens`));
    return box;
  }

  function show() {
    if (!content) return;
    const group = groups[form.group.value], sought = form.find.value.toLowerCase();
    const answers = content.answers.filter(FILTERS[form.filter.value]).filter((answer) => text(answer).toLowerCase().includes(sought)).sort(SORTS[form.sort.value]);
    const list = make("div", ""), more = make("button", "");
    more.type = "button";
    let shown = 0;
    const next = () => {
      list.append(...answers.slice(shown, shown + PAGE).map(answerCard));
      shown = Math.min(answers.length, shown + PAGE);
      more.hidden = shown === answers.length;
      more.textContent = `Show ${Math.min(PAGE, answers.length - shown)} more of ${answers.length}`;
    };
    more.addEventListener("click", next);
    next();
    hide();
    view.replaceChildren(promptCard(group), answers.length ? list : make("p", "calm", "No answer of this prompt matches."), more);
  }

  async function open() {
    const mine = ++serial, opened = await source.open(groups[form.group.value], form.group.value);
    if (mine !== serial) return;  // another group was chosen meanwhile
    content = opened;
    show();
    root.dataset.samples = content.answers.length;
  }

  function option(value, label) {
    const made = make("option", "", label);
    made.value = value;
    return made;
  }

  // The groups of a step, of the last one without a number; then the first of them is opened.
  async function list(step) {
    const mine = ++serial, found = await source.list(step);
    if (mine !== serial) return undefined;
    [groups, content] = [found.groups, null];
    offer(found.steps, groups[0]?.step);
    form.group.replaceChildren(...groups.map((group, i) => option(i, `${group.rewards.filter(isSolved).length}/${group.rewards.length} solved · ${group.preview}`)));
    if (groups.length) return open();
    root.dataset.samples = "none";
    return view.replaceChildren(make("p", "calm", "No answers are recorded yet (log.trajectories_every)."));
  }

  function offer(steps, chosen) {
    form.step.replaceChildren(...steps.map((step) => option(step, String(step))));
    if (chosen !== undefined) form.step.value = String(chosen);
  }

  // Steps that were recorded meanwhile; what is shown stays.
  async function refresh() {
    if (!groups.length) return list();
    const { step } = groups[0], found = await source.list(step);
    if (groups[0].step === step && found.steps.length !== form.step.options.length) offer(found.steps, step);
    return undefined;
  }

  function place(span) {
    const at = span.getClientRects()[0] || span.getBoundingClientRect(), own = card.getBoundingClientRect();
    const below = at.bottom + 8 + own.height < innerHeight;
    card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - own.width - 12))}px`;
    card.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - own.height - 8)}px`;
  }

  function hide() {
    card.hidden = true;
    for (const old of view.querySelectorAll(".t.on")) old.classList.remove("on");
  }

  function row(name, ...value) { return [make("dt", "", name), make("dd", "", ...value)]; }

  function routes(token) {
    const layers = Array.from({ length: token.layers }, (_, l) => token.experts.slice(l * token.topK, (l + 1) * token.topK));
    if (layers.flat().every((expert) => expert === NO_EXPERT)) return "none: the last token never went through the layers";
    return make("div", "routes", ...layers.map((chosen, l) => make("span", "", make("i", "", `${l}: `), chosen.join(" "))));
  }

  function showToken(span) {
    const token = tokens.get(span);
    hide();
    span.classList.add("on");
    const share = token.logprob === null ? "" : ` (p = ${+(Math.exp(token.logprob) * 100).toPrecision(3)} %)`;
    const facts = make("dl", "",
      ...row("token id", String(token.id)),
      ...row("position", String(token.position)),
      ...(token.putIn ? row("put in", "an interruption, not sampled: nothing is learned from it") : [
        ...row("log p", token.logprob === null ? "not finite" : number(token.logprob) + share),
        ...row("policy", String(token.version))]),
      ...(token.experts ? row("experts by MoE layer", routes(token)) : []));
    const name = token.piece === null ? null : make("code", "", token.piece ? JSON.stringify(token.piece) : "part of the character before");
    card.replaceChildren(...[name, facts].filter(Boolean));
    card.hidden = false;
    place(span);
  }


  // ``list(step)`` gives {steps, groups}, ``open(group, place)`` a group's prompt and answers.
  function mount(given, solved) {
    [source, solvedAt] = [given, solved];
    form.addEventListener("submit", (event) => event.preventDefault());
    form.step.addEventListener("change", () => list(Number(form.step.value)));
    form.group.addEventListener("change", open);
    for (const control of [form.sort, form.filter]) control.addEventListener("change", show);
    form.find.addEventListener("input", show);
    view.addEventListener("pointerover", (event) => { if (tokens.has(event.target)) showToken(event.target); else hide(); });
    view.addEventListener("pointerleave", hide);
    view.addEventListener("focusout", hide);
    view.addEventListener("keydown", (event) => {
      const answer = event.target.closest(".answer"), move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!answer || move === undefined) return;
      event.preventDefault();
      const all = [...answer.querySelectorAll(".t")], now = all.findIndex((span) => span.classList.contains("on"));
      const span = all[Math.min(all.length - 1, Math.max(0, now + move))];
      if (span) { span.scrollIntoView({ block: "nearest" }); showToken(span); }
    });
    addEventListener("scroll", () => { const on = view.querySelector(".t.on"); if (on) place(on); }, { passive: true });
    return list();
  }

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // The samples that the page itself holds, as base64 of deflated JSON.
  function embedded({ groups: all, recorded }, solved) {
    const steps = [...new Set(all.map((group) => group.step))];
    if (!recorded.length) { root.dataset.samples = "none"; return view.replaceChildren(make("p", "calm", "No answers are recorded (log.trajectories_every).")); }
    if (typeof DecompressionStream === "undefined") {
      view.textContent = "This browser cannot inflate the samples (no DecompressionStream); use a newer one.";
      root.dataset.samples = "unsupported";
      return undefined;
    }
    return mount({
      list: async (step = steps[steps.length - 1]) => ({ steps, groups: all.filter((group) => group.step === step) }),
      open: (group) => inflate(group.data),
    }, solved);
  }

  return { mount, refresh, make, embedded };
})();
