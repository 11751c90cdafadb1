// The API, with the token that somebody gave this tab.  It is kept for the tab alone.

const KEY = "outbox-token";

export const session = {
  get token() { return sessionStorage.getItem(KEY); },
  set token(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  me: null,
  // How far the server's clock is ahead of this machine's, in ms.
  skew: 0,
  now() { return Date.now() + this.skew; },
  may(scope) { return this.me?.scopes.includes(scope) ?? false; },
  get tenant() { return this.me?.tenant ?? null; },
};

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export function query(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") found.append(name, each);
    }
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

async function ask(method, path, body, signal) {
  const headers = { Authorization: `Bearer ${session.token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  let text;
  try {
    answer = await fetch(path, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the relay does not answer");
  }
  const date = Date.parse(answer.headers.get("Date") ?? "");
  if (date) {
    // It has whole seconds: less than that is not worth a correction.
    const off = date - Date.now();
    session.skew = Math.abs(off) > 2000 ? off : 0;
  }
  let told = null;
  try {
    told = text ? JSON.parse(text) : null;
  } catch {
    throw new Problem(answer.status, `an answer that makes no sense (${answer.status})`);
  }
  if (answer.status === 401 && session.me) dispatchEvent(new Event("unauthenticated"));
  if (!answer.ok) throw new Problem(answer.status, told?.detail ?? answer.statusText);
  return told;
}

export const get = (path, values, signal) => ask("GET", path + query(values), undefined, signal);
export const post = (path, body = {}) => ask("POST", path, body);
export const remove = (path, values) => ask("DELETE", path + query(values));
export const name = (text) => encodeURIComponent(text);
