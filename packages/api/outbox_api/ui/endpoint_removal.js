// Removal of an endpoint: its pending deliveries are delivered first, or dead-lettered.

import { get, name, remove } from "./api.js";
import { h } from "./dom.js";
import { choice, confirm, notice, runAction, tryRequest } from "./dialogs.js";
import { plural } from "./format.js";
import { link, navigate } from "./router.js";

export async function removeEndpoint(endpoint) {
  const path = `/v1/endpoints/${name(endpoint)}`;
  const detail = await tryRequest(() => get(path));
  if (!detail) return;
  const { pending, dead_letters: dead } = detail.endpoint;
  const deliveries = plural(pending, "pending delivery", "pending deliveries");
  const form = await confirm(`Remove ${endpoint}?`, [
    h("p", null, pending ? `It has ${deliveries}.` : "It has no pending deliveries.",
      dead ? ` Its ${plural(dead, "dead letter")} cannot be replayed afterwards.` : ""),
    pending ? h("fieldset", { class: "field" }, h("legend", null, "Pending deliveries"),
      choice("pending", "drain", "Deliver them first", "It receives no new events. Remove it again when nothing is pending.", true),
      choice("pending", "dead_letter", "Dead-letter them", `${deliveries} will never be sent.`, false)) : null,
    h("p", { class: "hint" }, "The removal cannot be undone."),
  ].filter(Boolean), { yes: "Remove", kind: "danger" });
  if (!form) return;
  const result = await runAction(() => remove(path, pending ? { [form.pending]: true } : {}));
  if (!result) return;
  if ("blocked" in result) notice(`${endpoint} receives no new events. ${plural(result.pending, "delivery is", "deliveries are")} pending; remove it again when they are delivered.`);
  else navigate(link("endpoints"), () => notice(`${endpoint} is removed.`));
}
