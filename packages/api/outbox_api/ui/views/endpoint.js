// One endpoint: its state and actions, and tabs for its deliveries, its settings and its journal.

import { get, name, session } from "../api.js";
import { button, condition, definitionList, menu, oneLine, responseLine, when } from "../components.js";
import { deliveryLog, logFilters } from "../delivery_log.js";
import { h, show } from "../dom.js";
import * as access from "../endpoint_access.js";
import * as endpointActions from "../endpoint_actions.js";
import { findBlockers, isBlocked, laneSection } from "../endpoint_lanes.js";
import { removeEndpoint } from "../endpoint_removal.js";
import { hasCredentials, isBroker, settingsTab } from "../endpoint_settings.js";
import { sendTest } from "../endpoint_test.js";
import { capital, count, duration, plural, time } from "../format.js";
import { rangedHistory } from "../history.js";
import { journalList } from "../journal_list.js";
import { follow } from "../listing.js";
import { live } from "../live.js";
import { link } from "../router.js";
import { retryAction } from "../stuck_lane.js";
import { visible } from "../text.js";

const TABS = [["deliveries", "Deliveries"], ["settings", "Settings"], ["journal", "Journal"]];

const tabLink = (endpoint, tab, values) => link("endpoint", tab === "deliveries" ? [endpoint] : [endpoint, tab], values);

// What was shown last, and to whom: another tab of the same endpoint begins with it.
let last = {};

// What the state of the endpoint calls for.
function primaryAction(endpoint, { endpoint: each }, blocked) {
  if (each.state === "paused") return button("Resume", () => endpointActions.resume(endpoint, blocked), { kind: "main" });
  if (each.state === "disabled") return button("Enable", () => endpointActions.enable(endpoint), { kind: "main" });
  if (each.state !== "active") return null;
  if (blocked.length) return button("Unblock lanes", () => endpointActions.unblock(endpoint, blocked), { kind: "main" });
  return each.health !== "healthy" || each.failing_lanes ? retryAction(endpoint, "main") : null;
}

function actionBar(endpoint, detail, blocked) {
  const { endpoint: each, settings, certificate } = detail;
  const broker = isBroker(each.url);
  // What may be missing keeps its place, so that what is behind it keeps the focus.
  const part = (child) => h("span", { class: "part" }, child);
  return h("div", { class: "actions" },
    part(primaryAction(endpoint, detail, blocked)),
    part(each.state === "active" && button("Pause", () => endpointActions.pause(endpoint))),
    session.may("operate") && h("a", { class: "button", href: link("edit-endpoint", [endpoint]) }, "Edit"),
    button(broker ? "Test" : "Send test event", () => sendTest(endpoint)),
    menu("More",
      h("a", { class: "button", href: link("dead-letters", [], { endpoint }) }, "Dead letters"),
      h("a", { class: "button", href: link("preview", [endpoint]) }, "Preview"),
      broker ? button("Credentials", () => access.setCredentials(endpoint, hasCredentials(settings))) : button("Rotate secret", () => access.rotateSecret(endpoint, Boolean(settings.compat))),
      button("Certificate", () => access.setCertificate(endpoint, certificate), { title: "Client certificate for mutual TLS" }),
      session.may("operate") && h("hr"),
      button("Remove", () => removeEndpoint(endpoint), { kind: "danger" })));
}

// How far an endpoint is with earlier events, which it gets before new ones.
function feedLine({ waits, fed, left_max: left, rate_per_s: rate, missing, is_full: full }) {
  if (waits) return "what was pending when it was disabled goes first";
  const time = full ? "; it waits for its receiver" : rate && left ? `, in about ${duration(left / rate)}` : "";
  return h("span", null, `${plural(fed, "delivery", "deliveries")} so far`, left === null ? "" : `; at most ${plural(left, "event")} left${time}`,
    missing ? h("span", { class: "bad" }, `; ${plural(missing, "event is", "events are")} missing`) : null);
}

function facts(endpoint, { endpoint: each, health, lanes, feed }) {
  const last = health.last_response ?? lanes.find((lane) => lane.attempts)?.last_response;
  return definitionList([
    feed && ["Catching up", feedLine(feed)],
    ["Pending", count(each.pending)],
    ["Dead letters", each.dead_letters ? h("a", { class: "bad", href: link("dead-letters", [], { endpoint }) }, count(each.dead_letters)) : "0"],
    each.state === "active" ? (each.failing_since ? ["Failing since", when(each.failing_since)] : [capital(`${health.state} since`), when(health.since)])
      : [capital(`${each.state} since`), h("span", null, when(each.state_at), each.state_by && `, by ${each.state_by}`)],
    each.state_comment && ["Comment", each.state_comment],
    health.held_until && Date.parse(health.held_until) > session.now() && ["Hold-off (Retry-After)", `until ${time(health.held_until)}`],
    last && ["Last response", responseLine(last)],
  ]);
}

const tabs = (endpoint, current) => h("nav", { class: "tabs", "aria-label": `Parts of ${endpoint}` }, TABS.map(([tab, label]) => h("a", {
  href: tabLink(endpoint, tab), "aria-current": tab === current ? "page" : null }, label)));

export function view(place, [endpoint, tab = "deliveries"], { show: shown, ...values }) {
  const known = new Map();
  const head = h("div");
  const state = h("div");
  const log = h("div");
  const stops = [];
  let detail = last.me === session.me && last.detail.endpoint.name === endpoint ? last.detail : null;
  const history = rangedHistory(`/v1/endpoints/${name(endpoint)}/history`, () => draw());
  show(place, head);
  const go = (next) => { location.hash = tabLink(endpoint, tab, next); };

  function draw() {
    const { endpoint: each } = detail;
    const blocked = detail.lanes.filter(isBlocked);
    show(head, h("h1", null, endpoint, " ", condition(each, each.lanes)), h("p", { class: "url" }, oneLine(each.url, "wide-cut")), actionBar(endpoint, detail, blocked));
    if (tab === "deliveries") {
      const parts = [history.charts(session.now()), laneSection(endpoint, detail, known)];
      // While lanes fail, they come first, with what can be done.
      show(state, facts(endpoint, detail), blocked.length || each.failing_lanes ? parts.reverse() : parts);
    }
    if (tab === "settings") show(state, settingsTab(detail));
  }

  if (detail) draw();
  else show(head, h("h1", null, endpoint), h("p", { class: "empty" }, "Loading…"));
  stops.push(live(place, async (signal) => {
    const found = await get(`/v1/endpoints/${name(endpoint)}`, {}, signal);
    await findBlockers(endpoint, found.lanes.filter(isBlocked), known, signal);
    const isFirst = !detail;
    detail = found;
    last = { me: session.me, detail };
    draw();
    if (isFirst) showParts();
    document.title = visible(`${endpoint} – outbox`);
  }, { missing: `Endpoint ${endpoint} not found.`, details: tab === "deliveries" ? history.read : undefined }));

  // Below the head, which is drawn first: nothing moves then.
  function showParts() {
    show(place, head, tabs(endpoint, tab), state, log);
    if (tab === "deliveries") {
      const fixed = { endpoint };
      const found = h("div");
      show(log, h("h2", null, "Deliveries"), logFilters(values, fixed, go), found);
      stops.push(deliveryLog(found, { ...values, ...fixed }, {
        href: (delivery) => tabLink(endpoint, tab, delivery === null ? values : { ...values, show: delivery }), shown }));
    }
    if (tab === "journal") {
      const list = journalList({ by: "all", endpoint });
      show(log, list.place);
      stops.push(follow(log, list));
    }
  }
  if (detail) showParts();
  return () => stops.forEach((stop) => stop());
}
