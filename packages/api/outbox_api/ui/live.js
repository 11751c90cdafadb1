// Polling: refresh a view while the tab is visible; permanent errors stop it.

import { Problem, get } from "./api.js";
import { connected, disconnected } from "./connection.js";
import { h, show } from "./dom.js";
import { link } from "./router.js";
import { sentence } from "./format.js";

const EVERY_MS = 2000;
const WAIT_MAX_MS = 5000;
// A slower response counts as a failure: the data shown is stale meanwhile.
const TIMEOUT_MS = 15000;

const RETRYABLE = [408, 421, 425, 429];

export const permanent = (error) => error.status >= 400 && error.status < 500 && !RETRYABLE.includes(error.status);

// Replace a view that this token may not read, or that does not exist.
function showRefusal(place, error, missing, otherwise) {
  const why = error.status === 403 ? "This token may not view this page."
    : error.status === 404 && missing ? missing : sentence(error.message);
  show(place, h("h1", { class: "refused" }, why), error.status === 404 ? otherwise?.(error) : null,
    h("p", null, h("a", { href: link("overview") }, "Go to the overview")));
}

// Call `refresh(signal, acted)` periodically, and at once after an action (`acted` is true then).
// Returns a function that stops it.  `every` is in ms, or returns them.  `missing` is the text for a 404, and
// `otherwise(error)` returns elements below it.  `details(signal, acted)` reads
// what takes longer, after `refresh` has painted: the data shown is as of the end of `refresh`.
export function live(place, refresh, { every = EVERY_MS, missing, otherwise, details } = {}) {
  const ended = new AbortController();
  let timer = 0;
  let busy = false;
  let acted = false;
  let failures = 0;

  async function poll() {
    clearTimeout(timer);
    if (busy || document.hidden || ended.signal.aborted) return;
    busy = true;
    const afterAction = acted;
    acted = false;
    let wait = typeof every === "function" ? every() : every;
    const signal = () => AbortSignal.any([ended.signal, AbortSignal.timeout(TIMEOUT_MS)]);
    try {
      await refresh(signal(), afterAction);
      if (ended.signal.aborted) return;
      connected();
      await details?.(signal(), afterAction);
      if (ended.signal.aborted) return;
      failures = 0;
    } catch (error) {
      if (ended.signal.aborted) return;
      if (permanent(error)) {
        connected();
        showRefusal(place, error, missing, otherwise);
        return;
      }
      if (!(error instanceof Problem)) reportError(error);
      wait = Math.min(EVERY_MS * 1.5 ** failures, WAIT_MAX_MS);
      failures += 1;
      disconnected(error, Date.now() + wait);
    } finally {
      busy = false;
    }
    // This refresh may have read the state before the action.
    timer = setTimeout(poll, acted ? 0 : wait);
  }

  addEventListener("acted", () => { acted = true; poll(); }, { signal: ended.signal });
  // Refresh at once when the tab becomes visible or the network comes back.
  document.addEventListener("visibilitychange", poll, { signal: ended.signal });
  addEventListener("online", poll, { signal: ended.signal });
  poll();
  return () => {
    ended.abort();
    clearTimeout(timer);
  };
}

// A read that is repeated after `every` ms at the earliest, after a failure, or after an action with `onAction`.
export function occasionally(every, read, { onAction = false } = {}) {
  let readAt = -Infinity;
  return async (signal, acted) => {
    if (performance.now() - readAt < every && !(acted && onAction)) return;
    readAt = performance.now();
    try {
      await read(signal);
    } catch (error) {
      readAt = -Infinity;
      throw error;
    }
  };
}

// Load once, retrying until it succeeds; then only check the connection.
export function once(place, load, options = {}) {
  let loaded = false;
  return live(place, async (signal) => {
    if (loaded) return void await get("/v1/me", {}, signal);
    await load(signal);
    loaded = true;
  }, { every: WAIT_MAX_MS, ...options });
}
