import assert from "node:assert/strict";
import { test } from "node:test";

import { Busy, MemoryStore, Receiver, Refuse, type Handler, type MemoryTransaction, type ReceiverOptions } from "outbox-receiver";

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
