import assert from "node:assert/strict";
import { test } from "node:test";

import { LaneOrder } from "outbox-receiver";

test("numbers in order, a gap, an old number and a duplicate", () => {
  const lane = new LaneOrder();
  assert.equal(lane.observe(1n, 0n).kind, "in_order");
  const gap = lane.observe(5n, 4n);
  assert.equal(gap.kind, "gap");
  assert.deepEqual(gap.missing, [[2n, 4n]]);
  const old = lane.observe(3n, 2n);
  assert.deepEqual([old.kind, old.was], ["old", "missing"]);
  assert.equal(lane.observe(3n, 2n).kind, "duplicate");
  assert.deepEqual(lane.ranges("missing"), [[2n, 2n], [4n, 4n]]);
});

test("a lane joined in the middle has unknown numbers, unless the receiver is older", () => {
  assert.equal(new LaneOrder().observe(7n, 6n).kind, "joined");
  assert.deepEqual(new LaneOrder({ fromStart: true }).observe(7n, 6n).missing, [[1n, 6n]]);
});

test("dead letters are holes, which a replay closes", () => {
  const lane = new LaneOrder();
  lane.observe(1n, 0n);
  assert.deepEqual(lane.observe(4n, 1n).holes, [[2n, 3n]]);
  assert.equal(lane.close(3n), "hole");
  assert.equal(lane.close(3n), null);
  assert.deepEqual(lane.toState().holes, [[2n, 2n]]);
});

test("numbers beyond the end of a lane conflict, and those that the sender lost are reported", () => {
  const lane = new LaneOrder();
  lane.observe(1n, 0n);
  lane.observe(2n, 1n);
  assert.deepEqual(lane.observe(1n, 0n, { laneEnds: true }).lost, [2n, 2n]);
  assert.equal(lane.observe(3n, 2n).kind, "conflict");
});

test("the sender's progress reveals missing numbers at the end; those no longer retained become unknown", () => {
  const lane = new LaneOrder();
  lane.observe(1n, 0n);
  lane.applyProgress(9n, [[4n, 5n]]);
  assert.deepEqual(lane.toState().holes, [[4n, 5n]]);
  assert.deepEqual(lane.toState().missing, [[2n, 3n], [6n, 9n]]);
  assert.deepEqual(lane.markUnavailable(1n, 6n), [[2n, 3n], [6n, 6n]]);
  assert.deepEqual(lane.toState().missing, [[7n, 9n]]);
});

test("the sender's progress declares dead letters of an ended lane, and none beyond its end", () => {
  const lane = new LaneOrder({ fromStart: true });
  lane.observe(5n, 4n, { laneEnds: true });
  lane.applyProgress(9n, [[2n, 3n], [6n, 9n]]);
  assert.deepEqual(lane.toState().holes, [[2n, 3n]]);
  assert.deepEqual(lane.toState().missing, [[1n, 1n], [4n, 4n]]);
  assert.equal(lane.toState().high, 5n);
});

test("ranges are bounded: the lowest become unknown", () => {
  const lane = new LaneOrder();
  for (let n = 1n; n <= 3000n; n += 2n) {
    lane.observe(n, n - 1n);
  }
  const { missing, unknown } = lane.toState();
  assert.equal(missing.length + unknown.length, 1000);
  assert.equal(unknown[0]?.[0], 1n);
});
