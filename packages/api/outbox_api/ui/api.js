// API client.  The token is kept in sessionStorage, for this tab and this path only: a proxy may have several
// installations, each below a prefix.

import { parse, stringify } from "./json.js";

const KEY = `outbox-token ${location.pathname}`;

export const session = {
  get token() { return sessionStorage.getItem(KEY); },
  set token(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
  me: null,
  // Clock offset in ms: server time minus local time.
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
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(values ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") parameters.append(name, each);
    }
  }
  const text = parameters.toString();
  return text ? `?${text}` : "";
}

async function send(method, path, body, signal) {
  const headers = { Authorization: `Bearer ${session.token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  let text;
  try {
    // Relative to the page: a proxy may have it below a prefix.
    response = await fetch(path.slice(1), {
      method, headers, signal, body: body === undefined ? undefined : stringify(body),
    });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the relay does not respond");
  }
  const date = Date.parse(response.headers.get("Date") ?? "");
  if (date) {
    // The Date header has whole seconds: smaller offsets are not corrected.
    const offset = date - Date.now();
    session.skew = Math.abs(offset) > 2000 ? offset : 0;
  }
  let result = null;
  try {
    result = text ? parse(text) : null;
  } catch {
    throw new Problem(response.status, `the response is not JSON (status ${response.status})`);
  }
  if (response.status === 401 && session.me) dispatchEvent(new Event("unauthenticated"));
  if (!response.ok) throw new Problem(response.status, result?.detail ?? response.statusText);
  return result;
}

export const get = (path, values, signal) => send("GET", path + query(values), undefined, signal);
export const post = (path, body = {}) => send("POST", path, body);
export const put = (path, body) => send("PUT", path, body);
export const patch = (path, body) => send("PATCH", path, body);
export const remove = (path, values) => send("DELETE", path + query(values));
export const name = (text) => encodeURIComponent(text);
