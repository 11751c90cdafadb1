/**
 * Recording one delivery in the inbox.
 *
 * All of it runs in the transaction of the effects, with a global lock order: lanes by name, then the delivery id. A
 * delivery is new if neither its sequence number, nor its delivery id, nor the number that it replays was recorded
 * before. Usually one of them would suffice; together they also hold when one was forgotten: delivery ids expire, and
 * a replay has a new number.
 *
 *     fresh        new: process it
 *     duplicate    processed before: respond 2xx
 *     conflict     its number was used by another delivery, or lies beyond the end of its lane: two senders claim the
 *                  same lane. Nothing was recorded
 *     early        numbers before it are missing, and the caller requires them first. Nothing was recorded
 */

import {
  LaneOrder,
  NEW_LANE,
  observationOf,
  type LaneGaps,
  type LaneState,
  type Observation,
} from "../lane-order.js";
import type { Message } from "../message.js";
import { formatRanges, type Range } from "../ranges.js";
import type { InboxStatements, StoredLane } from "./store.js";

/** Default of how many numbers may overtake a missing one before it is overdue. */
export const TOLERANCE = 20;

/** Outcome of recording a delivery; see the top of this module. */
export type DeliveryOutcome = "fresh" | "duplicate" | "conflict" | "early";

/** Result of recording one delivery. */
export interface DeliveryResult {
  readonly outcome: DeliveryOutcome;
  /** Its order check; null if it has no lane, or was early. */
  readonly observation: Observation | null;
  /** For an early delivery: the numbers missing before it. */
  readonly missing: readonly Range[];
  /** Missing numbers that became overdue with this delivery. */
  readonly overdue: readonly Range[];
}

/** How deliveries are recorded. */
export interface ReceiveOptions {
  /** Record a delivery although numbers before it are missing. */
  readonly gaps: boolean;
  /** The inbox is older than every lane. */
  readonly fromStart: boolean;
  /** A missing number is overdue once overtaken by more than this many. */
  readonly tolerance: number;
  /** Deliveries received before this time may have expired, RFC 3339. */
  readonly expiredBefore: string;
}

/** Record a delivery of a relay. */
export async function receive(
  sql: InboxStatements,
  message: Message,
  options: ReceiveOptions,
): Promise<DeliveryResult> {
  const { deliveryId, lane, sequence, previousSequence, replayOf } = message;
  const claim = { deliveryId, lane, sequence };
  if (previousSequence === sequence - 1n && replayOf === null && !message.laneEnds) {
    const advanced = await sql.advance(claim);
    if (advanced?.moved) {
      return resultOf(advanced.claimed ? "fresh" : "duplicate", observationOf("in_order"));
    }
  }
  const replayedLane = replayOf?.lane ?? lane;
  await sql.addLane(lane);
  const lanes = new Map((await sql.lockLanes(lane, replayedLane)).map((each) => [each.lane, each]));
  const own = requireLane(lanes, lane);
  const order = new LaneOrder({ fromStart: options.fromStart, state: own.state });
  if (!options.gaps) {
    const missing = order.missingBefore(previousSequence);
    if (missing.length > 0) {
      return { ...resultOf("early", null), missing };
    }
  }
  const before = order.high;
  let observation = order.observe(sequence, previousSequence, { laneEnds: message.laneEnds });
  if (observation.kind === "conflict") {
    return resultOf("conflict", observation);
  }
  const claimed = await sql.claim(claim);
  const isKept = sequence > own.forgotten || (sql.keepsRetention && message.timestamp > options.expiredBefore);
  if (claimed && observation.kind === "duplicate" && isKept) {
    // The number was seen with another delivery id. The row of this one cannot have expired, because the event is
    // younger than the retention.
    await sql.unclaim(deliveryId);
    return resultOf("conflict", { ...observation, kind: "conflict" });
  }
  let seen = !claimed || observation.kind === "duplicate";
  const replayed = lanes.get(replayedLane);
  if (replayOf !== null && replayed !== undefined) {
    const other = replayed === own ? order : new LaneOrder({ state: replayed.state });
    const closed = other.close(replayOf.sequence);
    observation = { ...observation, closed };
    // The replayed number was received, or replayed before.
    seen = seen || (closed === null && replayOf.sequence <= other.high);
    if (replayed !== own) {
      await sql.saveLane(replayedLane, other.toState());
    }
  }
  await sql.saveLane(lane, order.toState());
  return {
    ...resultOf(seen ? "duplicate" : "fresh", observation),
    overdue: overdueRanges(order, before, BigInt(options.tolerance)),
  };
}

/** What is recorded for a `webhook-id` of another sender: the prefix keeps it apart from delivery ids of relays. */
export function foreignDeliveryId(messageId: string): string {
  return `foreign ${messageId}`;
}

/** Record a request of another sender by its `webhook-id`; it has no lane. */
export async function receiveForeign(sql: InboxStatements, messageId: string): Promise<DeliveryResult> {
  const claimed = await sql.claim({ deliveryId: foreignDeliveryId(messageId), lane: null, sequence: null });
  return resultOf(claimed ? "fresh" : "duplicate", null);
}

/**
 * Record what a catch-up of a lane did not process.
 *
 * @returns the unavailable numbers that were missing until now, also at the end of the lane.
 */
export async function recordGaps(sql: InboxStatements, lane: string, gaps: LaneGaps): Promise<Range[]> {
  await sql.addLane(lane);
  const [row] = await sql.lockLanes(lane, lane);
  const before = row?.state ?? NEW_LANE;
  const order = new LaneOrder({ state: before });
  order.applyProgress(gaps.through, gaps.deadLettered);
  const lost = gaps.unavailable.flatMap(([lo, hi]) => order.markUnavailable(lo, hi));
  const after = order.toState();
  if (!isSameState(before, after)) {
    await sql.saveLane(lane, after);
  }
  return lost;
}

function resultOf(outcome: DeliveryOutcome, observation: Observation | null): DeliveryResult {
  return { outcome, observation, missing: [], overdue: [] };
}

function requireLane(lanes: ReadonlyMap<string, StoredLane>, name: string): StoredLane {
  const lane = lanes.get(name);
  if (lane === undefined) {
    throw new Error(`the store returned no row for lane ${name}`);
  }
  return lane;
}

/**
 * The ranges that became overdue, when the highest number was `before` until now.
 *
 * A range becomes overdue as a whole, when its last number is overtaken by more than `tolerance`, so that each is
 * reported once.
 */
function overdueRanges(order: LaneOrder, before: bigint, tolerance: bigint): Range[] {
  return order.ranges("missing").filter(([, hi]) => before <= hi + tolerance && hi + tolerance < order.high);
}

function isSameState(a: LaneState, b: LaneState): boolean {
  return (
    a.high === b.high &&
    a.ended === b.ended &&
    (["missing", "holes", "unknown"] as const).every((name) => formatRanges(a[name]) === formatRanges(b[name]))
  );
}
