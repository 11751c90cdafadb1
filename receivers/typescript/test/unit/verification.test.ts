import assert from "node:assert/strict";
import { createPrivateKey, generateKeyPairSync, randomUUID, sign as signEd25519 } from "node:crypto";
import { test } from "node:test";

import { MessageError, SignatureError, UsageError, Verifier, sign, verify } from "outbox-receiver";
import { Webhook } from "standardwebhooks";

import { SECRET, delivery, request, signed } from "./sender.js";

const OTHER = "whsec_YW5vdGhlciBzZWNyZXQgZm9yIHRlc3Rpbmc=";

function problemOf(call: () => unknown): string {
  try {
    call();
  } catch (error) {
    return error instanceof SignatureError ? error.problem : error instanceof MessageError ? "message" : "other";
  }
  return "none";
}

test("a signature of standardwebhooks is accepted", () => {
  const [id, at, body] = ["msg_1", new Date(), '{"type":"user.created"}'];
  const headers = {
    "webhook-id": id,
    "webhook-timestamp": `${Math.floor(at.getTime() / 1000)}`,
    "webhook-signature": new Webhook(SECRET).sign(id, at, body),
  };
  const verified = verify({ headers, body: Buffer.from(body) }, SECRET);
  assert.equal(verified.messageId, "msg_1");
  assert.deepEqual(verified.messages, []);
});

test("standardwebhooks accepts our signature", () => {
  const [id, at, body] = ["msg_2", Math.floor(Date.now() / 1000), '{"a":[1,2]}'];
  const headers = {
    "webhook-id": id,
    "webhook-timestamp": `${at}`,
    "webhook-signature": `v2,AAAA ${sign(OTHER, id, at, body)} ${sign(SECRET, id, at, body)}`,
  };
  assert.deepEqual(new Webhook(SECRET).verify(body, headers), { a: [1, 2] });
  assert.equal(verify({ headers, body: Buffer.from(body) }, SECRET).messageId, id);
});

test("both secrets are accepted during a rotation, and no other one", () => {
  const given = request(delivery(1));
  assert.equal(verify(given, [OTHER, SECRET]).messages.length, 1);
  assert.equal(problemOf(() => verify(given, OTHER)), "mismatch");
});

test("an Ed25519 signature is verified with the public key", () => {
  const { publicKey, privateKey } = generateKeyPairSync("ed25519");
  const x = publicKey.export({ format: "jwk" }).x ?? "";
  const whpk = `whpk_${Buffer.from(x, "base64url").toString("base64")}`;
  const given = signed("msg_3", "{}");
  const text = `msg_3.${given.headers["webhook-timestamp"]}.{}`;
  const signature = signEd25519(null, Buffer.from(text), createPrivateKey(privateKey.export({ format: "pem", type: "pkcs8" })));
  given.headers["webhook-signature"] = `v1,AAAA v1a,${signature.toString("base64")}`;
  assert.equal(verify(given, [whpk, SECRET]).messageId, "msg_3");
  assert.equal(problemOf(() => verify({ ...given, body: Buffer.from("[]") }, whpk)), "mismatch");
  given.headers["webhook-signature"] = Array(5).fill(`v1a,${signature.toString("base64")}`).join(" ");
  assert.equal(problemOf(() => verify(given, whpk)), "malformed_header");
});

test("a secret may lack its prefix, as other senders print it", () => {
  const bare = SECRET.replace("whsec_", "");
  for (const text of [bare, bare.replace(/=+$/, ""), ` ${bare}\n`]) {
    assert.equal(verify(request(delivery(1)), text).messages.length, 1);
  }
});

test("keys that cannot be used are refused without showing them", () => {
  const smallOrder = `whpk_${Buffer.alloc(32, 0).fill(1, 0, 1).toString("base64")}`;
  for (const secret of ["whsec_c2hvcnQ=", "whsec_not base64 at all, you see", "plain text", "whpk_AAAA", smallOrder]) {
    assert.throws(
      () => new Verifier(secret),
      (error) => error instanceof UsageError && !error.message.includes(secret.slice(6)),
    );
  }
  assert.throws(() => new Verifier([]), UsageError);
});

test("missing, repeated and malformed headers, and old and new timestamps are rejected", () => {
  const given = request(delivery(1));
  const at = Number(given.headers["webhook-timestamp"]);
  const pairs = Object.entries(given.headers);
  const without = pairs.filter(([name]) => name !== "webhook-signature");
  assert.equal(problemOf(() => verify({ ...given, headers: without }, SECRET)), "missing_header");
  const twice = [...pairs, ["WEBHOOK-ID", "a"] as [string, string]];
  assert.equal(problemOf(() => verify({ ...given, headers: twice }, SECRET)), "repeated_header");
  const unknown = { ...given.headers, "webhook-signature": "v9,AAAA" };
  assert.equal(problemOf(() => verify({ ...given, headers: unknown }, SECRET)), "malformed_header");
  assert.equal(problemOf(() => verify(given, SECRET, { clock: () => at + 301 })), "timestamp_too_old");
  assert.equal(problemOf(() => verify(given, SECRET, { clock: () => at - 301 })), "timestamp_too_new");
  assert.equal(problemOf(() => verify(given, SECRET, { clock: () => at + 300 })), "none");
  const forged = { ...given, body: Buffer.from("{}") };
  assert.equal(problemOf(() => verify(forged, SECRET, { clock: () => at + 301 })), "mismatch");
});

test("headers that differ from the body are rejected", () => {
  for (const [name, value] of [
    ["X-Lane", "lane-2"],
    ["X-Sequence", "2"],
    ["X-Event", "order.cancelled"],
    ["X-Delivery", randomUUID()],
  ] as const) {
    const given = request(delivery(1));
    assert.equal(problemOf(() => verify({ ...given, headers: { ...given.headers, [name]: value } }, SECRET)), "message");
  }
  const given = request(delivery(1));
  const bare = Object.entries(given.headers).filter(([name]) => !name.startsWith("X-"));
  assert.equal(problemOf(() => verify({ ...given, headers: bare }, SECRET)), "message");
});

test("sequence numbers and payload texts are exact", () => {
  const last = 2n ** 63n - 1n;
  const given = request(delivery(last, { more: ',"key":"k\\u00e9","replay_of":{"lane":"old","sequence":9007199254740993}' }));
  const [message] = verify(given, SECRET).messages;
  assert.equal(message?.sequence, last);
  assert.deepEqual(message?.replayOf, { lane: "old", sequence: 2n ** 53n + 1n });
  assert.equal(message?.key, "ké");
  assert.deepEqual(message?.data, { n: 1 });
  assert.equal(message?.dataText, '{"n":1}');
  assert.equal(problemOf(() => verify(request(delivery(last + 1n)), SECRET)), "message");
});

test("a format that is not expected, and another prefix, are rejected", () => {
  const given = request(delivery(1));
  assert.equal(problemOf(() => verify(given, SECRET, { formats: ["raw"] })), "message");
  assert.equal(problemOf(() => verify(given, SECRET, { headerPrefix: "X-Acme-" })), "message");
  assert.equal(verify(given, SECRET, { headerPrefix: ["X-Acme-", "X-"] }).messages[0]?.format, "envelope");
});
