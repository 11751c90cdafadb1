/** Integer sets as ranges: consecutive integers take the space of one range. */

/** An inclusive range: first and last integer. */
export type Range = readonly [first: bigint, last: bigint];

/** A set of integers as sorted ranges that neither overlap nor touch. */
export class RangeSet implements Iterable<Range> {
  #ranges: Range[] = [];

  [Symbol.iterator](): Iterator<Range> {
    return this.#ranges[Symbol.iterator]();
  }

  /** The number of ranges, which determines the memory. */
  get length(): number {
    return this.#ranges.length;
  }

  /** The `count` lowest ranges. */
  lowest(count: number): Range[] {
    return this.#ranges.slice(0, count);
  }

  has(number: bigint): boolean {
    const range = this.#ranges[this.#firstEndingAt(number)];
    return range !== undefined && range[0] <= number;
  }

  /** Add the integers from `lo` to `hi`; none if `hi < lo`. */
  add(lo: bigint, hi: bigint): void {
    if (hi < lo) {
      return;
    }
    // Merge with the ranges that overlap or touch.
    const i = this.#firstEndingAt(lo - 1n);
    const j = this.#firstBeginningAfter(hi + 1n);
    const [first, last] = [this.#ranges[i], this.#ranges[j - 1]];
    const overlaps = i < j && first !== undefined && last !== undefined;
    const merged: Range = overlaps ? [first[0] < lo ? first[0] : lo, last[1] > hi ? last[1] : hi] : [lo, hi];
    this.#ranges.splice(i, Math.max(j - i, 0), merged);
  }

  /** Remove the integers from `lo` to `hi`; returns the ranges that were in the set. */
  remove(lo: bigint, hi: bigint): Range[] {
    const i = this.#firstEndingAt(lo);
    const j = this.#firstBeginningAfter(hi);
    if (i >= j || hi < lo) {
      return [];
    }
    const affected = this.#ranges.slice(i, j);
    const left: Range[] = [];
    for (const [first, last] of affected) {
      if (first < lo) {
        left.push([first, lo - 1n]);
      }
      if (last > hi) {
        left.push([hi + 1n, last]);
      }
    }
    this.#ranges.splice(i, j - i, ...left);
    return affected.map(([first, last]): Range => [first < lo ? lo : first, last > hi ? hi : last]);
  }

  /** Index of the first range whose last number is `number` or higher. */
  #firstEndingAt(number: bigint): number {
    return this.#search((range) => range[1] >= number);
  }

  /** Index of the first range whose first number is higher than `number`. */
  #firstBeginningAfter(number: bigint): number {
    return this.#search((range) => range[0] > number);
  }

  /** Binary search for the first range for which a monotonic condition is true. */
  #search(condition: (range: Range) => boolean): number {
    let [low, high] = [0, this.#ranges.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      const range = this.#ranges[middle];
      if (range !== undefined && condition(range)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
}

/** Sort ranges by their first number. */
export function sortRanges(ranges: readonly Range[]): Range[] {
  return [...ranges].sort((a, b) => (a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]) ? -1 : 1));
}

/** Ranges as JSON text, `[[1,3],[5,5]]`. */
export function formatRanges(ranges: readonly Range[]): string {
  return `[${ranges.map(([lo, hi]) => `[${lo},${hi}]`).join(",")}]`;
}

/** Parse the JSON text of ranges; `JSON.parse` would round numbers above 2^53. */
export function parseRanges(text: string): Range[] {
  const pairs = text.matchAll(/\[\s*(\d+)\s*,\s*(\d+)\s*\]/g);
  return [...pairs].map(([, lo, hi]): Range => [BigInt(lo ?? 0), BigInt(hi ?? 0)]);
}

/** Ranges for a log line, `3, 5 to 8`. */
export function describeRanges(ranges: readonly Range[]): string {
  return ranges.map(([lo, hi]) => (lo === hi ? `${lo}` : `${lo} to ${hi}`)).join(", ");
}
