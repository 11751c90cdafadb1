import assert from "node:assert/strict";
import { test } from "node:test";

import { MemoryStore, Receiver, UnreadablePayload, verify, type Message } from "outbox-receiver";

import { SECRET, delivery, request, silentLogger } from "./sender.js";

const REFUSED = Symbol("refused");
const DEEP = "[".repeat(5000) + "]".repeat(5000);

/** Texts of payloads: their value, or REFUSED. */
const EDGES: Record<string, [string, unknown]> = {
  "2^53": ["9007199254740992", 2 ** 53],
  "2^53 + 1": ["9007199254740993", REFUSED],
  "a round number above 2^53": ["100000000000000000000", 1e20],
  "a snowflake": ["1234567890123456789", REFUSED],
  "an integer of 309 digits": ["9".repeat(309), REFUSED],
  "a short decimal": ["0.1", 0.1],
  "zeros at the end": ["12.500000000000000000000", 12.5],
  "the sum of two numbers": ["0.30000000000000004", 0.1 + 0.2],
  "an average of PostgreSQL": ["3.3333333333333333", REFUSED],
  "a decimal of 25 digits": ["-1234567890123456.123456789", REFUSED],
  "a small decimal": ["0.00000000000000001", 1e-17],
  "an exponent": ["1.5E+300", 1.5e300],
  "an exponent above a double's": ["1e400", REFUSED],
  "an exponent below a double's": ["1e-400", REFUSED],
  "zero with an exponent": ["0.00e-400", 0],
  "numbers in a string": ['"\\"1234567890123456789 1e400"', '"1234567890123456789 1e400'],
  "a number beside a string": ['["\\\\", 1234567890123456789]', REFUSED],
  "5,000 levels": [DEEP, REFUSED],
  "brackets in a string": [JSON.stringify("[".repeat(5000)), "[".repeat(5000)],
};

function messageWith(data: string, options = {}): Message {
  const [message] = verify(request(delivery(1, { data })), SECRET, options).messages;
  assert.ok(message);
  return message;
}

test("a payload is exact, or refused with a way on", () => {
  for (const [name, [text, expected]] of Object.entries(EDGES)) {
    const message = messageWith(text);
    assert.equal(message.dataText, text, name);
    if (expected === REFUSED) {
      assert.throws(
        () => message.data,
        (error: Error) => error instanceof UnreadablePayload && /option parse, or read dataText/.test(error.message),
        name,
      );
    } else {
      assert.deepEqual(message.data, expected, name);
      assert.equal(message.data, message.data, name);
    }
  }
});

test("parse reads what the default refuses", () => {
  assert.equal(messageWith("1234567890123456789", { parse: BigInt }).data, 1234567890123456789n);
  assert.equal(messageWith("1e400", { parse: JSON.parse }).data, Infinity);
  assert.throws(() => messageWith('"x"', { parse: BigInt }).data, UnreadablePayload);
});

test("the receiver responds 422 and says what to do, unless the handler reads the text", async () => {
  const seen: unknown[] = [];
  const receiver = new Receiver(SECRET, new MemoryStore(), { logger: silentLogger() })
    .on("order.paid", (message) => void seen.push(message.data))
    .on("order.noted", (message) => void seen.push(message.dataText));
  const response = await receiver.handle(request(delivery(1, { data: "9007199254740993" })));
  assert.equal(response.status, 422);
  assert.match(response.text, /9007199254740993, which JavaScript rounds: give the receiver the option parse/);
  const noted = delivery(1, { data: "9007199254740993", type: "order.noted" });
  assert.equal((await receiver.handle(request(noted))).status, 200);
  assert.deepEqual(seen, ["9007199254740993"]);
});

test("what is not JSON is no delivery", () => {
  for (const data of ["[", '"\\ud800"', "1e", '{"a":"\\udc00\\ud800"}']) {
    assert.throws(() => messageWith(data), /the body is not JSON/);
  }
  assert.equal(messageWith('"\\ud83d\\ude00"').data, "😀");
});
