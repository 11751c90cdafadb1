// Numbers and times as people read them.

const round = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(n) {
  if (n === null || n === undefined) return "–";
  return Math.abs(n) < 100000 ? round.format(n) : short.format(n);
}

export function rate(n) {
  if (n === null || n === undefined) return "–";
  return n > 0 && n < 10 ? n.toFixed(1) : count(n);
}

// Beside an axis there is little room.
export function tick(n) {
  return Math.abs(n) < 10000 ? rate(n) : short.format(n);
}

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.abs(seconds);
  if (s < 0.001) return "0 ms";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  for (const [unit, size] of UNITS) {
    if (s < size && unit !== "s") continue;
    const whole = Math.floor(s / size);
    const next = UNITS[UNITS.findIndex(([u]) => u === unit) + 1];
    const rest = next ? Math.floor((s % size) / next[1]) : 0;
    return rest && whole < 10 ? `${whole} ${unit} ${rest} ${next[0]}` : `${whole} ${unit}`;
  }
  return `${Math.round(s)} s`;
}

// "3 min ago", by the server's clock: `now` is what it last said.
export function ago(at, now) {
  if (!at) return "never";
  const seconds = (now - Date.parse(at)) / 1000;
  if (Math.abs(seconds) < 1) return "just now";
  return seconds >= 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
}

const two = (n) => String(n).padStart(2, "0");

// The time of day: 13:09:58.
export function clock(at) {
  const t = new Date(at);
  return [t.getHours(), t.getMinutes(), t.getSeconds()].map(two).join(":");
}

// 2026-11-22 13:09:58 +00:00, in the zone of whoever reads.
export function time(at) {
  if (!at) return "–";
  const t = new Date(at);
  const east = -t.getTimezoneOffset();
  const zone = `${east < 0 ? "-" : "+"}${two(Math.trunc(Math.abs(east) / 60))}:${two(Math.abs(east) % 60)}`;
  return `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ${clock(t)} ${zone}`;
}

// What lasts until the end of all calendars lasts for ever.
export const end = (at) => (!at || new Date(at).getUTCFullYear() >= 9999 ? "never" : time(at));

export const capital = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}`;

// A text of the API's as a sentence of the page.
export function sentence(text) {
  const whole = capital(text);
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1024) return `${n} B`;
  return n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
