// Secrets of an endpoint, and credentials for its broker.

import { name, post, put, remove } from "./api.js";
import { h } from "./dom.js";
import { choice, confirm, copyable, field, notice, runAction } from "./dialogs.js";

const path = (endpoint, verb) => `/v1/endpoints/${name(endpoint)}/${verb}`;

// Fields of a secret that the receiver has already, instead of a new one.
export const secretFields = (label) => [
  field(label, h("input", { name: "secret", type: "password", autocomplete: "off" }), "One that the receiver has already: whsec_…, whsk_… or base64. Leave empty to create one."),
  field("Encoding of the secret", h("select", { name: "secret_encoding" },
    [["", "as its text says"], ["base64", "base64"], ["raw", "the text's own bytes"]].map(([value, text]) => h("option", { value }, text))), "Needed if the text could be both."),
];

// Their values, as members of a request.
export function givenSecret({ secret, secret_encoding: encoding }) {
  if (!secret) return {};
  return encoding ? { secret, secret_encoding: encoding } : { secret };
}

// Show a new secret, or a public key.  `change` is "New" after a rotation.
export async function showSecret(endpoint, secret, change = "") {
  const isPublic = secret.startsWith("whpk_");
  const title = `${change} ${isPublic ? "public key" : "secret"} of ${endpoint}`.trim();
  await confirm(title.slice(0, 1).toUpperCase() + title.slice(1), [
    h("p", null, isPublic ? "Configure it in the receiver now." : "The secret is shown only once. Configure it in the receiver now."),
    copyable(isPublic ? "Public key" : "Secret", secret)], { yes: "Done", no: null, persistent: true });
}

// `hasCompat` is whether requests carry a second signature, which has secrets of its own.
export async function rotateSecret(endpoint, hasCompat) {
  const which = (value, text, hint) => choice("which", value, text, hint, value === "signing");
  const rotation = await confirm(`Rotate a secret of ${endpoint}?`, [
    h("p", null, "Deliveries are signed with both secrets until the old one expires."),
    hasCompat ? h("fieldset", { class: "field" }, h("legend", null, "Which secret"),
      which("signing", "Signing secret", "Of the headers webhook-*."),
      which("compat", "Compat secret", "Of the other sender's headers. Enter the new one, which the receiver has.")) : null,
    ...secretFields("New secret"),
    field("Expire the old secret after", h("select", { name: "overlap" },
      [["24h", "1 day"], ["7d", "7 days"], ["1h", "1 hour"], ["0s", "immediately"]].map(([value, text]) => h("option", { value }, text)))),
  ], { yes: "Rotate", send: (form) => post(path(endpoint, "rotate-secret"), { overlap: form.overlap, compat: form.which === "compat", ...givenSecret(form) }) });
  if (!rotation) return;
  notice("The new secret is active.");
  dispatchEvent(new Event("acted"));
  if (rotation.secret) await showSecret(endpoint, rotation.secret, "New");
}

// `are` is whether the endpoint has credentials.
export async function setCredentials(endpoint, are) {
  const form = await confirm(`Credentials of ${endpoint}`, [
    h("p", null, "How the relay authenticates itself to the broker. They are not shown again."),
    field("Credentials", h("textarea", { name: "credentials", rows: 3, spellcheck: "false", required: !are }),
      `user:password, a token, or the content of a file that the broker takes, such as .creds.${are ? " Leave empty to remove them." : ""}`)], { yes: "Save" });
  if (!form) return;
  const credentials = form.credentials.trim();
  await runAction(() => (credentials ? put(path(endpoint, "credentials"), { credentials }) : remove(path(endpoint, "credentials"))),
    `The credentials of ${endpoint} are ${credentials ? "set" : "removed"}.`);
}

export async function setCertificate(endpoint, certificate) {
  const form = await confirm(`Client certificate of ${endpoint}`, [
    h("p", null, certificate ? `For mutual TLS: ${certificate.subject ?? "set"}.` : "For mutual TLS. The private key is not shown again."),
    field("Certificate and private key", h("textarea", { name: "pem", rows: 6, spellcheck: "false", required: !certificate }),
      `PEM: the certificate, its intermediates and its private key.${certificate ? " Leave empty to remove the certificate." : ""}`)], { yes: "Save" });
  if (!form) return;
  const pem = form.pem.trim();
  await runAction(() => (pem ? put(path(endpoint, "certificate"), { pem }) : remove(path(endpoint, "certificate"))),
    `The client certificate of ${endpoint} is ${pem ? "set" : "removed"}.`);
}
