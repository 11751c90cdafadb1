// Edit an endpoint: only changed settings are sent, after a summary.

import { Problem, get, name, patch, session } from "../api.js";
import { h, show } from "../dom.js";
import { row, table } from "../components.js";
import { confirm, notice, tryRequest } from "../dialogs.js";
import { endpointForm } from "../endpoint_form.js";
import { duration, plural, sentence } from "../format.js";
import { once } from "../live.js";
import { link, navigate } from "../router.js";
import { labelOf, showValue } from "../setting_fields.js";
import { visible } from "../text.js";

const HEADS = ["Setting", "Before", "After"];

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Settings that another change has altered since the form was opened.
function summary(described, changes, before, current, pending) {
  const byName = new Map(described.map((each) => [each.name, each]));
  const others = described.filter((each) => !same(before[each.name], current[each.name]));
  return [
    others.length ? h("p", { class: "bad", role: "alert" }, `Changed since you opened this form: ${others.map((each) =>
      `${labelOf(each.name)} is ${showValue(each, current[each.name])} now`).join("; ")}.`,
    others.some((each) => each.name in changes) ? " Your value replaces it." : " It is kept.") : null,
    table(HEADS, Object.entries(changes).map(([setting, value]) => row([
      labelOf(setting), showValue(byName.get(setting), current[setting]), showValue(byName.get(setting), value)], HEADS, setting)), ""),
    "lanes" in changes ? h("p", { class: "hint" }, "New lanes start when the deliveries in the present ones have ended, so that the order of each key is kept"
      + `${pending ? `: ${plural(pending, "pending delivery", "pending deliveries")}, for which newer events wait` : ""}.`) : null,
    "url" in changes || "format" in changes ? h("p", { class: "hint" }, "Pending deliveries are sent with the new settings, too.") : null,
  ].filter(Boolean);
}

// What goes before the events that new lanes get.
function waiting(ahead) {
  if (!ahead?.deliveries) return null;
  const rest = ahead.seconds === null ? "" : `, in about ${duration(ahead.seconds)}`;
  return `${plural(ahead.deliveries, "pending delivery goes", "pending deliveries go")} first, through ${plural(ahead.lanes, "lane")}${rest}; newer events wait for that.`;
}

async function save(endpoint, described, form, before) {
  form.showProblem(null);
  const changes = form.changes();
  if (!Object.keys(changes).length) return void notice("Nothing was changed.");
  const detail = await tryRequest(() => get(`/v1/endpoints/${name(endpoint)}`));
  if (!detail) return undefined;
  if (!await confirm(`Change ${endpoint}?`, summary(described, changes, before, detail.settings, detail.endpoint.pending), { yes: "Save" })) return undefined;
  try {
    const updated = await patch(`/v1/endpoints/${name(endpoint)}`, changes);
    const notes = [waiting(updated.ahead), ...updated.warnings.map(sentence)].filter(Boolean).join(" ");
    navigate(link("endpoint", [updated.name]), () => notice(
      `${updated.name} was changed: ${Object.keys(updated.changed).map(labelOf).join(", ") || "nothing"}. ${notes}`.trim(), updated.warnings.length ? "bad" : "good"));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    form.showProblem(error.message);
  }
  return undefined;
}

export function view(place, [endpoint = ""]) {
  const content = h("div");
  show(place, h("h1", null, `Edit ${endpoint}`), content);
  if (!session.may("operate")) {
    show(content, h("p", null, "This token may not change anything."));
    return undefined;
  }
  return once(place, async (signal) => {
    const [description, detail] = await Promise.all([get("/v1/endpoint-settings", {}, signal), get(`/v1/endpoints/${name(endpoint)}`, {}, signal)]);
    const form = endpointForm(description, detail.settings);
    const submit = h("button", { type: "submit", class: "main" }, "Save changes");
    show(content, h("form", {
      novalidate: true, "aria-label": `Edit ${endpoint}`,
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        await save(endpoint, description.settings, form, detail.settings).finally(() => { submit.disabled = false; });
      },
    }, form.element, h("div", { class: "actions" }, submit, h("a", { class: "button", href: link("endpoint", [endpoint]) }, "Cancel"))));
    document.title = visible(`Edit ${endpoint} – outbox`);
  }, { missing: `Endpoint ${endpoint} not found.` });
}
