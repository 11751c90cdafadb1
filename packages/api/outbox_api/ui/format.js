// Format numbers, durations, times and sentences.

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

// Short form for axis labels.
export function axisLabel(n) {
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

// Relative time, such as "3 min ago"; `now` is in ms by the server's clock.
export function ago(at, now) {
  if (!at) return "never";
  const seconds = (now - Date.parse(at)) / 1000;
  if (Math.abs(seconds) < 1) return "just now";
  return seconds >= 0 ? `${duration(seconds)} ago` : `in ${duration(-seconds)}`;
}

const twoDigits = (n) => String(n).padStart(2, "0");

// Time of day: 13:09:58.
export function clock(at) {
  const t = new Date(at);
  return [t.getHours(), t.getMinutes(), t.getSeconds()].map(twoDigits).join(":");
}

// 2026-11-22 13:09:58 +00:00, in the browser's time zone.
export function time(at) {
  if (!at) return "–";
  const t = new Date(at);
  const offset = -t.getTimezoneOffset();
  const zone = `${offset < 0 ? "-" : "+"}${twoDigits(Math.trunc(Math.abs(offset) / 60))}:${twoDigits(Math.abs(offset) % 60)}`;
  return `${t.getFullYear()}-${twoDigits(t.getMonth() + 1)}-${twoDigits(t.getDate())} ${clock(t)} ${zone}`;
}

// Expiry; PostgreSQL's infinity arrives as the year 9999.
export const expiry = (at) => (!at || new Date(at).getUTCFullYear() >= 9999 ? "never" : time(at));

export const capital = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}`;

// An error text of the API as a sentence.
export function sentence(text) {
  const whole = capital(text);
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  if (n < 1024) return `${n} B`;
  return n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;
}

// Size of an event's payload, and its type unless it is JSON.
export const payloadSize = (event) => `${bytes(event.payload_bytes)}${event.content_type ? ` of ${event.content_type}` : ""}`;

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
