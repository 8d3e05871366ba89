// Sends what users do with answers to `POST /feedback` of an Ostinato server. Times are the browser's.
//
//   const feedback = ostinatoFeedback({ url: "http://127.0.0.1:8000/feedback", user: "a pseudonym" });
//   feedback.thumb(id, true);  feedback.edit(id, "the whole text behind the edit");  feedback.watch(id, element);
//
// `id` is the id of the response. An event is sent until the server has it, with the same id each time, so it counts
// once; what is not acknowledged outlives the page. At most `most` events wait; more are dropped and counted.
"use strict";

function ostinatoFeedback(options = {}) {
  const set = {
    url: "feedback", key: "", user: "", session: "", tenant: "", consent: true, personal: false,
    most: 500, wait: 1000, longest: 60000, store: "ostinato-feedback", ...options,
  };
  const counts = { sent: 0, refused: 0, dropped: 0, retries: 0 };
  let pending = kept(), timer = null, sending = false, delay = 0;

  function newId() {
    if (globalThis.crypto && crypto.randomUUID) return crypto.randomUUID();  // in secure contexts alone
    return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  function kept() {
    try { return JSON.parse(localStorage.getItem(set.store)) || []; } catch { return []; }
  }

  function keep() {
    try { localStorage.setItem(set.store, JSON.stringify(pending)); } catch { /* no storage: the page's memory alone */ }
  }

  function send(kind, id, more = {}) {
    const who = {};
    for (const name of ["user", "session", "tenant"]) if (set[name]) who[name] = set[name];
    if (!set.consent) who.consent = false;
    if (set.personal) who.personal = true;
    const event = { event_id: newId(), response_id: id, kind, ts: Date.now() / 1000, ...who, ...more };
    if (pending.length >= set.most) { counts.dropped += 1; return null; }
    pending.push(event);
    keep();
    schedule(set.wait);
    return event.event_id;
  }

  function schedule(after) {
    if (timer === null) timer = setTimeout(flush, after);
  }

  function batch() { return pending.slice(0, 100); }

  function post(events) {
    const headers = { "Content-Type": "application/json", ...(set.key ? { Authorization: `Bearer ${set.key}` } : {}) };
    return fetch(set.url, { method: "POST", body: JSON.stringify(events), keepalive: true, headers });
  }

  async function flush() {
    clearTimeout(timer);
    timer = null;
    if (sending || !pending.length) return;
    sending = true;
    const events = batch();
    let done = false;
    try {
      const reply = await post(events);
      if (reply.ok) {
        const refused = (await reply.json()).refused.length;
        counts.sent += events.length - refused;
        counts.refused += refused;
        done = true;
      } else if (reply.status < 500 && ![401, 403, 408, 429].includes(reply.status)) {
        counts.refused += events.length;  // as a whole, and it would be again
        done = true;
      }
    } catch { /* no server now: later */ }
    sending = false;
    if (done) {
      const ids = new Set(events.map((event) => event.event_id));
      pending = pending.filter((event) => !ids.has(event.event_id));
      keep();
      delay = 0;
    } else {
      counts.retries += 1;
      delay = Math.min(set.longest, 2 * (delay || set.wait));
    }
    if (pending.length) schedule(delay || set.wait);
  }

  function leave() {  // unacknowledged: they stay and go again with the next page, under the same ids
    for (const dwell of dwells.values()) dwell();
    if (pending.length) post(batch()).catch(() => {});
  }

  // ---- dwell: seconds for which an answer was in sight, in a page in front

  const dwells = new Map();

  function watch(id, element) {
    let since = null, seconds = 0, inSight = false, told = 0;
    const tick = () => {
      if (since !== null) seconds += (performance.now() - since) / 1000;
      since = inSight && document.visibilityState === "visible" ? performance.now() : null;
    };
    const tell = () => {
      tick();
      if (seconds - told >= 0.5) { send("dwell", id, { value: Math.round((seconds - told) * 100) / 100 }); told = seconds; }
    };
    const seen = new IntersectionObserver((entries) => { inSight = entries[entries.length - 1].isIntersecting; tick(); });
    const copied = () => send("copy", id);
    seen.observe(element);
    element.addEventListener("copy", copied);
    document.addEventListener("visibilitychange", tick);
    dwells.set(element, tell);
    return () => {
      tell();
      seen.disconnect();
      element.removeEventListener("copy", copied);
      document.removeEventListener("visibilitychange", tick);
      dwells.delete(element);
    };
  }

  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "hidden") leave(); });
  addEventListener("pagehide", leave);
  if (pending.length) schedule(set.wait);

  return {
    send, flush, watch, counts,
    get pending() { return pending.length; },
    set(more) { Object.assign(set, more); },
    shown: (id, exposure = {}, replaces = "") => send("shown", id, { exposure, ...(replaces ? { replaces } : {}) }),
    thumb: (id, up) => send("rating", id, { value: up ? 1 : -1 }),
    rate: (id, value) => send("rating", id, { value }),
    accept: (id) => send("accept", id),
    reject: (id) => send("reject", id),
    edit: (id, after) => send("edit", id, { after }),
    regenerate: (id) => send("regenerate", id),
    copy: (id) => send("copy", id),
    undo: (id) => send("undo", id),
    cancel: (id) => send("cancel", id),
    outcome: (id, ok) => send(ok ? "run_ok" : "run_fail", id),
    done: (id) => send("task_done", id),
    abandon: (id) => send("abandon", id),
    returned: (id) => send("return_visit", id),
    comment: (id, text) => send("comment", id, { text }),
  };
}
