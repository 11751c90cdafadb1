/**
 * Order check and gap detection for the deliveries of a lane.
 *
 * A lane numbers its deliveries 1, 2, 3 … Every delivery also carries the previous sequence number that was not
 * dead-lettered, so a receiver can distinguish two kinds of absent numbers:
 *
 * - **a hole** was dead-lettered by the sender: 6 is followed by 8 with previous 6, so 7 is a dead letter that can be
 *   fetched or replayed;
 * - **missing** is a number that the sender recorded as delivered and this receiver did not get: 6 is followed by 8
 *   with previous 7.
 *
 * Every sequence number from 1 to the highest one received is in exactly one state:
 *
 *     seen      received, or replaced by the replay of a hole
 *     missing   should have been received
 *     hole      dead-lettered by the sender
 *     unknown   from before this receiver joined the lane, or forgotten
 *
 * The transitions are:
 *
 *     event                                        from              to
 *     received                                     any but seen      seen
 *     skipped, at or below the sender's previous   (new)             missing
 *     skipped, above the sender's previous         (new)             hole
 *     completed according to the sender            (new)             missing
 *     dead-lettered according to the sender        missing, unknown  hole
 *     skipped by an older delivery that comes late missing, unknown  hole
 *     replayed (`replayOf`)                        any but seen      seen
 *     no longer retained by the sender             missing           unknown
 *     first number of a lane joined in the middle  (new, below it)   unknown
 *     too many ranges in a lane                    any, the lowest   unknown
 *
 * "Skipped" numbers lie between the highest one received and the one that just arrived. The first reception wins: a
 * received number stays seen, even if a later delivery lists it as dead-lettered, because an acknowledgement can be
 * lost in a crash.
 *
 * A lane ends when the number of lanes of its endpoint changes; `laneEnds` marks its last delivery. A number beyond
 * the end is a conflict. The end may also lie below the highest number received, when a failover of the sender's
 * database lost the deliveries after it. The numbers beyond the end are *lost*: they stay seen, but the sender has no
 * record of them.
 *
 * Memory is bounded: states are stored as ranges, with a limit on the ranges of a lane. Numbers are `bigint`, because
 * they go up to 2^63-1.
 */

import { RangeSet, sortRanges, type Range } from "./ranges.js";

/** Numbers of a lane that a catch-up does not process, also at the end of the lane. */
export interface LaneGaps {
  /** The catch-up has completed the numbers up to this one. */
  readonly through: bigint;
  /** Numbers that the sender had dead-lettered. */
  readonly deadLettered: readonly Range[];
  /** Numbers that the sender no longer retains, or that a handler refused. */
  readonly unavailable: readonly Range[];
}

/** Ranges kept for a lane; beyond this the lowest ones become unknown. */
export const RANGES_MAX = 1000;

/**
 * Position of a delivery relative to those received before it in its lane.
 *
 * - `in_order`: the next number, or the next one after holes declared by the sender;
 * - `joined`: this receiver's first delivery of a running lane; earlier numbers are unknown;
 * - `gap`: numbers before it are missing;
 * - `duplicate`: it was received before;
 * - `old`: not seen before, but overtaken by a higher number; `was` is its state until now;
 * - `conflict`: the number lies beyond the end of its lane, or an inbox found that it was seen with another delivery
 *   id: two senders, or a forgery.
 */
export type OrderKind = "in_order" | "joined" | "gap" | "duplicate" | "old" | "conflict";

/** State of a sequence number that was not seen. */
export type SequenceState = "missing" | "hole" | "unknown";

/** Result of the order check for one delivery. */
export interface Observation {
  readonly kind: OrderKind;
  /** Numbers that this delivery reveals to be missing. */
  readonly missing: readonly Range[];
  /** Numbers that this delivery declares as dead-lettered. */
  readonly holes: readonly Range[];
  /** For an old number: its state until now. */
  readonly was: SequenceState | null;
  /** For a replay: the state, until now, of the number that it replaces. */
  readonly closed: SequenceState | null;
  /** Numbers received beyond this end of the lane, which the sender lost. */
  readonly lost: Range | null;
}

/** Persistent state of a lane. */
export interface LaneState {
  /** Highest sequence number received; 0 before the first. */
  readonly high: bigint;
  /** `high` is the last number of the lane. */
  readonly ended: boolean;
  readonly missing: readonly Range[];
  readonly holes: readonly Range[];
  readonly unknown: readonly Range[];
}

export const NEW_LANE: LaneState = { high: 0n, ended: false, missing: [], holes: [], unknown: [] };

/** Build an observation with defaults. */
export function observationOf(kind: OrderKind, details: Partial<Observation> = {}): Observation {
  return { kind, missing: [], holes: [], was: null, closed: null, lost: null, ...details };
}

/** The order check of one lane. */
export class LaneOrder {
  readonly #fromStart: boolean;
  readonly #missing = new RangeSet();
  readonly #holes = new RangeSet();
  readonly #unknown = new RangeSet();
  #high = 0n;
  #ended = false;

  /**
   * @param options `fromStart`: this receiver is older than the lane, so that numbers before the first one received
   *   are missing, not unknown. `state`: the persistent state to restore.
   */
  constructor(options: { fromStart?: boolean; state?: LaneState } = {}) {
    this.#fromStart = options.fromStart ?? false;
    const state = options.state ?? NEW_LANE;
    this.#high = state.high;
    this.#ended = state.ended;
    for (const [numbers, ranges] of [
      [this.#missing, state.missing],
      [this.#holes, state.holes],
      [this.#unknown, state.unknown],
    ] as const) {
      for (const [lo, hi] of ranges) {
        numbers.add(lo, hi);
      }
    }
  }

  /** Highest sequence number received; 0 before the first. */
  get high(): bigint {
    return this.#high;
  }

  /** `high` is the last number of the lane. */
  get ended(): boolean {
    return this.#ended;
  }

  /** Return the persistent state. */
  toState(): LaneState {
    return {
      high: this.#high,
      ended: this.#ended,
      missing: this.ranges("missing"),
      holes: this.ranges("hole"),
      unknown: this.ranges("unknown"),
    };
  }

  /** Return the numbers in this state, ascending. */
  ranges(state: SequenceState): Range[] {
    return [...this.#numbers(state)];
  }

  /**
   * Record one delivery. A conflict changes nothing.
   *
   * @throws RangeError not 0 <= previousSequence < sequence.
   */
  observe(sequence: bigint, previousSequence: bigint, options: { laneEnds?: boolean } = {}): Observation {
    if (previousSequence < 0n || previousSequence >= sequence) {
      throw new RangeError(
        `sequence ${sequence} with previous ${previousSequence}: the previous one is 0 or more, and lower`,
      );
    }
    if (this.#ended && sequence > this.#high) {
      return observationOf("conflict");
    }
    const laneEnds = options.laneEnds ?? false;
    const lost: Range | null = laneEnds && sequence < this.#high ? [sequence + 1n, this.#high] : null;
    const observation =
      sequence > this.#high
        ? this.#observeAhead(sequence, previousSequence)
        : this.#observeBehind(sequence, previousSequence);
    this.#forget();
    if (laneEnds) {
      this.#ended = true;
    }
    return { ...observation, lost };
  }

  /**
   * Mark a number as seen because its replay arrived.
   *
   * @returns its state until now; null: it was received already, or lies beyond the highest number received.
   */
  close(sequence: bigint): SequenceState | null {
    for (const state of ["missing", "hole", "unknown"] as const) {
      if (this.#numbers(state).remove(sequence, sequence).length > 0) {
        return state;
      }
    }
    return null;
  }

  /**
   * Apply the sender's progress: it completed every number up to this one. Numbers beyond the end of the lane are
   * ignored.
   *
   * @param sequence the last completed number.
   * @param deadLettered ranges that were dead-lettered instead of delivered.
   */
  applyProgress(sequence: bigint, deadLettered: Iterable<Range> = []): void {
    if (sequence > this.#high && !this.#ended) {
      this.#missing.add(this.#high + 1n, sequence);
      this.#high = sequence;
    }
    for (const [lo, hi] of deadLettered) {
      this.#markHoles(lo, hi < this.#high ? hi : this.#high);
    }
    this.#forget();
  }

  /**
   * Change missing numbers that cannot be fetched any more to unknown.
   *
   * @returns the ranges that were missing until now.
   */
  markUnavailable(lo: bigint, hi: bigint): Range[] {
    const unavailable = this.#missing.remove(lo, hi);
    for (const [first, last] of unavailable) {
      this.#unknown.add(first, last);
    }
    return unavailable;
  }

  /** Return the numbers missing before this delivery; changes nothing. */
  missingBefore(previousSequence: bigint): Range[] {
    const before = new RangeSet();
    for (const [lo, hi] of this.#missing) {
      before.add(lo, hi < previousSequence ? hi : previousSequence);
    }
    if (this.#high !== 0n || this.#fromStart) {
      before.add(this.#high + 1n, previousSequence);
    }
    return [...before];
  }

  #numbers(state: SequenceState): RangeSet {
    return state === "missing" ? this.#missing : state === "hole" ? this.#holes : this.#unknown;
  }

  #observeAhead(sequence: bigint, previous: bigint): Observation {
    const joins = this.#high === 0n && !this.#fromStart;
    const first = this.#high + 1n;
    (joins ? this.#unknown : this.#missing).add(first, previous);
    const renamed = this.#markHoles(previous + 1n, this.#high);
    const fresh: Range = [first > previous + 1n ? first : previous + 1n, sequence - 1n];
    this.#holes.add(...fresh);
    this.#high = sequence;
    const skipped = first <= previous;
    const kind = !skipped ? "in_order" : joins ? "joined" : "gap";
    return observationOf(kind, {
      missing: kind === "gap" ? [[first, previous]] : [],
      holes: fresh[0] <= fresh[1] ? [...renamed, fresh] : renamed,
    });
  }

  #observeBehind(sequence: bigint, previous: bigint): Observation {
    const was = this.close(sequence);
    if (was === null) {
      return observationOf("duplicate");
    }
    return observationOf("old", { holes: this.#markHoles(previous + 1n, sequence - 1n), was });
  }

  /** Turn missing and unknown numbers of a dead-lettered range into holes. */
  #markHoles(lo: bigint, hi: bigint): Range[] {
    const named = [...this.#missing.remove(lo, hi), ...this.#unknown.remove(lo, hi)];
    for (const [first, last] of named) {
      this.#holes.add(first, last);
    }
    return sortRanges(named);
  }

  /** Enforce RANGES_MAX by merging the two lowest ranges into one unknown range. */
  #forget(): void {
    const all = [this.#missing, this.#holes, this.#unknown];
    while (all.reduce((count, numbers) => count + numbers.length, 0) > RANGES_MAX) {
      const horizon = sortRanges(all.flatMap((numbers) => numbers.lowest(2)))[1]?.[1] ?? 0n;
      for (const numbers of all) {
        numbers.remove(1n, horizon);
      }
      this.#unknown.add(1n, horizon);
    }
  }
}
