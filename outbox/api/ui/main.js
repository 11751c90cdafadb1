// The page: who is here, which view is shown, and the keys.

import { Problem, get, session } from "./api.js";
import { newView, pulse } from "./connection.js";
import { door } from "./door.js";
import { h, show } from "./dom.js";
import { ask, notice } from "./talk.js";
import { here, link, meant } from "./places.js";
import * as dead from "./views/dead.js";
import * as endpoint from "./views/endpoint.js";
import * as endpoints from "./views/endpoints.js";
import * as events from "./views/events.js";
import * as letter from "./views/letter.js";
import * as overview from "./views/overview.js";
import * as replicas from "./views/replicas.js";
import * as schedules from "./views/schedules.js";
import * as trace from "./views/trace.js";

// Path, view, its name in the menu, the key that goes there, and whether it is for the system alone.
// To look takes the scope "read", whatever it is.
const PLACES = [
  ["overview", overview, "Overview", "o"],
  ["endpoints", endpoints, "Endpoints", "e"],
  ["dead", dead, "Dead letters", "d"],
  ["events", events, "Events", "v"],
  ["schedules", schedules, "Schedules", "s"],
  ["replicas", replicas, "Replicas", "r", true],
  ["endpoint", endpoint],
  ["trace", trace],
  ["letter", letter],
];

let leave = null;

const menu = () => PLACES.filter(([, , label, , system]) => label && session.may("read") && !(system && session.tenant !== null));

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
    session.may("read") && h("nav", { "aria-label": "Views" }, menu().map(([path, , label]) => h("a", {
      href: `#/${path}`, "aria-current": path === parent ? "page" : null }, label))),
    h("div", { class: "tools" },
      session.me && pulse(),
      h("button", { type: "button", class: "plain", title: "Light, dark, or as the system",
        onclick: () => { theme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]); top(); } },
        { auto: "◐", light: "○", dark: "●" }[theme()], h("span", { class: "wide" }, ` ${theme()}`)),
      session.me && h("button", { type: "button", class: "plain", title: "Keys (?)", onclick: keys }, "?"),
      session.me && h("button", { type: "button", class: "plain", onclick: signOut }, "Sign out")));
  document.querySelector("#top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function signOut(text) {
  leave?.();
  leave = null;
  session.token = null;
  session.me = null;
  document.getElementById("dialog").close();
  signIn(typeof text === "string" ? text : "");
}

function signIn(text = "") {
  newView();
  top();
  door(begin, text);
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

function nothing(place, title, text) {
  show(place, h("h1", null, title), h("p", null, text ?? h("a", { href: link("overview") }, "To the overview")));
}

function route() {
  if (!session.me) return;
  const { place, rest, values } = here();
  const instead = meant({ place, rest });
  if (instead) return location.replace(instead);
  const found = PLACES.find(([path]) => path === place);
  leave?.();
  leave = null;
  notice("");
  newView();
  top();
  const main = h("div", { class: `view ${place}` });
  document.getElementById("main").replaceChildren(main);
  document.title = `${found?.[2] ?? rest[0] ?? "outbox"} – outbox`;
  if (!found) nothing(main, "There is no such view.");
  else if (!session.may("read")) nothing(main, "This token may not look at anything.", "It may only publish. Sign in with one that has the scope read.");
  else leave = found[1].view(main, rest, values) ?? null;
}

async function keys() {
  await ask("Keys", h("dl", { class: "facts keys" },
    menu().map(([, , label, key]) => h("div", null, h("dt", null, h("kbd", null, "g"), " ", h("kbd", null, key)), h("dd", null, label))),
    h("div", null, h("dt", null, h("kbd", null, "/")), h("dd", null, "Find an event")),
    h("div", null, h("dt", null, h("kbd", null, "?")), h("dd", null, "This list"))), { yes: "Close", no: null });
}

let prefix = false;

document.addEventListener("keydown", (event) => {
  const { target } = event;
  // Until the next frame the focus is still in a dialog that has just been closed.
  const typing = target.closest?.("dialog")?.open ?? target.matches?.("input, textarea, select");
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
    const search = () => document.querySelector(".find input");
    // At once where it is there: what is typed next belongs to it.
    if (here().place === "events" && search()) return void search().focus();
    location.hash = "#/events";
    setTimeout(() => search()?.focus());
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("unauthenticated", () => signOut("The token is not good any more."));
window.addEventListener("hashchange", () => { route(); scrollTo(0, 0); });
theme();
if (session.token) begin();
else signIn();
