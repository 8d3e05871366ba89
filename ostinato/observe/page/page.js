// The page: what a run has come to, then folds that say more. It reads rows that the file holds, or fetches them as
// they come. Everything that a model, a dataset or a user wrote is set as text.
"use strict";
(() => {
  const EVERY = 1000, HIDDEN = 10000, HORIZON_MS = 900000, LANES = 256, MARKS = 400;  // milliseconds; workers; steps
  const root = document.documentElement, at = (id) => document.getElementById(id), { make } = Samples;
  const COLORS = ["--blue", "--teal", "--orange", "--purple", "--red", "--grey", "--gold", "--pink"];
  const tint = (i) => COLORS[i % COLORS.length];

  // ---- panels over the steps: keys are [column of metrics.jsonl, label, color]. ``under``: one line for each column
  // with that beginning and end; ``band``: columns of its lower and upper edge, ``spread``: of a deviation from the
  // first line; ``always``: shown, with a sentence, where the run has none of its columns.

  const PANELS = {
    signal: [
      { title: "Reward", unit: "", note: "Mean of training answers; band: ± their standard deviation.", keys: [["reward", "reward"]], spread: "reward_std", under: { prefix: "rewards/", suffix: "/mean", least: 2 }, always: true },
      { title: "Prompts solved", unit: "%", note: "Share of prompts solved by none, some or all of their answers; only “some” teaches.", stacked: true, always: true, keys: [["solved_none", "none", "--red"], ["solved_some", "some", "--blue"], ["solved_all", "all", "--teal"]] },
      { title: "Lost signal", unit: "%", low: 0, note: "Answers cut off at the length limit or interrupted by a phrase; groups whose answers all got one reward.", always: true, keys: [["completions/clipped_ratio", "truncated answers", "--orange"], ["frac_reward_zero_std", "groups of equal reward", "--purple"], ["interrupt/rate", "interrupted answers", "--blue", "if any"]] },
      { title: "Answer length", unit: "tokens", low: 0, note: "Sampled tokens per answer; band: shortest to longest.", always: true, keys: [["completions/mean_length", "mean"]], band: ["completions/min_length", "completions/max_length"] },
    ],
    policy: [
      { title: "Loss", unit: "", note: "Of each step's batch.", keys: [["loss", "loss"]], always: true },
      { title: "Entropy", unit: "nats", low: 0, note: "Mean over trained tokens, at the sampling temperature.", keys: [["entropy", "entropy", "--purple"]], always: true },
      { title: "Gradient norm", unit: "", low: 0, note: "Before clipping.", keys: [["grad_norm", "norm"]], mark: (state) => (Number.isFinite(state.max_grad_norm) ? [state.max_grad_norm, "clip"] : null), always: true },
      { title: "Learning rate", unit: "", low: 0, note: "Of each step's update.", keys: [["learning_rate", "lr"]], always: true },
      { title: "Clipped tokens", unit: "%", low: 0, note: "Share of tokens beyond the trust region.", keys: [["cispo_clip_ratio", "capped"]], under: { prefix: "clip_ratio/", drop: "_mean" } },
      { title: "KL to the base", unit: "nats", low: 0, note: "Estimate per trained token.", keys: [["kl", "KL", "--teal"]] },
      { title: "Reverse KL to the teacher", unit: "nats", note: "Per trained token.", keys: [["opd/reverse_kl", "reverse KL", "--teal"]] },
      { title: "Abilities kept", unit: "", low: 0, note: "Probability left of what the policy could do and is not trained on, with its 95 % interval over rows; KL to the start in nats per token.", keys: [["forgetting/kept", "kept", "--blue"], ["forgetting/kl_k3", "KL to the start", "--orange"]], band: ["forgetting/kept_low", "forgetting/kept_high"], dots: true, mark: () => [1, "all"] },
    ],
    cost: [
      { title: "Time per step", unit: "s", note: "Where it went; rewards only where training waited; measure: sampler against trainer.", stacked: true, always: true, keys: [["time/rollout_s", "rollout", "--blue"], ["time/reward_s", "reward", "--orange"], ["time/train_s", "train", "--teal"], ["time/measure_s", "measure", "--purple"], ["time/other_s", "other", "--grey"]] },
      { title: "Throughput", unit: "tokens/s", low: 0, note: "Sampled tokens per second of the whole step.", keys: [["tokens_per_s", "speed"]], always: true },
      { title: "Sampled tokens", unit: "tokens", note: "Trained on, or wasted and why.", stacked: true, missing: 0, always: true, keys: [["tokens/trained", "trained on"]], under: { prefix: "tokens/wasted/" } },
      { title: "FLOPs", unit: "FLOP", note: "By the model's shapes and the rows that ran.", stacked: true, always: true, keys: [["flops/rollout", "rollout", "--blue"], ["flops/train", "train", "--teal"], ["flops/measure", "measure", "--purple"]] },
    ],
    timeline: [
      { title: "Idle time", unit: "%", low: 0, note: "Share of all workers' time in which they did no work.", keys: [["pipeline/bubble_share", "all", "--grey"]], unless: (state) => state.idle.length },
      { title: "Staleness", unit: "steps", low: 0, note: "Steps between the policy that sampled a token and the one that learned from it.", keys: [["staleness/mean", "mean"], ["staleness/max", "max", "--red"]], any: true },
      { title: "Age of tokens", unit: "tokens", note: "Trained tokens by age in steps.", stacked: true, missing: 0, keys: [], under: { prefix: "staleness/hist/", least: 2 } },
      { title: "Trainer waited", unit: "s", low: 0, note: "For the groups of its batch.", keys: [["pipeline/wait_s", "waited", "--orange"]] },
      { title: "Queue", unit: "groups", low: 0, note: "Groups at the end of the step.", keys: [["queue/running", "in play"], ["queue/ready", "ready"]] },
      { title: "Published", unit: "B", low: 0, note: "New weights on their way to the samplers, of each step.", keys: [["publish/bytes", "bytes"]] },
      { title: "Time to publish", unit: "s", low: 0, note: "Until every sampler serves them.", keys: [["publish/seconds", "seconds"]] },
      { title: "Workers lost", unit: "", low: 0, note: "Workers that are alive, those that were replaced, answers begun again.", keys: [["workers/alive", "alive", "--teal"], ["workers/restarts", "replaced workers", "--red", "if any"], ["workers/redispatched", "answers begun again", "--orange", "if any"]] },
      { title: "Groups admitted", unit: "groups", low: 0, note: "Since the start: let in, trained on, not yet decided.", keys: [["groups/admitted_total", "admitted"], ["groups/trained_total", "trained on"], ["groups/outstanding", "in play"]], under: { prefix: "groups/dropped_total/" } },
    ],
    gap: [
      { title: "Log-probability gap", unit: "", log: true, note: "Trainer minus sampler, per token in nats; 0 is exact agreement. Dots: measured in full.", keys: [["sampling/sampling_logp_difference/max", "max |Δ log p|", "--orange"], ["sampling/sampling_logp_difference/mean", "mean |Δ log p|", "--blue"], ["sampling/kl_k3", "KL (k3)", "--purple"]], arms: true, always: true },
      { title: "Agreement", unit: "%", low: 0.9, high: 1, note: "Share of tokens that count after weighting (100 % is on-policy), and of expert ids that trainer and sampler have in common.", keys: [["sampling/ess", "effective sample"], ["routing/overlap", "experts in common"], ["routing/lowest_sequence", "in the lowest sequence"]], mark: (state, rows) => (state.gate && rows.some((row) => "routing/overlap" in row) ? [state.gate, "gate"] : null), always: true },
    ],
    drafts: [
      { title: "Tokens per pass", unit: "", low: 1, note: "Tokens that a sequence got from one forward pass; 1 without drafts.", keys: [["draft/tokens_per_pass", "tokens"]], mark: () => [1, ""] },
      { title: "Output by source", unit: "%", note: "Where the accepted guesses came from, as shares of all sampled tokens; the rest was not guessed.", stacked: true, high: 1, keys: [["draft/share_history", "past answers", "--blue"], ["draft/share_sibling", "siblings", "--teal"], ["draft/share_own", "own text", "--purple"], ["draft/share_other", "other prompts", "--orange"]] },
      { title: "Acceptance and price", unit: "%", low: 0, high: 1, note: "Share of guesses that were right; share of the rollouts' time that guessing took.", keys: [["draft/acceptance", "accepted", "--teal"], ["draft/cpu_share", "drafting time", "--orange"]] },
      { title: "Seconds saved", unit: "s", note: "Of rollouts, by the engine's own table of costs; below 0 drafts cost time.", keys: [["draft/seconds_saved", "saved"]] },
    ],
  };

  const FOLDS = [
    ["score", "Scores", "held-out score over the steps, every set before and after"],
    ["signal", "Signal", "reward, prompts solved, what taught nothing, answer length"],
    ["policy", "Policy", "loss, entropy, gradient norm, learning rate, abilities kept"],
    ["cost", "Cost", "time, tokens, FLOPs and money: where they went"],
    ["timeline", "Pipeline", "what every worker did and when, idle time, staleness"],
    ["gap", "Sampler against trainer", "how far their log-probabilities of the same tokens are apart"],
    ["drafts", "Drafts from history", "what speculative decoding gained: every token is the one that would have come without"],
    ["forecast", "Forecast", "where the score would end, as predicted after each evaluation"],
    ["plan", "Plan against run", "seconds and bytes, planned and measured"],
    ["faults", "Faults", "what failed, how often and in which step; tracebacks of rewards"],
    ["workers", "Workers", "state, policy, calls and tokens of each, and why one was replaced"],
    ["samples", "Samples", "recorded prompts and answers, token by token"],
    ["pictures", "Pictures", "PNG files of the run folder"],
    ["recipe", "Recipe", "model, task, machine and every setting of the run"],
  ];

  // ---- charts from rows

  const value = (row, key) => (Number.isFinite(row[key]) ? row[key] : null);
  const column = (rows, key) => rows.map((row) => value(row, key));
  const some = (values) => values.some((v) => v !== null && v !== undefined);
  const chart = (title, given) => ({ key: title, title, note: "", unit: "", stacked: false, log: false, log_x: false, labels: [], low: null, high: null, mark: null, along: "step #", ...given });

  function keysOf(panel, rows) {
    const { prefix, suffix = "", drop = "", least = 1 } = panel.under || {};
    if (!prefix) return panel.keys;
    const names = new Set(rows.flatMap((row) => Object.keys(row)));
    const under = [...names].filter((key) => key.startsWith(prefix) && key.endsWith(suffix) && key.length > prefix.length + suffix.length).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const label = (key) => key.slice(prefix.length, key.length - suffix.length).replace(drop, "").replaceAll("_", " ");
    return [...panel.keys, ...(under.length < least ? [] : under.map((key, i) => [key, label(key), tint(i + panel.keys.length)]))];
  }

  function panelChart(panel, rows, state) {
    if (panel.unless?.(state)) return null;
    const series = [];
    keysOf(panel, rows).forEach(([key, label, color, rare], i) => {
      const values = column(rows, key);
      if (!some(values) || (rare && !values.some(Boolean))) return;
      const one = { label, color: color || tint(i), marker: panel.dots ? "dot" : "", values: panel.missing === undefined ? values : values.map((v) => v ?? panel.missing) };
      if (i === 0 && panel.band) [one.low, one.high] = panel.band.map((edge) => column(rows, edge));
      if (i === 0 && panel.spread) [one.low, one.high] = [-1, 1].map((sign) => rows.map((row) => (value(row, key) === null || value(row, panel.spread) === null ? null : row[key] + sign * row[panel.spread])));
      if (one.low && !some(one.low)) delete one.low;
      series.push(one);
    });
    if (panel.arms) series.push(...arms(rows, state));
    if (panel.any && !series.some((s) => s.values.some(Boolean))) return null;
    if (!series.length && !panel.always) return null;
    return chart(panel.title, { ...panel, mark: panel.mark?.(state, rows) ?? null, low: panel.low ?? null, high: panel.high ?? null, steps: series.length ? rows.map((row) => row.step) : [], series });
  }

  // k3 of a full measurement, at its step.
  function arms(rows, state) {
    const full = new Map(state.mismatch.map((row) => [row.step, row.arms]));
    const values = (name) => rows.map((row) => full.get(row.step)?.[name]?.k3 ?? null);
    return [["native", "--red"], ["replay", "--teal"]].map(([name, color]) => ({ label: `KL, ${name === "native" ? "native" : "with replay"}`, color, marker: "dot", values: values(name) })).filter((s) => some(s.values));
  }

  function scored(rows, key, label, color, marker = "") {
    const edges = [0, 1].map((end) => rows.map((row) => row?.intervals?.[key]?.[end] ?? null));
    const one = { label, color, marker, values: rows.map((row) => value(row ?? {}, key)) };
    return some(edges[0]) ? { ...one, low: edges[0], high: edges[1] } : one;
  }

  function scoreCharts({ evals, greedy, downstream }) {
    const steps = evals.map((row) => row.step), of = (rows) => steps.map((step) => rows.find((row) => row.step === step));
    const k = Math.max(1, ...evals.map((row) => row.k || 1)), series = [scored(evals, "pass@1", "pass@1", "--blue")];
    if (k > 1) series.push(scored(evals, "pass@k", `pass@${k}`, "--teal"));
    const rewards = column(evals, "reward");
    if (evals.some((row) => "reward" in row && row.reward !== row["pass@1"])) series.push({ label: "mean reward", color: "--orange", marker: "dot", values: rewards });
    if (greedy.length) series.push(scored(of(greedy), "pass@1", "greedy pass@1", "--purple", "dot"));
    const note = "Share of held-out prompts solved by one answer (pass@1), or any of k; band: 95 % interval. Greedy: one answer at temperature 0.";
    const known = rewards.filter((v) => v !== null), found = series.filter((s) => some(s.values));
    const charts = [chart("Held-out score", { note, steps: found.length ? steps : [], series: found, low: Math.min(0, ...known), high: Math.max(1, ...known), empty: "No evaluation has been made: eval.jsonl has no rows." })];
    const names = Object.keys(downstream);
    if (!names.length) return charts;
    const all = [...new Set(names.flatMap((name) => downstream[name].map((row) => row.step)))].sort((a, b) => a - b);
    const lines = names.map((name, i) => scored(all.map((step) => downstream[name].find((row) => row.step === step)), "pass@1", name, tint(i), "dot"));
    return [...charts, chart("Downstream scores", { note: "pass@1 of sets that are not trained on; band: 95 % interval.", steps: all, series: lines, low: 0, high: 1 })];
  }

  // ---- forecasts: each row has its quantiles; what is not identified has no median

  const LEVELS = ["q05", "q25", "q50", "q75", "q95"];

  function between(x, xs, ys) {  // linear in ln x
    let i = xs.findIndex((v) => v >= x);
    if (i <= 0) return ys[i === 0 ? 0 : ys.length - 1];
    const part = Math.log(x / xs[i - 1]) / Math.log(xs[i] / xs[i - 1]);
    return ys[i - 1] + part * (ys[i] - ys[i - 1]);
  }

  function forecastCharts(rows) {
    const known = rows.filter((row) => row.compute > 0 && Number.isFinite(row.score));
    if (!known.length) return [];
    const last = known[known.length - 1], axis = last.counted || "?", charts = [];
    if (last.curve?.compute && last.curve.q05 && last.curve.q95) {
      const { curve } = last, ends = [known[0].compute, Math.max(curve.compute[curve.compute.length - 1], last.compute)];
      const even = Array.from({ length: 64 }, (_, i) => ends[0] * (ends[1] / ends[0]) ** (i / 63));
      const steps = [...new Set([...known.map((row) => row.compute), ...even])].sort((a, b) => a - b);
      const of = Object.fromEntries(LEVELS.filter((q) => curve[q]).map((q) => [q, steps.map((C) => between(C, curve.compute, curve[q]))]));
      const none = steps.map(() => null), scores = new Map(known.map((row) => [row.compute, row.score]));
      const series = [{ label: of.q50 ? "median, 90 %" : "90 %", color: "--blue", marker: "", values: of.q50 ?? none, low: of.q05, high: of.q95 }];
      if (of.q25) series.push({ label: "50 %", color: "--blue", marker: "", values: none, low: of.q25, high: of.q75 });
      series.push({ label: "measured", color: "--ink", marker: "dot", values: steps.map((C) => scores.get(C) ?? null) });
      charts.push(chart("Score over compute", { note: "Held-out score, 0 to 1, and what is known of its curve, without the noise of evaluations.", steps, series, log_x: true, along: `# ${axis}` }));
    }
    for (const [key, title, note] of [["A", "Predicted ceiling", "Where the curve ends however much is spent (A)"], ["at_budget", "Predicted at the budget", "Where the curve is when the budget is spent"]]) {
      if (!known.some((row) => row[key])) continue;
      const [low, values, high] = [0, 1, 2].map((i) => known.map((row) => row[key]?.[i] ?? null));
      charts.push(chart(title, { note: `${note}; 90 %, without a median where not identified.`, steps: known.map((row) => row.compute), log_x: true, along: `after # ${axis}`, series: [{ label: "median, 90 %", color: "--blue", marker: "dot", values, low, high }] }));
    }
    return charts;
  }

  function forecastTable(rows) {
    const known = rows.filter((row) => row.compute > 0 && Number.isFinite(row.score)).slice(-6), three = (v) => v.toFixed(3);
    const interval = (v) => (v ? `${v[1] === null ? "" : `${three(v[1])} `}[${v[0] === null ? "–" : three(v[0])}, ${v[2] === null ? "–" : three(v[2])}]` : "-");
    const lines = known.map((row) => [`step ${row.step}\n${row.gate ?? ""}`, Charts.short(row.compute), three(row.score), interval(row.A), interval(row.at_budget), interval(row.gain), String(row.verdict ?? "?")]);
    return { title: "Forecast", head: [`spent\n${known[0]?.counted ?? ""}`, "score\nmeasured", "A\n90 %", "at the budget\n90 %", "gain of the rest\n90 %", "verdict"], rows: lines, note: "", words: ["verdict"] };
  }

  // ---- parts of the page

  function figure(item) {
    const shown = item.series.length && item.steps.length, plot = make("div", "plot");
    Object.assign(plot, { tabIndex: 0 });
    plot.setAttribute("role", "img");
    plot.dataset.chart = item.title;
    const caption = make("figcaption", "", make("h3", "", item.title), make("span", "at"), make("p", "", shown ? item.note : item.empty ?? (item.steps.length ? "Not recorded in this run." : "Not recorded in this run, or no step has been finished yet.")));
    const made = make("figure", "chart", caption, ...(shown ? [make("div", "legend"), plot] : []));
    made.plot = shown ? plot : null;
    return made;
  }

  const cell = (tag, className, text) => {
    const [name, ...note] = String(text ?? "").split("\n");
    return make(tag, className, name, note.join(" ") ? make("small", "", ` ${note.join(" ")}`) : null);
  };

  function tableOf({ title, head, rows, note, words = [] }) {
    const number = (i) => (words.includes(head[i]) ? "" : "num");
    const top = make("tr", "", make("th", "", title), ...head.map((name, i) => cell("th", number(i), name)));
    const body = rows.map(([name, ...cells]) => {
      const first = cell("th", "", name), line = make("tr", cells[0] === "0" ? "zero" : "", first);
      first.scope = "row";
      cells.forEach((text, i) => {
        const made = cell("td", number(i), text);
        made.dataset.label = head[i].replace("\n", ", ");
        line.append(made);
      });
      return line;
    });
    for (const made of top.children) made.scope = "col";
    const inside = make("div", "scroll", make("table", "", make("thead", "", top), make("tbody", "", ...body)));
    inside.tabIndex = 0;
    inside.setAttribute("role", "region");
    inside.setAttribute("aria-label", `table: ${title}`);
    return make("div", "card", inside, note ? make("p", "aside", note) : null);
  }

  const facts = (list) => make("dl", "facts", ...list.map(({ name, value: shown, note }) => make("div", "", make("dt", "", name), make("dd", "", shown, note ? make("small", "", ` ${note}`) : null))));
  const pre = (text) => { const made = make("pre", "", text); made.tabIndex = 0; return made; };

  // The answers before and after, side by side: the same prompts.
  function pairsOf(pairs) {
    if (!pairs.length) return make("p", "calm", "Answers of two steps are not recorded yet (log.trajectories_every).");
    const reward = (v) => (v === null || v === undefined ? "no verdict" : `reward ${+v.toFixed(3)}`);
    const side = (name, one) => make("div", "side", make("p", "role", `${name}, step ${one.step}: ${reward(one.reward)}${one.stop === "length" ? ", truncated" : ""}`), pre(one.text || "(nothing)"));
    const asked = (one) => [make("p", "role", `prompt ${one.uid}${one.answer === undefined ? "" : `; right answer: ${one.answer}`}`), pre(one.prompt)];
    const cards = pairs.map(({ same, before, after }) => {
      const sides = [["before", before], ["after", after]].map(([name, one]) => { const made = side(name, one); if (!same) made.prepend(...asked(one)); return made; });
      return make("article", "card pair", ...(same ? asked(before) : []), make("div", "sides", ...sides));
    });
    return make("div", "", pairs[0].same ? null : make("p", "calm", "No prompt was recorded twice, so these are other prompts of the first and of the last recorded step."), make("div", "pairs", ...cards));
  }

  function firstScreen({ state }) {
    const list = make("ul", "concerns");
    list.setAttribute("aria-label", "Warnings");
    const words = { bad: "Warning", look: "Look", note: "Note" };
    list.append(...state.concerns.map(({ level, text }) => make("li", level, make("b", "", words[level]), text)));
    const numbers = make("ol", "numbers", ...state.figures.map((one) => make("li", one.tone, make("span", "", one.name), make("b", "", one.value.split(" [")[0], one.value.includes(" [") ? make("i", "", ` [${one.value.split(" [")[1]}`) : null), make("small", "", one.note))));
    const next = make("ul", "next", ...state.commands.map(([what, command]) => make("li", "", make("span", "", what), make("code", "", command))));
    return [
      make("p", `answer-line ${state.verdict.tone}`, state.verdict.text),
      numbers,
      state.concerns.length ? list : make("p", "calm", "No warnings."),
      make("p", "calm", `Looked at: ${state.looked_at}.`),
      make("section", "", make("h2", "", "Answers before and after"), pairsOf(state.pairs)),
      ...(state.commands.length ? [make("section", "", make("h2", "", "What to do next"), next)] : []),
    ];
  }

  // Ten numbers of several runs, a column for each.
  function sideBySide(runs, between) {
    const names = runs[0].state.figures.map((one) => one.name), short = (one) => one.value;
    const rows = [["Verdict", ...runs.map((run) => run.state.verdict.text)], ...names.map((name, i) => [name, ...runs.map((run) => `${short(run.state.figures[i])}\n${run.state.figures[i].note}`)])];
    return tableOf({ title: "Runs", head: runs.map((run) => `${run.name}\n${run.status.text}`), rows, note: between.join(" "), words: runs.map((run) => `${run.name}\n${run.status.text}`) });
  }

  // ---- the timeline as gantt.js draws it

  const KINDS = ["prefill", "decode", "wait", "publish", "grade", "pack", "train", "save", "start"], IDLE = new Set(["wait", "start"]);
  const pool = (worker) => ({ sampler: "samplers", trainer: "trainer", grader: "graders" }[worker.replace(/[-\d]+$/, "").replace(/s$/, "")] ?? worker);
  const rank = (worker) => { const i = ["samplers", "trainer", "graders"].indexOf(pool(worker)); return i < 0 ? 3 : i; };

  function picture(spans, start, stop, steps, more) {
    const inside = spans.filter((span) => span.to > start && span.from < stop);
    const names = [...new Set(inside.map((span) => span.worker))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
    const lanes = new Map(names.slice(0, LANES).map((worker) => [worker, { worker, used: 0, spans: [] }])), ms = (t) => Math.round(1000 * (t - start));
    for (const span of inside) {
      const lane = lanes.get(span.worker);
      if (!lane) continue;
      lane.spans.push(KINDS.indexOf(span.kind), ms(span.from), ms(span.to) - ms(span.from), span.step ?? -1, span.amount ?? 0);
      const share = (Math.min(stop, span.to) - Math.max(start, span.from)) / Math.max(1e-9, span.to - span.from);
      if (!IDLE.has(span.kind)) lane.used += share * (span.busy ?? span.to - span.from) / (stop - start);
    }
    for (const lane of lanes.values()) lane.used = Math.min(1, lane.used);
    const own = steps.filter(([, from, to]) => to > start && from < stop), each = 1 + Math.floor(own.length / MARKS);
    return { start, seconds: stop - start, kinds: KINDS, lanes: [...lanes.values()], hidden: names.length - lanes.size, steps: own.filter((_, i) => i % each === 0).map(([n, from, to]) => [n, ms(from), ms(to)]), ...more };
  }

  function idleText(lanes) {
    const pools = {};
    for (const lane of lanes) (pools[pool(lane.worker)] ??= []).push(1 - lane.used);
    return Object.entries(pools).map(([name, all]) => `${name} ${Math.round(100 * all.reduce((a, b) => a + b, 0) / all.length)} %`).join(", ");
  }

  // ---- folds: made when they are opened, then kept up to date

  const data = JSON.parse(at("data").textContent), folds = new Map(), mounted = new Map();  // charts by fold and title
  const written = new WeakMap();  // the markup that an element was filled with

  // Fills an element anew only where something has changed: what a reader has opened or selected stays.
  function fillWith(element, ...children) {
    const markup = children.map((child) => child.outerHTML).join("");
    if (written.get(element) === markup) return;
    written.set(element, markup);
    element.replaceChildren(...children);
  }
  let runs = data.runs ?? [], chosen = [], gantt = null, first = null;
  const run = () => runs[0];

  function chartsOf(id) {
    if (runs.length > 1) return acrossRuns(id);
    const { state, rows } = run(), { metrics } = rows;
    const own = (PANELS[id] || []).map((panel) => panelChart(panel, metrics, state)).filter(Boolean);
    if (id === "score") return [...scoreCharts(state), ...chosen.map((key) => panelChart({ title: key, unit: "", note: "Of metrics.jsonl.", keys: [[key, "value"]], always: true }, metrics, state))];
    if (id === "forecast") return forecastCharts(state.forecasts);
    if (id === "timeline" && state.idle.length) {
      const pools = [...new Set(state.idle.flatMap(Object.keys))].filter((name) => name !== "step");
      const series = pools.map((name, i) => ({ label: name, color: tint(i), marker: "", values: column(state.idle, name) }));
      own.unshift(chart("Idle time", { unit: "%", low: 0, note: "Share of each pool's time in which it did no work, in the steps that the timeline has. In one process sampler and trainer share the cores: one's idle time is the other's work.", steps: state.idle.map((row) => row.step), series }));
    }
    if (id === "gap") for (const one of own) one.note = state.mismatch.length ? one.note : one.note.replace(" Dots: measured in full.", "");
    return own;
  }

  // The first line of each panel, of every run.
  function acrossRuns(id) {
    const along = (title, unit, note, of, more) => {
      const steps = [...new Set(runs.flatMap((one) => of(one).map(([step]) => step)))].sort((a, b) => a - b);
      const series = runs.map((one, i) => { const known = new Map(of(one)); return { label: one.name, color: tint(i), marker: more?.marker ?? "", values: steps.map((step) => known.get(step) ?? null) }; }).filter((s) => some(s.values));
      return series.length ? [chart(title, { unit, note, steps, series, ...more })] : [];
    };
    if (id === "score") return along("Held-out score", "", "pass@1 on held-out prompts.", (one) => one.state.evals.map((row) => [row.step, value(row, "pass@1")]), { low: 0, high: 1, marker: "dot", joined: true });
    return (PANELS[id] || []).filter((panel) => panel.keys.length).flatMap((panel) => along(`${panel.title}: ${panel.keys[0][1]}`, panel.unit, panel.note, (one) => one.rows.metrics.map((row) => [row.step, value(row, panel.keys[0][0])]), { low: panel.low ?? null, log: Boolean(panel.log), joined: true }));
  }

  function draw(id, body) {
    const charts = chartsOf(id), known = mounted.get(id) ?? new Map();
    let place = body.querySelector(":scope > .charts");
    if (!place) { place = make("div", "charts"); body.append(place); }
    for (const [title, { item, made }] of known) {
      if (charts.some((one) => one.title === title && one.steps.length)) continue;
      if (item) Charts.remove(item);
      made.remove();
      known.delete(title);
    }
    charts.forEach((one, i) => {
      const had = known.get(one.title);
      if (had?.item) return Charts.update(had.item, one);
      had?.made.remove();
      const made = figure(one);
      place.insertBefore(made, place.children[i] || null);
      known.set(one.title, { made, item: made.plot ? Charts.mount(made.plot, one) : null });
    });
    mounted.set(id, known);
    root.dataset.charts = [...mounted.values()].reduce((sum, of) => sum + [...of.values()].filter((one) => one.item).length, 0);
  }

  const seconds = (s) => (s === null || s === undefined ? "–" : s < 60 ? `${s.toFixed(1)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

  function workersTable(workers) {
    const rows = workers.map((one) => [`${one.worker}\n${one.cause || ""}`, String(one.state), seconds(one.since), ...["version", "running", "sampled"].map((key) => (one[key] === undefined ? "–" : Number(one[key]).toLocaleString("en"))), `${seconds(one.heard)} ago`]);
    return tableOf({ title: "worker", head: ["state", "since", "policy", "running", "tokens", "heard"], rows, note: "", words: ["state"] });
  }

  function picker(body) {
    const input = make("input"), list = make("datalist"), names = make("span", "chosen");
    Object.assign(input, { name: "metric", placeholder: "grad_norm, rewards/…, any column", autocomplete: "off" });
    list.id = "metrics";
    input.setAttribute("list", "metrics");
    const form = make("form", "controls pick", make("label", "", "Another metric ", input), list, names);
    const show = () => {
      names.replaceChildren(...chosen.map((name) => {
        const button = make("button", "", `${name} ×`);
        button.type = "button";
        button.setAttribute("aria-label", `remove ${name}`);
        button.addEventListener("click", () => { chosen = chosen.filter((one) => one !== name); show(); draw("score", body); });
        return button;
      }));
    };
    input.addEventListener("focus", () => list.replaceChildren(...[...new Set(run().rows.metrics.flatMap((row) => Object.keys(row)))].sort().map((name) => new Option(name, name))));
    form.addEventListener("submit", (event) => event.preventDefault());
    input.addEventListener("change", () => {
      const name = input.value.trim();
      if (name && !chosen.includes(name)) chosen.push(name);
      input.value = "";
      show();
      draw("score", body);
    });
    return form;
  }

  function showTimeline(body) {
    const { rows: { timeline: spans }, state, status } = run();
    let drawn = body.querySelector("figure.gantt");
    if (!spans.length) { root.dataset.lanes = 0; return; }
    if (!drawn) {
      drawn = at("gantt").content.firstElementChild.cloneNode(true);
      body.querySelector(".part").before(drawn);
      gantt = Gantt.mount(drawn);
      const stretch = drawn.querySelector("[name=seconds]");
      drawn.querySelector(".window").hidden = !data.live;
      stretch.addEventListener("change", () => showTimeline(body));
    }
    const all = [Math.min(...spans.map((s) => s.from)), Math.max(...spans.map((s) => s.to))];
    const start = data.live ? Math.max(all[0], all[1] - Number(drawn.querySelector("[name=seconds]").value)) : all[0];
    const shown = picture(spans, start, all[1], state.steps, data.live ? { end: status.tone === "live" ? "latest" : "end" } : { name: "the whole run", coarse: run().coarse });
    gantt.show(shown, true);
    root.dataset.lanes = shown.lanes.length;
    body.querySelector(".idle").textContent = `Idle: ${idleText(shown.lanes)} of the time that is shown.`;
  }

  // What a fold shows beside its charts.
  const MORE = {
    gap: ({ state }) => [make("p", "lead", state.gap)],
    timeline: () => [make("p", "lead idle", "No spans are recorded yet: timeline.jsonl has no rows.")],
    forecast: ({ state }) => {
      const newest = state.forecasts[state.forecasts.length - 1], last = [...state.forecasts].reverse().find((row) => row.compute > 0 && Number.isFinite(row.score));
      const later = last && newest.step > last.step ? ` At step ${newest.step} no more could be predicted: ${newest.sentence ?? "?"}.` : "", said = last ?? newest;
      return [make("p", "lead", `After the evaluation of step ${said.step}: ${said.sentence ?? "?"}.${later}`), tableOf(forecastTable(state.forecasts))];
    },
    faults: ({ state }) => state.failed.map((one) => make("details", "", make("summary", "", one.sentence), pre(`${one.trace}\n${one.answer}`.trim()))),
    workers: ({ workers }) => [workers.length ? workersTable(workers) : make("p", "calm", "All in one process.")],
    pictures: () => [
      ...(data.pictures.left_out.length ? [make("p", "aside", `Left out: ${data.pictures.left_out.join(", ")}.`)] : []),
      ...data.pictures.shown.map(([name, address]) => { const img = make("img"); Object.assign(img, { src: address, alt: name }); return make("figure", "picture", make("figcaption", "", name), img); }),
    ],
    recipe: ({ state }) => [facts(state.about), state.recipe ? pre(state.recipe) : make("p", "calm", "The run folder holds no recipe.")],
  };

  function fill(id, body) {
    const part = body.querySelector(".part"), tables = runs.length > 1 ? [] : run().state.tables[id] ?? [];
    if (runs.length === 1 || id === "recipe") fillWith(part, ...(runs.length > 1 ? [] : MORE[id]?.(run()) ?? []), ...tables.filter((one) => one.rows.length).map(tableOf));
    if (id === "score" && runs.length === 1 && !body.querySelector(".pick")) part.after(picker(body));
    if (id === "timeline" && runs.length === 1) showTimeline(body);
    if (PANELS[id] || id === "score" || id === "forecast") draw(id, body);
    if (id === "samples" && !body.dataset.begun) browse(body);
  }

  function browse(body) {
    body.dataset.begun = "yes";
    body.append(at("browser"));
    at("browser").hidden = false;
    const { solved_at: solved } = run().state;
    if (!data.live) {
      const { groups, recorded, left_out: out, unread } = data.samples, shown = groups.reduce((sum, group) => sum + group.rewards.length, 0);
      body.querySelector(".part").append(make("p", "aside", `${shown.toLocaleString("en")} answers of ${new Set(groups.map((group) => group.step)).size} of ${recorded.length} recorded steps are in this page${out ? `; ${out} prompts were left out to keep it small and are in trajectories.jsonl.zst` : ""}.${unread ? ` Its last ${unread.toLocaleString("en")} bytes are no whole rows.` : ""} Hover over a token, or focus an answer and use the arrow keys.`));
      Samples.embedded(data.samples, solved);
    } else Samples.mount({ list: (step) => request("/groups", step === undefined ? {} : { step }), open: (group, place) => request("/group", { step: group.step, place }) }, solved);
  }

  function present(id) {
    const { state, rows, workers } = run(), has = (prefix) => rows.metrics.some((row) => Object.keys(row).some((key) => key.startsWith(prefix)));
    if (runs.length > 1) return Boolean(PANELS[id]) || id === "score";
    const known = { drafts: has("draft/"), forecast: state.forecasts.length, plan: state.tables.plan.length, timeline: rows.timeline.length || has("pipeline/") || has("staleness/"), workers: workers.length, pictures: data.pictures?.shown.length || data.pictures?.left_out.length, samples: data.live || data.samples };
    return id in known ? Boolean(known[id]) : true;
  }

  function foldsOf() {
    const wrong = new Set(runs.length > 1 ? [] : run().state.concerns.filter((one) => one.level !== "note").map((one) => one.about));
    FOLDS.forEach(([id, title, what]) => {
      if (!folds.has(id)) {
        const body = make("div", "body", make("div", "part tables")), fold = make("details", "fold", make("summary", "", make("h2", "", title), make("span", "", what)), body);
        fold.id = id;
        fold.hidden = true;
        fold.addEventListener("toggle", () => fold.open && fill(id, body));
        folds.set(id, { fold, body });
        at("page").append(fold);
      }
      const { fold, body } = folds.get(id), begins = fold.hidden && present(id);
      fold.hidden = !present(id);
      if (begins && (wrong.has(id) || location.hash === "#all" || (runs.length > 1 && ["score", "signal"].includes(id)))) fold.open = true;
      else if (fold.open && !fold.hidden) fill(id, body);
      fold.classList.toggle("wrong", wrong.has(id));
    });
  }

  addEventListener("beforeprint", () => folds.forEach(({ fold }) => { fold.open = !fold.hidden; }));

  // ---- all of it

  function header({ name, status, progress }) {
    document.title = `${data.live && progress.step ? `${progress.step}${progress.of ? `/${progress.of}` : ""} ` : ""}${name} · Ostinato`;
    at("name").textContent = name;
    at("status").className = `state ${status.tone}`;
    at("status").textContent = status.text;
    at("bar").hidden = !progress.share || (!data.live && progress.share === 1);
    at("progress").value = progress.share;
    const left = progress.left && status.tone === "live" ? `, about ${progress.left} left` : "";
    at("steps").textContent = `step ${progress.step}${progress.of ? ` of ${progress.of}` : progress.share ? `, ${Math.round(100 * progress.share)} % of what it may spend` : ""}${left}`;
  }

  function show() {
    if (!first) { first = make("div", "first"); at("page").prepend(first); }
    if (runs.length > 1) {
      at("kind").textContent = "runs side by side";
      at("name").textContent = `${runs.length} runs`;
      document.title = `${runs.length} runs · Ostinato`;
      at("status").hidden = true;
      first.replaceChildren(sideBySide(runs, data.between));
    } else {
      header(run());
      fillWith(first, ...firstScreen(run()));
      const best = run().state.evals.reduce((a, row) => (value(row, "pass@1") > (a?.["pass@1"] ?? -1) ? row : a), null), { metrics } = run().rows;
      const collapse = run().state.alarms.find((one) => one.collapse), marks = best && best.step > 0 && best.step < (metrics[metrics.length - 1]?.step ?? 0) ? [[best.step, "best"]] : [];
      Charts.mark(collapse ? [...marks, [collapse.step, "collapse"]] : marks);
    }
    foldsOf();
  }

  // Tables and charts of something else than a run: arms under a budget.
  function showAnswer() {
    at("kind").textContent = data.kind ?? "";
    at("name").textContent = data.title;
    document.title = `${data.title} · Ostinato`;
    const charts = data.charts.map((one) => chart(one.title, one)).filter((one) => one.series.length), made = charts.map(figure);
    at("page").append(...data.lead.map((sentence) => make("p", "lead", sentence)), make("div", "charts", ...made), make("div", "tables", ...data.tables.map(tableOf)));
    made.forEach((one, i) => Charts.mount(one.plot, charts[i]));
    root.dataset.charts = charts.length;
  }

  // ---- a product's loop: its stage, judge and policy in use, every decision with reasons and cost

  const STAGES = { collect: "Collect", freeze: "Freeze", judge: "Train judge", judge_gates: "Judge's gates", policy: "Train policy", policy_gates: "Policy's gates", canary: "Canary" };
  const when = (ts) => new Date(ts * 1000).toLocaleString("sv");

  function showJournal(rows) {
    at("kind").textContent = "product";
    at("name").textContent = data.name;
    document.title = `${data.name} · Ostinato`;
    const last = rows[rows.length - 1], stage = last?.after.stage ?? "collect";
    const stages = make("ol", "stages", ...Object.entries(STAGES).map(([name, words]) => { const made = make("li", name === stage ? "now" : "", words); if (name === stage) made.setAttribute("aria-current", "step"); return made; }));
    const offices = ["judge", "policy"].map((what) => {
      const revision = last?.after[what] ?? "", since = [...rows].reverse().find((row) => row.before[what] !== revision)?.ts;
      return make("li", "", make("b", "", revision || (what === "policy" ? "the model itself" : "none yet")), ` ${what} in use${revision && since ? ` since ${when(since)}` : ""}`);
    });
    const rounds = new Map();
    for (const row of rows) {
      const one = rounds.get(row.after.round) ?? { pairs: "", judge: "", policy: "", spent: { judge: 0, policy: 0 } }, { figures } = row.finding, from = row.before.stage;
      rounds.set(row.after.round, one);
      const whose = from.startsWith("policy") ? "policy" : "judge";
      if (from.startsWith("judge") || from.startsWith("policy")) one.spent[whose] += figures.seconds ?? 0;  // the others wait for users
      if (from === "collect") one.pairs = String(Math.round(figures.pairs ?? 0));
      else if (from === "judge_gates") one.judge = row.what;
      else if (["policy", "policy_gates", "canary"].includes(from)) one.policy = row.what;
    }
    const lines = [...rounds].reverse().map(([n, one]) => [String(n), one.pairs, one.judge, one.policy, Object.entries(one.spent).filter(([, s]) => s).map(([name, s]) => `${Math.round(s)} s ${name}`).join(" + ")]);
    const decisions = [...rows].reverse().map((row) => [`${row.what}\n${when(row.ts)}`, String(row.before.round), STAGES[row.before.stage] ?? row.before.stage, `${row.finding.reasons.join(" ")}\n${Object.entries(row.finding.figures).filter(([name]) => name !== "seconds").slice(0, 6).map(([name, v]) => `${name} ${+v.toPrecision(4)}`).join(", ")}`, `${(row.finding.figures.seconds ?? 0).toFixed(1)} s`]);
    const page = [stages, make("ul", "totals", ...offices), make("h2", "", "Rounds"), lines.length ? tableOf({ title: "round", head: ["pairs", "judge", "policy", "training and gates"], rows: lines, note: "", words: ["judge", "policy", "training and gates"] }) : make("p", "calm", "No round has begun: the loop collects its first pairs."), make("h2", "", "Decisions, newest first"), tableOf({ title: "decision", head: ["round", "stage", "reasons and figures", "spent"], rows: decisions, note: "", words: ["stage", "reasons and figures"] })];
    if (!first) { first = make("div", "first"); at("page").prepend(first); }
    fillWith(first, ...page);
    root.dataset.decisions = rows.length;
  }

  // ---- rows that are fetched: behind the offset that was read last; of another epoch, from the beginning

  async function request(path, parameters = {}) {
    const reply = await fetch(`${path}?${new URLSearchParams(parameters)}`);
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  }

  const asked = { epoch: -1, from: 0, state: -1 };
  let waiting = false;

  function take(reply) {
    if (data.journal) { data.journal.push(...reply.journal); asked.from = reply.next; return showJournal(data.journal); }
    const before = reply.from === 0 ? { metrics: [], timeline: [] } : run().rows;
    const timeline = before.timeline.concat(reply.rows.timeline), newest = Math.max(...timeline.slice(-1000).map((span) => span.to));
    const rows = { metrics: before.metrics.concat(reply.rows.metrics), timeline: timeline.filter((span) => span.to > newest - HORIZON_MS / 1000) };
    const grown = reply.rows.metrics.length, steps = new Map(rows.metrics.map((row) => [row.step, row]));
    rows.metrics = steps.size === rows.metrics.length ? rows.metrics : [...steps.values()];
    runs = [{ ...reply, state: reply.state ?? run().state, rows }];
    Object.assign(asked, { epoch: reply.epoch, from: reply.next, state: reply.revision });
    if (grown || reply.state || reply.rows.timeline.length) show(); else header(run());
    const shown = folds.get("workers");
    if (shown?.fold.open) fill("workers", shown.body);
    if (grown && folds.get("samples").fold.open) Samples.refresh();
    root.dataset.step = reply.progress.step;
    return undefined;
  }

  async function look() {
    if (waiting) return;
    waiting = true;
    try {
      let reply = await request("/rows", asked);
      take(reply);
      while (reply.more) take(reply = await request("/rows", asked));
      at("gone").hidden = true;
      root.dataset.looks = Number(root.dataset.looks || 0) + 1;
    } catch (error) {
      if (!(error instanceof TypeError) || !/fetch/i.test(error.message)) throw error;  // fetch: no server
      at("gone").hidden = false;
    } finally {
      waiting = false;
    }
  }

  async function follow() {
    await look();
    setTimeout(follow, document.hidden ? HIDDEN : EVERY);
  }

  const foot = at("foot");
  if (data.live) {
    foot.append("Read from the folder by ", make("code", "", "ostinato report --live"), ", which only reads.");
    document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
    follow();
  } else {
    foot.textContent = `Written ${data.written ?? ""} by Ostinato, from the run folder alone. This file opens offline and loads nothing.`;
    if (data.tables) showAnswer(); else show();
  }
})();
