// Look again and again while the tab is seen; what will never do is not tried again.

import { Problem, get } from "./api.js";
import { answered, lost } from "./connection.js";
import { h, show } from "./dom.js";
import { link } from "./places.js";
import { sentence } from "./say.js";

const EVERY_MS = 2000;
const WAIT_MAX_MS = 5000;
// What takes longer is no answer: what is shown gets old meanwhile.
const ANSWER_MS = 15000;

const LATER = [408, 425, 429];

export const permanent = (error) => error.status >= 400 && error.status < 500 && !LATER.includes(error.status);

// Instead of a view that this token cannot have, or that there is not.
export function refuse(place, error, missing) {
  const why = error.status === 403 ? "This token may not see that."
    : error.status === 404 && missing ? missing : sentence(error.message);
  show(place, h("h1", { class: "refused" }, why), h("p", null, h("a", { href: link("overview") }, "To the overview")));
}

// `look(signal, acted)` is called again and again, and at once when something was done, which
// `acted` says; returns what ends it.  `missing` is what a 404 means.
export function live(place, look, { every = EVERY_MS, missing } = {}) {
  const ended = new AbortController();
  let timer = 0;
  let busy = false;
  let acted = false;
  let failures = 0;

  async function turn() {
    clearTimeout(timer);
    if (busy || document.hidden || ended.signal.aborted) return;
    busy = true;
    const fresh = acted;
    acted = false;
    let wait = every;
    try {
      await look(AbortSignal.any([ended.signal, AbortSignal.timeout(ANSWER_MS)]), fresh);
      if (ended.signal.aborted) return;
      failures = 0;
      answered();
    } catch (error) {
      if (ended.signal.aborted) return;
      if (permanent(error)) {
        answered();
        refuse(place, error, missing);
        return;
      }
      if (!(error instanceof Problem)) reportError(error);
      wait = Math.min(EVERY_MS * 1.5 ** failures, WAIT_MAX_MS);
      failures += 1;
      lost(error, Date.now() + wait);
    } finally {
      busy = false;
    }
    // This look may not have seen what was done meanwhile.
    timer = setTimeout(turn, acted ? 0 : wait);
  }

  addEventListener("acted", () => { acted = true; turn(); }, { signal: ended.signal });
  // Whoever comes back to the tab, or to the network, does not wait.
  document.addEventListener("visibilitychange", turn, { signal: ended.signal });
  addEventListener("online", turn, { signal: ended.signal });
  turn();
  return () => {
    ended.abort();
    clearTimeout(timer);
  };
}

// Load something once, as soon as it can be had; then only ask whether somebody is there.
export function once(place, load, options = {}) {
  let loaded = false;
  return live(place, async (signal) => {
    if (loaded) return void await get("/v1/me", {}, signal);
    await load(signal);
    loaded = true;
  }, { every: WAIT_MAX_MS, ...options });
}
