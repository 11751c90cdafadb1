// API tokens: list, create, revoke.

import { get, name, post, remove, session } from "../api.js";
import { h, show } from "../dom.js";
import { badge, button, heading, row, table, when } from "../components.js";
import { confirm, copyable, field, runAction } from "../dialogs.js";
import { time } from "../format.js";
import { pages } from "../listing.js";
import { live } from "../live.js";
import { link } from "../router.js";
import { searchField } from "../search_field.js";

const HEADS = ["Token", "State", "Scopes", "Tenant", "Created", "Expires", "Last used", ""];
const SCOPES = [["read", "reads everything, payloads included"], ["publish", "publishes events"], ["operate", "makes all other changes"]];
const LIFETIMES = [["30d", "30 days"], ["1d", "1 day"], ["90d", "90 days"], ["365d", "1 year"], ["", "until it is revoked"]];

async function addToken() {
  const own = SCOPES.filter(([scope]) => session.may(scope));
  const made = await confirm("New token", [
    field("Name", h("input", { name: "name", required: true, autocomplete: "off", spellcheck: "false" })),
    h("fieldset", { class: "field" }, h("legend", null, "Scopes"), own.map(([scope, text]) => h("label", { class: "pick" },
      h("input", { type: "checkbox", name: "scopes", value: scope, checked: scope === "read" }), `${scope}: ${text}`))),
    field("Tenant", h("input", { name: "tenant", autocomplete: "off", spellcheck: "false", placeholder: "none" }), "The token sees this tenant only."),
    field("Expires", h("select", { name: "expires" }, LIFETIMES.map(([value, text]) => h("option", { value }, text)))),
  ], { yes: "Create", send: (values, form) => post("/v1/tokens", {
    name: values.name.trim(), scopes: new FormData(form).getAll("scopes"), tenant: values.tenant.trim() || null, expires: values.expires || null }) });
  if (!made) return;
  dispatchEvent(new Event("acted"));
  await confirm(`Token ${made.name}`, [h("p", null, "The token is shown only once. Store it now."), copyable("Token", made.secret)],
    { yes: "Done", no: null, persistent: true });
}

async function revoke(token) {
  const form = await confirm(`Revoke ${token.name}?`, [
    h("p", null, "Every relay rejects it within two seconds."),
    token.name === session.me.name ? h("p", { class: "bad" }, "You are signed in with this token.") : null,
    h("p", null, "Last used ", when(token.last_used_at), ".")].filter(Boolean), { yes: "Revoke", kind: "danger" });
  if (form) await runAction(() => remove(`/v1/tokens/${name(token.name)}`), `${token.name} is revoked.`);
}

export function view(place, _, values) {
  const list = pages((after, signal) => get("/v1/tokens", { ...values, limit: 100, after }, signal), (items) => table(HEADS, items.map((each) => row([
    each.name, badge(each.state), each.scopes.join(", "), each.tenant ?? "–",
    h("span", null, when(each.created_at), ` by ${each.created_by}`),
    each.expires_at ? time(each.expires_at) : "never", when(each.last_used_at),
    each.state === "live" ? button("Revoke", () => revoke(each)) : "",
  ], HEADS, each.id)), Object.keys(values).length ? "No tokens match the filter." : "No tokens. Each program and each person should have one of its own."));
  show(place, heading("Tokens", button("New token", addToken, { kind: "main" })),
    searchField({ names: ["search", "scope", "tenant", "revoked"], bare: "search", values, examples: [...SCOPES.map(([each]) => `scope:${each}`), "revoked:true"],
      placeholder: "a name; or scope:operate, tenant:acme, revoked:true …", onChange: (next) => { location.hash = link("tokens", [], next); } }),
    list.place);
  return live(place, list.load, { every: 10000 });
}
