// Entry point: session, routing, header and keyboard shortcuts.

import { Problem, get, session } from "./api.js";
import { indicatorElement, resetConnection } from "./connection.js";
import { showLogin } from "./login.js";
import { h, show } from "./dom.js";
import { closeMenus, moveByArrow } from "./components.js";
import { confirm, notice } from "./dialogs.js";
import { currentRoute, link, canonicalLink } from "./router.js";
import { visible } from "./text.js";
import * as deliveries from "./views/deliveries.js";
import * as deadLetters from "./views/dead_letters.js";
import * as editEndpoint from "./views/edit_endpoint.js";
import * as endpoint from "./views/endpoint.js";
import * as endpoints from "./views/endpoints.js";
import * as events from "./views/events.js";
import * as deadLetter from "./views/dead_letter.js";
import * as journal from "./views/journal.js";
import * as newEndpoint from "./views/new_endpoint.js";
import * as overview from "./views/overview.js";
import * as preview from "./views/preview.js";
import * as replicas from "./views/replicas.js";
import * as schedules from "./views/schedules.js";
import * as tokens from "./views/tokens.js";
import * as trace from "./views/trace.js";

// Path, view module, menu label, shortcut key, whether the view is for system tokens only, and the
// scope that it needs besides "read".
const PLACES = [
  ["overview", overview, "Overview", "o"],
  ["endpoints", endpoints, "Endpoints", "e"],
  ["deliveries", deliveries, "Deliveries", "l"],
  ["dead-letters", deadLetters, "Dead letters", "d"],
  ["events", events, "Events", "v"],
  ["schedules", schedules, "Schedules", "s"],
  ["replicas", replicas, "Replicas", "r", true],
  ["journal", journal, "Journal", "j"],
  ["tokens", tokens, "Tokens", "t", true, "operate"],
  ["endpoint", endpoint],
  ["new-endpoint", newEndpoint],
  ["edit-endpoint", editEndpoint],
  ["preview", preview],
  ["trace", trace],
  ["dead-letter", deadLetter],
];

// The menu entry of each view that has none of its own.
const PARENTS = {
  endpoint: "endpoints", "new-endpoint": "endpoints", "edit-endpoint": "endpoints", preview: "endpoints",
  trace: "events", "dead-letter": "dead-letters",
};

let stopView = null;
// The place that is shown, without its filters.
let shownPlace = null;

const menu = () => PLACES.filter(([, , label, , system, scope = "read"]) => label && session.may("read") && session.may(scope)
  && !(system && session.tenant !== null));

const THEMES = ["auto", "light", "dark"];

function theme(next) {
  if (next) localStorage.setItem("outbox-theme", next);
  const chosen = localStorage.getItem("outbox-theme") ?? "auto";
  document.documentElement.dataset.theme = chosen;
  return chosen;
}

function drawHeader() {
  const { place } = currentRoute();
  const parent = PARENTS[place] ?? place;
  show(document.getElementById("top"),
    h("a", { class: "mark", href: "#/overview" }, h("img", { src: "page/icon.svg", alt: "", width: 22, height: 22 }), "outbox",
      session.me && h("span", { class: "schema" }, session.tenant ?? session.me.schema)),
    session.may("read") && h("nav", { "aria-label": "Views" }, menu().map(([path, , label]) => h("a", {
      href: `#/${path}`, "aria-current": path === parent ? "page" : null }, label))),
    h("div", { class: "tools" },
      session.me && indicatorElement(),
      h("button", { type: "button", class: "plain", title: "Theme: light, dark or system",
        onclick: () => { theme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]); drawHeader(); } },
        { auto: "◐", light: "○", dark: "●" }[theme()], h("span", { class: "wide" }, ` ${theme()}`)),
      session.me && h("button", { type: "button", class: "plain", title: "Keyboard shortcuts (?)", onclick: showShortcuts }, "?"),
      session.me && h("button", { type: "button", class: "plain", onclick: signOut }, "Sign out")));
  document.querySelector("#top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function signOut(text) {
  stopView?.();
  stopView = null;
  session.token = null;
  session.me = null;
  document.getElementById("dialog").close();
  signIn(typeof text === "string" ? text : "");
}

function signIn(text = "") {
  resetConnection();
  drawHeader();
  showLogin(begin, text);
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

function showMessage(place, title, text) {
  show(place, h("h1", null, title), h("p", null, text ?? h("a", { href: link("overview") }, "Go to the overview")));
}

function route() {
  if (!session.me) return;
  const { place, rest, values } = currentRoute();
  const canonical = canonicalLink({ place, rest });
  if (canonical) return location.replace(canonical);
  const found = PLACES.find(([path]) => path === place);
  shownPlace = JSON.stringify([place, rest]);
  stopView?.();
  stopView = null;
  notice("");
  // A dialog is about the view that opened it; a persistent one opens again.
  document.getElementById("dialog").close();
  resetConnection();
  drawHeader();
  const main = h("div", { class: `view ${place}` });
  document.getElementById("main").replaceChildren(main);
  document.title = visible(`${found?.[2] ?? rest[0] ?? "outbox"} – outbox`);
  if (!found) showMessage(main, "Page not found.");
  else if (!session.may("read")) showMessage(main, "This token may not read anything.", "Sign in with a token that has the scope read.");
  else stopView = found[1].view(main, rest, values) ?? null;
}

async function showShortcuts() {
  await confirm("Keyboard shortcuts", h("dl", { class: "facts keys" },
    menu().map(([, , label, key]) => h("div", null, h("dt", null, h("kbd", null, "g"), " ", h("kbd", null, key)), h("dd", null, label))),
    h("div", null, h("dt", null, h("kbd", null, "/")), h("dd", null, "Search")),
    h("div", null, h("dt", null, h("kbd", null, "↑"), " ", h("kbd", null, "↓")), h("dd", null, "From the field or a row to the next row")),
    h("div", null, h("dt", null, h("kbd", null, "Enter")), h("dd", null, "Open what is focused")),
    h("div", null, h("dt", null, h("kbd", null, "Esc")), h("dd", null, "Close it")),
    h("div", null, h("dt", null, h("kbd", null, "?")), h("dd", null, "Show this list"))), { yes: "Close", no: null });
}

let prefix = false;

document.addEventListener("keydown", (event) => {
  const { target } = event;
  // After a dialog closes, the focus stays in it until the next frame.
  const typing = target.closest?.("dialog")?.open ?? target.matches?.("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !session.me) return;
  const { key } = event;
  if (prefix) {
    prefix = false;
    const found = menu().find(([, , , shortcut]) => shortcut === key);
    if (found) location.hash = `#/${found[0]}`;
  } else if (key === "g") prefix = true;
  else if (key === "?") showShortcuts();
  else if (key === "/") {
    event.preventDefault();
    const search = () => document.querySelector(".find input");
    // Focus at once if the form exists: the next keys belong to it.
    if (search()) return void search().focus();
    location.hash = "#/events";
    setTimeout(() => search()?.focus());
  }
});

document.addEventListener("click", closeMenus);
document.addEventListener("keydown", closeMenus);
document.addEventListener("keydown", moveByArrow);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("unauthenticated", () => signOut("The token has expired or was revoked."));
// Another filter of the same place leaves the visitor where they are.
window.addEventListener("hashchange", () => {
  const main = document.getElementById("main");
  const [top, height, wasInField] = [scrollY, main.offsetHeight, document.activeElement?.closest(".find")];
  const before = shownPlace;
  route();
  const isSame = before === shownPlace;
  // Until the list is read again, the page is not shorter.
  main.style.minHeight = isSame ? `${height}px` : "";
  scrollTo(0, isSame ? top : 0);
  if (isSame && wasInField) document.querySelector(".find input")?.focus({ preventScroll: true });
});
theme();
if (session.token) begin();
else signIn();
