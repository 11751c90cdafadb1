// The page: who is here, which view is shown, and the keys.

import { Problem, get, session } from "./api.js";
import { h, show } from "./dom.js";
import { ask, field, notice } from "./parts.js";
import * as dead from "./views/dead.js";
import * as endpoint from "./views/endpoint.js";
import * as endpoints from "./views/endpoints.js";
import * as events from "./views/events.js";
import * as overview from "./views/overview.js";
import * as replicas from "./views/replicas.js";
import * as schedules from "./views/schedules.js";
import * as trace from "./views/trace.js";

// Path, view, its name in the menu, the key that goes there, and whether it is for the system alone.
const PLACES = [
  ["overview", overview, "Overview", "o"],
  ["endpoints", endpoints, "Endpoints", "e"],
  ["dead", dead, "Dead letters", "d"],
  ["events", events, "Events", "v"],
  ["schedules", schedules, "Schedules", "s"],
  ["replicas", replicas, "Replicas", "r", true],
  ["endpoint", endpoint],
  ["trace", trace],
  ["letter", { view: dead.letter }],
];

let leave = null;

const menu = () => PLACES.filter(([, , label, , system]) => label && !(system && session.tenant !== null));

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// #/dead?endpoint=billing: the place, what follows it, and the filter.
export function here() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [place = "", ...rest] = path.split("/");
  return { place: place || "overview", rest: rest.map(decoded), values: Object.fromEntries(new URLSearchParams(search)) };
}

export function link(place, rest = [], values = {}) {
  const search = new URLSearchParams(values).toString();
  return `#/${[place, ...rest.map(encodeURIComponent)].join("/")}${search ? `?${search}` : ""}`;
}

const THEMES = ["auto", "light", "dark"];

function theme(next) {
  if (next) localStorage.setItem("outbox-theme", next);
  const chosen = localStorage.getItem("outbox-theme") ?? "auto";
  document.documentElement.dataset.theme = chosen;
  return chosen;
}

function top() {
  const { place } = here();
  const parent = { endpoint: "endpoints", trace: "events", letter: "dead" }[place] ?? place;
  show(document.getElementById("top"),
    h("a", { class: "mark", href: "#/overview" }, h("img", { src: "/page/icon.svg", alt: "", width: 22, height: 22 }), "outbox",
      session.me && h("span", { class: "schema" }, session.tenant ?? session.me.schema)),
    session.me && h("nav", { "aria-label": "Views" }, menu().map(([path, , label]) => h("a", {
      href: `#/${path}`, "aria-current": path === parent ? "page" : null }, label))),
    h("div", { class: "tools" },
      h("span", { id: "pulse", role: "status", class: "pulse", title: "Whether the relay answers" }),
      h("button", { type: "button", class: "plain", title: "Light, dark, or as the system",
        onclick: () => { theme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]); top(); } },
        { auto: "◐", light: "○", dark: "●" }[theme()], h("span", { class: "wide" }, ` ${theme()}`)),
      session.me && h("button", { type: "button", class: "plain", title: "Keys (?)", onclick: keys }, "?"),
      session.me && h("button", { type: "button", class: "plain", onclick: signOut }, "Sign out")));
  document.querySelector("#top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

export function pulse(error) {
  const place = document.getElementById("pulse");
  if (!place) return;
  place.className = `pulse ${error ? "bad" : "good"}`;
  place.textContent = error ? `${error.message}; trying again` : "live";
  if (error?.status === 401) signOut("The token is not good any more.");
}

function signOut(text) {
  leave?.();
  leave = null;
  session.token = null;
  session.me = null;
  document.getElementById("dialog").close();
  signIn(typeof text === "string" ? text : "");
}

async function signIn(text = "") {
  top();
  const input = h("input", { name: "token", type: "password", required: true, autocomplete: "off", spellcheck: "false",
    placeholder: "obx_…", "aria-describedby": "how" });
  const form = h("form", {
    class: "door",
    onsubmit: (event) => {
      event.preventDefault();
      session.token = input.value.trim();
      begin();
    },
  }, h("h1", null, "Who is there?"), text && h("p", { class: "bad", role: "alert" }, text),
    field("Token", input),
    h("button", { type: "submit", class: "main" }, "Come in"),
    h("p", { id: "how", class: "hint" }, "A token is made by ", h("code", null, "outbox token add me --scope read --scope operate"),
      ". It stays in this tab, and is forgotten when the tab is closed."));
  document.getElementById("main").replaceChildren(form);
  input.focus();
}

async function begin() {
  try {
    session.me = await get("/v1/me");
  } catch (error) {
    session.me = null;
    if (error instanceof Problem && error.status === 401) {
      session.token = null;
      return signIn("This token is unknown, expired or revoked.");
    }
    signIn(error.message);
    return undefined;
  }
  return route();
}

function route() {
  if (!session.me) return;
  const { place, rest, values } = here();
  const found = PLACES.find(([path]) => path === place) ?? PLACES[0];
  leave?.();
  leave = null;
  notice("");
  top();
  const main = h("div", { class: `view ${found[0]}` });
  document.getElementById("main").replaceChildren(main);
  document.title = `${found[2] ?? rest[0] ?? "outbox"} – outbox`;
  leave = found[1].view(main, rest, values) ?? null;
}

async function keys() {
  await ask("Keys", h("dl", { class: "facts keys" },
    menu().map(([, , label, key]) => h("div", null, h("dt", null, h("kbd", null, "g"), " ", h("kbd", null, key)), h("dd", null, label))),
    h("div", null, h("dt", null, h("kbd", null, "/")), h("dd", null, "Find an event")),
    h("div", null, h("dt", null, h("kbd", null, "?")), h("dd", null, "This list"))), { yes: "Close", no: null });
}

let prefix = false;

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !session.me) return;
  const { key } = event;
  if (prefix) {
    prefix = false;
    const found = menu().find(([, , , letter]) => letter === key);
    if (found) location.hash = `#/${found[0]}`;
  } else if (key === "g") prefix = true;
  else if (key === "?") keys();
  else if (key === "/") {
    event.preventDefault();
    if (here().place !== "events") location.hash = "#/events";
    setTimeout(() => document.querySelector(".find input")?.focus());
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("hashchange", () => { route(); scrollTo(0, 0); });
theme();
if (session.token) begin();
else signIn();
