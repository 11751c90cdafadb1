/**
 * Reorder buffer: holds the requests of early deliveries until the missing ones arrive.
 *
 * The request itself is held open, so no unprocessed event is stored, and the sender keeps the event until the
 * response. The number of held requests is bounded; the caller sets the deadline of each.
 */

import { Busy } from "./errors.js";

/** Requests waiting for a sequence number of a lane. */
export class ReorderBuffer {
  readonly #heldMax: number;
  readonly #waiters = new Map<string, Set<() => void>>();
  #held = 0;

  constructor(heldMax: number) {
    this.#heldMax = heldMax;
  }

  /**
   * Register for a sequence number.
   *
   * Register before checking the inbox: a number that arrives in between would otherwise be missed.
   */
  register(lane: string, sequence: bigint): { wait(waitMs: number): Promise<void>; release(): void } {
    const key = `${sequence} ${lane}`;
    let arrive: () => void = () => undefined;
    const arrived = new Promise<void>((resolve) => {
      arrive = resolve;
    });
    const waiters = this.#waiters.get(key) ?? new Set();
    this.#waiters.set(key, waiters.add(arrive));
    return {
      wait: async (waitMs) => {
        if (this.#held >= this.#heldMax) {
          throw new Busy(`${this.#held} deliveries are held for missing ones before them`);
        }
        this.#held++;
        const timer = setTimeout(arrive, Math.max(waitMs, 0));
        await arrived;
        clearTimeout(timer);
        this.#held--;
      },
      release: () => {
        waiters.delete(arrive);
        if (waiters.size === 0 && this.#waiters.get(key) === waiters) {
          this.#waiters.delete(key);
        }
      },
    };
  }

  /** Wake the requests that wait for this number; they check the inbox again. */
  received(lane: string, sequence: bigint): void {
    for (const arrive of this.#waiters.get(`${sequence} ${lane}`) ?? []) {
      arrive();
    }
  }
}
