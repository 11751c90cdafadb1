import assert from "node:assert/strict";
import { test } from "node:test";

import {
  Busy,
  MemoryStore,
  Receiver,
  Refuse,
  UsageError,
  type Handler,
  type MemoryTransaction,
  type ReceiverOptions,
} from "outbox-receiver";
import { PgStore } from "outbox-receiver/pg";

import { SECRET, batch, delivery, request, signed, silentLogger } from "./sender.js";

function receiverWith(handler: Handler<MemoryTransaction>, options: ReceiverOptions = {}) {
  const logger = silentLogger();
  const receiver = new Receiver(SECRET, new MemoryStore(), { logger, ...options }).on("order.*", handler);
  return { receiver, logger };
}

function collecting(options: ReceiverOptions = {}) {
  const processed: string[] = [];
  const made = receiverWith((message) => void processed.push(message.eventId), options);
  return { ...made, processed };
}

test("an event is processed once, also when copies arrive at the same time", async () => {
  const { receiver, processed } = collecting();
  const given = request(delivery(1));
  const responses = await Promise.all([1, 2, 3].map(() => receiver.handle(given)));
  assert.deepEqual(responses.map(({ status, text }) => [status, text]).sort(), [
    [200, "processed"],
    [200, "processed before"],
    [200, "processed before"],
  ]);
  assert.equal(processed.length, 1);
});

test("an event type without a handler is refused, or ignored", async () => {
  const { receiver, processed } = collecting();
  receiver.on("invoice.*", function settle() {});
  const refused = await receiver.handle(request(delivery(1, { type: "ordr.paid" })));
  assert.equal(refused.status, 422);
  assert.equal(
    refused.text,
    "no handler for the event type ordr.paid; the receiver has order.* (a function), invoice.* (settle): add one, " +
      'subscribe the endpoint by --type, or set unhandled: "ignore"',
  );
  assert.deepEqual(processed, []);
  const ignoring = collecting({ unhandled: "ignore" }).receiver;
  assert.equal((await ignoring.handle(request(delivery(1, { type: "ordr.paid" })))).text, "processed");
});

test("mistakes of the author are refused at once, in one line", () => {
  const store = new MemoryStore();
  const receiver = new Receiver(SECRET, store);
  const mistakes: [string, () => unknown, RegExp][] = [
    ["a handler with three arguments", () => receiver.on("a", ((_a: unknown, _b: unknown, _c: unknown) => undefined) as never), /takes 3 arguments/],
    ["a generator", () => receiver.on("a", function* () {} as never), /is a generator/],
    ["an asynchronous generator", () => receiver.on("a", async function* () {} as never), /is a generator/],
    ["no handler", () => receiver.on("a", undefined as never), /is no function, but undefined/],
    ["no pattern", () => receiver.on((() => undefined) as never, undefined as never), /needs a pattern/],
    ["a foreign handler with four arguments", () => receiver.onForeign(((_a: 1, _b: 2, _c: 3, _d: 4) => undefined) as never), /takes 4/],
    ["another policy", () => new Receiver(SECRET, store, { unhandled: "drop" as never }), /unhandled: must be refuse or ignore/],
    ["two secrets", () => new Receiver(`${SECRET},${SECRET}`, store), /give an array, such as text.split/],
    ["two secrets in an array", () => new Receiver([`${SECRET} ${SECRET}`], store), /give an array/],
    ["no secret", () => new Receiver(undefined as never, store), /at least one is required/],
    ["bytes", () => new Receiver([Buffer.from("x")] as never, store), /must be a text or an array of texts/],
    ["an address as a store", () => new Receiver(SECRET, "postgresql://me:password@db/shop" as never), /store: must be a store, such as/],
    ["an address as a pool", () => new PgStore("postgresql://me:password@db/shop" as never), /pool: must be a pool, such as/],
  ];
  for (const [name, make, text] of mistakes) {
    assert.throws(make, (error: Error) => {
      assert.ok(error instanceof UsageError, `${name}: ${error}`);
      assert.match(error.message, text, name);
      assert.doesNotMatch(error.message, /\n|password|whsec_d/, name);
      return true;
    });
  }
  receiver.on("b", (_message, _tx, more = 1) => void more).on("c", (..._: unknown[]) => undefined);
  assert.ok(new Receiver(` ${SECRET},${SECRET}\n`.split(","), store));
});

test("errors of handlers roll back and have their status; details are not shown", async () => {
  const errors = [new Refuse("no such order"), new Busy("later", { retryAfterS: 30 }), new Error("pw=1"), undefined];
  const { receiver } = receiverWith(() => {
    if (errors.length > 0) {
      throw errors.shift();
    }
  });
  const given = request(delivery(1));
  const responses = [];
  for (let n = 0; n < 5; n++) {
    responses.push(await receiver.handle(given));
  }
  assert.deepEqual(
    responses.map(({ status, text }) => [status, text]),
    [
      [422, "no such order"],
      [503, "later"],
      [500, "the receiver failed"],
      [500, "the receiver failed"],
      [200, "processed"],
    ],
  );
  assert.equal(responses[1]?.headers["Retry-After"], "30");
});

test("a number used by another delivery is a conflict", async () => {
  const { receiver, processed } = collecting();
  await receiver.handle(request(delivery(1)));
  assert.equal((await receiver.handle(request(delivery(1)))).status, 422);
  assert.equal(processed.length, 1);
});

test("a batch is processed up to the delivery that fails", async () => {
  const processed: bigint[] = [];
  const { receiver } = receiverWith(({ sequence }) => {
    if (sequence === 3n) {
      throw new Error("broken");
    }
    processed.push(sequence);
  });
  const response = await receiver.handle(batch([delivery(1), delivery(2), delivery(3), delivery(4)]));
  assert.deepEqual([response.status, response.headers["X-Accepted-Through"]], [500, "2"]);
  // In one transaction first, which is rolled back, then one by one.
  assert.deepEqual(processed, [1n, 2n, 1n, 2n]);
});

test("a gap reports missing numbers", async () => {
  const { receiver, logger } = collecting();
  await receiver.handle(request(delivery(1)));
  await receiver.handle(request(delivery(3)));
  assert.equal(receiver.totals.gaps, 1);
  assert.ok(logger.lines.some((line) => line.includes("sequence 3 arrived before 2")));
});

test("with the policy hold, a request waits for the missing delivery before it", async () => {
  const { receiver, processed } = collecting({ gaps: "hold" });
  const [first, second, third] = [delivery(1), delivery(2), delivery(3)];
  await receiver.handle(request(first));
  const held = receiver.handle(request(third));
  await receiver.handle(request(second));
  assert.equal((await held).status, 200);
  assert.deepEqual(processed, [first.eventId, second.eventId, third.eventId]);
});

test("more requests than inFlightMax are put off", async () => {
  let finish: () => void = () => undefined;
  const blocked = new Promise<void>((resolve) => {
    finish = resolve;
  });
  const { receiver } = receiverWith(() => blocked, { inFlightMax: 1 });
  const first = receiver.handle(request(delivery(1)));
  const second = await receiver.handle(request(delivery(2)));
  finish();
  assert.deepEqual([second.status, second.headers["Retry-After"]], [503, "1"]);
  assert.equal((await first).status, 200);
});

test("other requests are rejected before anything is recorded", async () => {
  const { receiver } = collecting({ bodyBytesMax: 1000 });
  const given = request(delivery(1));
  assert.equal((await receiver.handle({ ...given, method: "GET" })).status, 405);
  assert.equal((await receiver.handle({ ...given, body: Buffer.alloc(1001) })).status, 413);
  assert.equal((await receiver.handle({ ...given, body: Buffer.from("{}") })).status, 401);
  assert.equal((await receiver.handle(signed("msg_1", "{}"))).status, 400);
  const old = await receiver.handle(signed("msg_1", "{}", {}, Math.floor(Date.now() / 1000) - 3600));
  assert.deepEqual([old.status, old.outcome, old.headers["X-Refused"]], [503, "rejected", "timestamp"]);
  assert.equal((await receiver.handle(given)).text, "processed");
});

test("isNewest is false for an older event of a key", async () => {
  const newest: [bigint, boolean][] = [];
  const { receiver } = receiverWith(async (message, tx) => {
    newest.push([message.sequence, await receiver.inbox.isNewest(tx, "customer 7", message)]);
  });
  for (const sequence of [1, 3, 2]) {
    await receiver.handle(request(delivery(sequence)));
  }
  assert.deepEqual(newest, [[1n, true], [3n, true], [2n, false]]);
});
