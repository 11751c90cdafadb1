// The form of an endpoint: its fields, which of them apply, and errors at their fields.

import { session } from "./api.js";
import { h, show } from "./dom.js";
import { field } from "./dialogs.js";
import { givenSecret, secretFields } from "./endpoint_access.js";
import { sentence } from "./format.js";
import { labelOf, settingField } from "./setting_fields.js";

const SECTION_ORDER = ["Subscription", "Requests", "Failures"];

// Of a URL that nobody can enter here: its plug-in is not installed, or is not for tenants.
const ELSEWHERE = { name: "elsewhere", title: "Not available here", schemes: [], example: "", help: "The URL cannot be changed here." };

// The destination that a URL names; of an incomplete URL, `otherwise`.
export function destinationOf(destinations, url, otherwise) {
  const scheme = /^([a-z][a-z0-9+.-]*):/i.exec(url ?? "")?.[1].toLowerCase();
  return destinations.find((each) => each.schemes.includes(scheme)) ?? otherwise;
}

// `values` are those of the endpoint, or null for a new one.
export function endpointForm({ settings, destinations }, values) {
  const isNew = values === null;
  const start = (each) => (values ? values[each.name] : each.name === "name" && session.tenant ? `${session.tenant}.` : each.default);
  const fields = settings.map((each) => settingField(each, start(each)));
  const byName = new Map(fields.map((each) => [each.setting.name, each]));
  let destination = destinationOf(destinations, values?.url, isNew ? destinations[0] : ELSEWHERE);
  const choices = destination === ELSEWHERE ? [...destinations, ELSEWHERE] : destinations;
  const select = h("select", { onchange: () => { destination = choices.find((each) => each.name === select.value); update(); } },
    choices.map((each) => h("option", { value: each.name, selected: each === destination }, each.title)));
  const words = h("small");
  const credentials = field("Credentials", h("input", { name: "credentials", type: "password", autocomplete: "off" }), "user:password or a token; stored and not shown again. Set a file of credentials on the endpoint's page.");
  const ed25519 = h("div", { class: "field" },
    h("label", { class: "pick" }, h("input", { type: "checkbox", name: "ed25519" }), "Ed25519 signature"),
    h("small", null, "Sign with an Ed25519 key instead of a shared secret; the receiver gets the public key."));
  const secret = secretFields("Signing secret");
  const from = field("Begin at", h("input", { name: "from", autocomplete: "off", placeholder: "now" }), "Send what was published since then first: a position of outbox snapshot, a time with its zone, an age such as 2h, or beginning.");
  const general = h("p", { class: "bad", role: "alert" });
  const url = byName.get("url").place.querySelector("input");
  url.addEventListener("input", () => {
    const named = destinationOf(destinations, url.value, destination);
    if (named === destination) return;
    destination = named;
    select.value = named.name;
    update();
  });
  byName.get("format").place.querySelector("select").addEventListener("change", () => update());

  const basic = ["name", "url", ...settings.filter((each) => each.basic && !["name", "url"].includes(each.name)).map((each) => each.name)];
  const others = SECTION_ORDER.map((section) => [section, fields.filter((each) => !each.setting.basic && each.setting.section === section)])
    .filter(([, found]) => found.length);
  const more = h("details", null, h("summary", null, "More settings"), others.map(([section, found]) => h("section", null,
    h("h2", null, section), h("div", { class: "grid-form" }, found.map((each) => each.place)))));
  const element = h("div", { class: "endpoint-form" }, general,
    h("div", { class: "grid-form" },
      byName.get("name").place,
      h("div", { class: "field" }, field("Destination", select), words),
      basic.slice(1).map((name) => byName.get(name)?.place), isNew && credentials, isNew && secret, isNew && ed25519, isNew && from),
    more);

  function applies({ setting }) {
    const { formats, for_brokers: forBrokers } = setting;
    if (destination.name !== "http" && !forBrokers) return false;
    return !formats || formats.includes(byName.get("format").read());
  }

  function update() {
    const isBroker = destination.name !== "http";
    url.placeholder = destination.example;
    show(words, destination.help);
    fields.forEach((each) => { each.place.hidden = !applies(each); });
    credentials.hidden = !isBroker;
    [ed25519, ...secret].forEach((each) => { each.hidden = isBroker; });
  }

  // Settings that differ from the start; one that no longer applies is reset to its default.
  function changes() {
    const found = {};
    for (const each of fields) {
      const { name, default: usual } = each.setting;
      if (applies(each)) {
        if (each.isChanged() || (isNew && ["name", "url"].includes(name))) found[name] = each.read();
      } else if (!isNew && JSON.stringify(each.initial) !== JSON.stringify(usual)) found[name] = null;
    }
    return found;
  }

  // A problem of the API begins with the name of its field.
  function showProblem(text) {
    fields.forEach((each) => each.showError(null));
    show(general);
    if (!text) return;
    const [, name, member, rest] = /^([a-z_]+)(?:\.([a-z_]+))?(?:[.[][^:]*)?: (.*)$/s.exec(text) ?? [];
    const at = byName.get(name);
    if (!at || at.place.hidden) {
      show(general, sentence(text));
      const control = name ? element.querySelector(`[name="${name}"]`) : null;
      control?.focus();
      (control ?? general).scrollIntoView({ block: "center" });
      return;
    }
    if (more.contains(at.place)) more.open = true;
    at.showError(sentence(rest.startsWith("is ") || rest.startsWith("must ") ? `${labelOf(member ?? name)} ${rest}` : rest), member).focus();
  }

  update();
  return {
    element, changes, showProblem,
    isBroker: () => destination.name !== "http",
    credentials: () => credentials.querySelector("input").value.trim(),
    from: () => from.querySelector("input").value.trim(),
    secret: () => (ed25519.hidden ? {} : givenSecret(Object.fromEntries(secret.map((each) => each.querySelector("input, select"))
      .map((control) => [control.name, control.value])))),
    ed25519: () => !ed25519.hidden && ed25519.querySelector("input").checked,
  };
}
