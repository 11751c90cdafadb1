// Trace of an event: timeline, attempts and diagnosis.

import { get, name, session } from "../api.js";
import { h, show } from "../dom.js";
import { timeline, unfinishedFirst } from "../timeline.js";
import { discardOne, replayOne } from "../dead_letter_actions.js";
import { attempts, deliveryActions, deliveryFacts } from "../delivery_details.js";
import * as endpointActions from "../endpoint_actions.js";
import { live } from "../live.js";
import { searchForm } from "../event_actions.js";
import { badge, button, code, definitionList, when } from "../components.js";
import { link } from "../router.js";
import { searchField } from "../search_field.js";
import { count, duration, expiry, payloadSize, plural, sentence, time } from "../format.js";

function delivery(each, event) {
  return h("details", { open: each.state !== "delivered" && each.attempts.length > 0, "data-key": `${each.lane}/${each.sequence}` },
    h("summary", null, badge(each.state), " ", h("b", null, each.endpoint), ` sequence ${count(each.sequence)} of lane ${each.lane}`,
      each.replay_of ? h("small", null, " replay") : null, h("small", null, ` ${plural(each.attempts.length, "attempt")}`)),
    deliveryActions(each, event), deliveryFacts(each), attempts(each));
}

// Buttons for what resolves a cause.
const ACTIONS = {
  skip: ({ endpoint, lane, sequence }) => button(`Skip sequence ${sequence}`, () => endpointActions.skip(endpoint, { name: lane, sequence }), { title: "Dead-letter this delivery, so that the lane continues" }),
  pause: ({ endpoint }) => button(`Pause ${endpoint}`, () => endpointActions.pause(endpoint), { title: "Hold its deliveries until its receiver works" }),
  refill: ({ endpoint }) => button("Refill", () => endpointActions.refill(endpoint)),
  adopt: ({ endpoint }) => button("Adopt", () => endpointActions.adopt(endpoint), { title: "Go on with the stream as it is" }),
  replay: ({ dead_letter: id }) => button(`Replay dead letter ${id}`, () => replayOne(id)),
  discard: ({ dead_letter: id }) => button(`Discard dead letter ${id}`, () => discardOne(id)),
  resume: ({ endpoint }) => button(`Resume ${endpoint}`, () => endpointActions.readAndResume(endpoint)),
  enable: ({ endpoint }) => button(`Enable ${endpoint}`, () => endpointActions.enable(endpoint)),
};

// Causes by endpoint.  Pending deliveries of one endpoint wait for the same cause: it is shown for
// the newest event only, and `explained` collects those endpoints.
function diagnosis(trace, explained) {
  const byEndpoint = new Map();
  const pending = new Set(trace.deliveries.filter((each) => each.state === "pending").map((each) => each.endpoint));
  for (const cause of trace.causes) {
    const endpoint = cause.endpoint ?? "";
    if (pending.has(endpoint) && explained.has(endpoint)) continue;
    byEndpoint.set(endpoint, [...(byEndpoint.get(endpoint) ?? []), cause]);
  }
  pending.forEach((each) => explained.add(each));
  if (!byEndpoint.size) return null;
  return h("ul", { class: "diagnosis" }, [...byEndpoint].map(([endpoint, causes]) => {
    // Several deliveries may have the same action.
    const actions = new Map(causes.flatMap((cause) => cause.actions).map((each) => [JSON.stringify(each), each]));
    const buttons = [...actions.values()].map((each) => ACTIONS[each.kind]?.(each)).filter(Boolean);
    return h("li", null, endpoint && [h("a", { href: link("endpoint", [endpoint]) }, endpoint), ": "], causes.map((each) => each.text).join("; "),
      buttons.length ? h("div", { class: "actions" }, buttons) : null);
  }));
}

// States of deliveries that need nothing more; that of a failed replay has a cause of its own.
const SETTLED = ["delivered", "replayed", "dead_again"];

// Whether all deliveries succeeded, and when the last one did, without those of a backfill.
function success(trace) {
  const { event } = trace;
  const deliveries = trace.deliveries.filter((each) => each.backfill === null);
  const complete = trace.deliveries.length === trace.deliveries_total && trace.deliveries.every((each) => SETTLED.includes(each.state));
  const delivered = deliveries.filter((each) => each.state === "delivered");
  if (!complete || !delivered.length) return null;
  const endpoints = [...new Set(delivered.map((each) => each.endpoint))];
  const ends = delivered.flatMap((each) => each.attempts.filter((one) => one.outcome === "delivered").map((one) => Date.parse(one.started_at) + one.elapsed_ms));
  const after = ends.length ? `${endpoints.length > 1 ? ", the last" : ""} ${duration(Math.max(0, Math.max(...ends) - Date.parse(event.published_at)) / 1000)} after publish` : "";
  const replays = deliveries.length > delivered.length ? ", with a replay" : "";
  return h("p", { class: "success" }, `Delivered to ${endpoints.length > 1 ? plural(endpoints.length, "endpoint") : endpoints[0]}${after}${replays}.`);
}

function body(trace, explained) {
  const { event } = trace;
  const left = trace.deliveries_total - trace.deliveries.length;
  return [
    diagnosis(trace, explained) ?? success(trace),
    trace.deliveries.length ? timeline(trace, session.now()) : null,
    definitionList([["Published", time(event.published_at)],
      trace.sequenced && ["Sequenced", `${duration(Math.max(0, Date.parse(trace.sequenced.at) - Date.parse(event.published_at)) / 1000)} after publish${trace.sequenced.batch === null ? "" : `, in batch ${count(trace.sequenced.batch)}`}`],
      ["Key", event.key && h("a", { href: link("events", [], { key: event.key }) }, event.key)], ["Tenant", event.tenant],
      ["Payload", event.erased_at ? `erased ${time(event.erased_at)}` : payloadSize(event)],
      event.expires_at && ["Expires", expiry(event.expires_at)]]),
    unfinishedFirst(trace.deliveries).map((each) => delivery(each, event)),
    left > 0 ? h("p", { class: "hint" }, `${count(left)} more deliveries. Name an endpoint to see those to it.`) : null,
    event.payload !== null && event.payload !== undefined ? h("details", null, h("summary", null, "Payload"), code(event.payload)) : null,
  ];
}

// An event that is accepted and not published yet.
function future(event) {
  const ahead = plural(event.deliveries_ahead, "delivery", "deliveries");
  return h("article", { "data-key": event.id }, h("h2", null, event.type, " ", h("code", null, event.id)),
    h("p", null, event.held ? `Held for the share of ${event.tenant} since ${time(event.accepted_at)}: ${ahead} of the tenant are published before it.`
      : "Scheduled; it has no deliveries yet."),
    definitionList([["Accepted", time(event.accepted_at)], ["Expected", event.held ? `about ${time(event.expected_at)}` : time(event.deliver_at)],
      ["Key", event.key], ["Tenant", event.tenant], event.expires_at && ["Expires", expiry(event.expires_at)]]));
}

// Of several events with one key, the newest is expanded.
function traces(events) {
  const explained = new Set();
  return events.map((trace, n) => {
    const { event } = trace;
    const title = [event.type, " ", h("code", null, event.event_id)];
    if (!n) return h("article", { "data-key": event.event_id }, h("h2", null, title), body(trace, explained));
    const states = [...new Set(trace.deliveries.map((each) => each.state))];
    return h("article", { "data-key": event.event_id }, h("details", { class: "older" },
      h("summary", null, title, " ", h("small", null, when(event.published_at)), " ", states.map((state) => [badge(state), " "])),
      body(trace, explained)));
  });
}

export function view(place, [id = ""], values) {
  const title = (...more) => h("h1", null, "Trace ", h("code", null, id), ...more);
  const found = h("div");
  show(place, title(), h("p", { class: "empty" }, "Loading…"));
  return live(place, async (signal) => {
    const result = await get(`/v1/trace/${name(id)}`, { payload: true, endpoint: values.endpoint }, signal);
    const isPartial = values.endpoint || result.events.some((each) => each.deliveries_total > each.deliveries.length);
    show(found, result.future ? future(result.future) : traces(result.events),
      result.more ? h("p", { class: "hint" }, "There are older events: ", h("a", { href: link("events", [], { key: id }) }, "show all events with this key"), ".") : null);
    if (found.isConnected) return;
    const key = (result.future ?? result.events[0].event).key;
    show(place, title(h("small", null, ` found by ${result.found_by}${key && key !== id ? `; its key is ${key}` : ""}`)),
      isPartial ? searchField({ names: ["endpoint"], bare: "endpoint", values, placeholder: "an endpoint", onChange: (next) => { location.hash = link("trace", [id], next); } }) : null, found);
  }, { every: 5000, missing: values.endpoint ? `No event ${id}, or no endpoint ${values.endpoint}.` : `No event matches ${id}.`,
    otherwise: (error) => [h("p", null, sentence(error.message)), searchForm()] });
}
