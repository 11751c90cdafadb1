// Create or change a schedule.

import { get, name, post, session } from "./api.js";
import { h } from "./dom.js";
import { confirm, field, notice, tryRequest } from "./dialogs.js";
import { parsePayload, stringify } from "./json.js";

const MISFIRE = [["once", "publish the newest missed run"], ["all", "publish every missed run"], ["skip", "skip a run that is too late"]];
const OVERLAP = [["allow", "at once"], ["wait", "after the deliveries of the previous run"]];

const text = (id, value, more = {}) => h("input", { name: id, value: value ?? "", autocomplete: "off", spellcheck: "false", ...more });
const select = (id, value, options) => h("select", { name: id }, options.map(([key, label]) => h("option", { value: key, selected: key === value }, label)));

function fields(schedule) {
  const known = schedule ?? { name: session.tenant ? `${session.tenant}.` : "", timezone: "UTC", misfire: "once", overlap: "allow", grace_s: 300, payload: {} };
  return [
    field("Name", text("name", known.name, { required: true, readonly: Boolean(schedule) })),
    h("div", { class: "grid-form" },
      field("Cron", text("cron", known.cron, { required: true, placeholder: "0 3 * * *" }), "Minute, hour, day, month, weekday; or @daily, @hourly …"),
      field("Time zone", text("timezone", known.timezone, { required: true })),
      field("Type of the event", text("type", known.type, { required: true, placeholder: "report.nightly" })),
      field("Key", text("key", known.key, { placeholder: "none" })),
      session.tenant === null && field("Tenant", text("tenant", known.tenant, { placeholder: "none" }))),
    field("Payload", h("textarea", { name: "payload", rows: 4, spellcheck: "false" }, stringify(known.payload, 2))),
    h("div", { class: "grid-form" },
      field("After missed runs", select("misfire", known.misfire, MISFIRE)),
      field("Too late after", text("grace", `${known.grace_s}s`), "For “skip a run that is too late”."),
      field("Next run", select("overlap", known.overlap, OVERLAP))),
  ];
}

async function edit(title, schedule, yes) {
  const saved = await confirm(title, fields(schedule), { yes, send: (values) => {
    const { key, tenant, payload, ...rest } = values;
    return post("/v1/schedules", { ...rest, key: key.trim() || null, tenant: tenant?.trim() || null, payload: parsePayload(payload),
      headers: schedule?.headers ?? null, replace: Boolean(schedule) });
  } });
  if (!saved) return;
  notice(`${saved.name} is ${schedule ? "changed" : "created"}.`);
  dispatchEvent(new Event("acted"));
}

export const addSchedule = () => edit("New schedule", null, "Create");

export async function editSchedule(schedule) {
  const found = await tryRequest(() => get(`/v1/schedules/${name(schedule)}`));
  if (found) await edit(`Change ${schedule}`, found, "Save");
}
