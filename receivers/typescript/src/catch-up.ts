/**
 * Catch-up of a lane: which pages to fetch, and which deliveries to process. Without I/O of its own: `catchUpLane`
 * awaits the functions of its caller that fetch a page, process a delivery and record what is not processed.
 */

import type { LanePage, LaneProgress } from "./fetch-client.js";
import type { StoredLane } from "./inbox/store.js";
import type { LaneGaps, LaneState } from "./lane-order.js";
import { RangeSet, type Range } from "./ranges.js";
import type { ReceiverRequest } from "./requests.js";

/**
 * Outcome of a fetched delivery: `processed`, now or before; `retryable`: it failed, and a later catch-up tries again;
 * `refused`: a handler refused it, or it conflicts, so it is never processed.
 */
export type FetchedOutcome = "processed" | "retryable" | "refused";

/** Result of catching up with one lane. */
export interface CatchUpResult {
  readonly lane: string;
  /** Last sequence number acknowledged according to the sender. */
  readonly acknowledged: bigint;
  /** Deliveries fetched and processed. */
  readonly fetched: number;
  /** Missing numbers that the sender had dead-lettered. */
  readonly deadLettered: number;
  /** Missing numbers that the sender no longer retains, or that a handler refused; unknown from now on. */
  readonly unavailable: readonly Range[];
  /** The sequence number that could not be processed; later ones were not fetched. */
  readonly failed: bigint | null;
}

/**
 * Fetch the missing deliveries of a lane and those after its highest number, in order.
 *
 * @param state its state in the inbox.
 * @param fetchPage fetches the page after a sequence number.
 * @param process processes a delivery as if received.
 * @param record records what is not processed; returns the unavailable numbers that were missing.
 */
export async function catchUpLane(
  lane: string,
  state: LaneState,
  fetchPage: (after: bigint) => Promise<LanePage>,
  process: (request: ReceiverRequest) => Promise<FetchedOutcome>,
  record: (gaps: LaneGaps) => Promise<Range[]>,
): Promise<CatchUpResult> {
  const missing = new RangeSet();
  for (const [lo, hi] of state.missing) {
    missing.add(lo, hi);
  }
  const [dead, unavailable] = [new RangeSet(), new RangeSet()];
  let after: bigint | null = (missing.lowest(1)[0]?.[0] ?? state.high + 1n) - 1n;
  let [acknowledged, through] = [0n, 0n];
  let [fetched, deadLettered] = [0, 0];
  let failed: bigint | null = null;
  while (after !== null && failed === null) {
    const page: LanePage = await fetchPage(after);
    acknowledged = page.acknowledged;
    unavailable.add(after + 1n, page.keptFrom - 1n);
    through = page.keptFrom > through ? page.keptFrom - 1n : through;
    for (const item of page.items) {
      const { sequence } = item;
      if (sequence <= state.high && !missing.has(sequence)) {
        continue;
      }
      // The event of a dead letter may have been erased since.
      if (item.deadLettered) {
        deadLettered++;
        dead.add(sequence, sequence);
      } else if (item.request === null) {
        unavailable.add(sequence, sequence);
      } else {
        const outcome = await process(item.request);
        if (outcome === "retryable") {
          failed = sequence;
          break;
        }
        if (outcome === "refused") {
          unavailable.add(sequence, sequence);
        } else {
          fetched++;
        }
      }
      through = sequence;
    }
    after = page.next;
  }
  const gaps = { through, deadLettered: [...dead], unavailable: [...unavailable] };
  const lost = gaps.deadLettered.length + gaps.unavailable.length > 0 ? await record(gaps) : [];
  return { lane, acknowledged, fetched, deadLettered, unavailable: lost, failed };
}

/**
 * Return the lanes with missing deliveries.
 *
 * A lane without any delivery here is fetched from its beginning if this receiver already existed when the lane began:
 * its inbox is older than every lane (`fromStart`), or has another lane of the same generation from sequence number 1
 * on, or a lane of an older generation. Otherwise the deliveries of that lane were made to an earlier receiver.
 */
export function lanesBehind(
  known: ReadonlyMap<string, StoredLane>,
  progress: readonly LaneProgress[],
  fromStart: boolean,
): string[] {
  const complete = new Set<bigint>();
  let oldest: bigint | null = null;
  for (const { lane, generation } of progress) {
    const stored = known.get(lane);
    if (stored !== undefined) {
      oldest = oldest === null || generation < oldest ? generation : oldest;
      if (stored.state.unknown.length === 0) {
        complete.add(generation);
      }
    }
  }
  return progress
    .filter(({ lane, acknowledged, generation }) => {
      const stored = known.get(lane);
      if (stored !== undefined) {
        return stored.state.missing.length > 0 || stored.state.high < acknowledged;
      }
      const isOlder = fromStart || complete.has(generation) || (oldest !== null && generation > oldest);
      return acknowledged > 0n && isOlder;
    })
    .map(({ lane }) => lane);
}
