/** Request headers by lower-case name, and the names that the relay uses. */

import { SignatureError, UsageError } from "./errors.js";

/**
 * Headers of a request: pairs, a `Headers` object, or an object of names and values (`req.headers` of Node). Names in
 * any case. Pairs preserve repeated headers, which are refused.
 */
export type HeadersInput =
  | Iterable<readonly [string, string]>
  | Readonly<Record<string, string | readonly string[] | undefined>>;

export const DEFAULT_PREFIX = "X-";

const RELAY_NAMES = [
  "attempt",
  "backfill",
  "delivery",
  "event",
  "event-id",
  "event-key",
  "event-tenant",
  "event-time",
  "lane",
  "lane-ends",
  "last-sequence",
  "previous-sequence",
  "replay-of",
  "sequence",
];
const PREFIX = /^[A-Za-z](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?-$/;
const FOREIGN_PREFIXES = ["webhook-", "x-forwarded-", "proxy-", "sec-", "content-", "accept-", "ce-"];

/** The lower-case names of the headers that describe a delivery to an endpoint with this prefix. */
export function relayHeaders(prefix: string): string[] {
  return RELAY_NAMES.map((name) => prefix.toLowerCase() + name);
}

/**
 * Validate one or several header prefixes.
 *
 * @throws UsageError there is none, or an invalid one.
 */
export function parsePrefixes(given: string | readonly string[]): readonly string[] {
  const prefixes = typeof given === "string" ? [given] : [...given];
  if (prefixes.length === 0) {
    throw new UsageError("headerPrefix: at least one is required");
  }
  for (const prefix of prefixes) {
    if (!PREFIX.test(prefix) || FOREIGN_PREFIXES.some((foreign) => prefix.toLowerCase().startsWith(foreign))) {
      throw new UsageError(
        `headerPrefix: ${JSON.stringify(prefix.slice(0, 100))} must be letters, digits and dashes, such as X-Acme-, ` +
          `and not begin with ${FOREIGN_PREFIXES.join(", ")}`,
      );
    }
  }
  return prefixes;
}

/**
 * Select the headers with these lower-case names.
 *
 * @throws SignatureError one of them occurs more than once, so that the signed value is unknown.
 */
export function foldHeaders(headers: HeadersInput, names: ReadonlySet<string>): Map<string, string> {
  const folded = new Map<string, string>();
  for (const [name, value] of headerPairs(headers)) {
    const lower = name.toLowerCase();
    if (names.has(lower)) {
      if (folded.has(lower)) {
        throw new SignatureError("repeated_header", `the header ${lower} occurs more than once`);
      }
      folded.set(lower, value);
    }
  }
  return folded;
}

function* headerPairs(headers: HeadersInput): Iterable<readonly [string, string]> {
  if (Symbol.iterator in headers) {
    yield* headers as Iterable<readonly [string, string]>;
    return;
  }
  for (const [name, value] of Object.entries(headers)) {
    for (const each of typeof value === "string" ? [value] : (value ?? [])) {
      yield [name, each];
    }
  }
}
