// Look again every two seconds while the tab is seen, more slowly while nobody answers.

const EVERY_MS = 2000;
const SLOWEST_MS = 15000;

// `look(signal)` is called again and again; returns what ends it.
export function live(look, failed, every = EVERY_MS) {
  const ended = new AbortController();
  let timer = 0;
  let wait = every;

  async function turn() {
    clearTimeout(timer);
    if (ended.signal.aborted) return;
    if (!document.hidden) {
      try {
        await look(ended.signal);
        failed(null);
        wait = every;
      } catch (error) {
        if (ended.signal.aborted || error.name === "AbortError") return;
        failed(error);
        wait = Math.min(wait * 1.5, SLOWEST_MS);
      }
    }
    if (!ended.signal.aborted) timer = setTimeout(turn, wait);
  }

  const seen = () => { if (!document.hidden) turn(); };
  document.addEventListener("visibilitychange", seen);
  turn();
  return () => {
    ended.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}
