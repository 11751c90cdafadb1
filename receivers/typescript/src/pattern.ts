/**
 * Patterns of event types: dot-separated segments of letters, digits, `_` and `-`, which do not begin with `-`. `*`
 * matches one segment and a last `**` one or more:
 *
 *     order.paid      only order.paid
 *     order.*         order.paid, not order.item.added
 *     order.**        order.paid and order.item.added, not order
 *     **              everything but operational events
 *
 * Types under `outbox.` are operational events. Only patterns that start with `outbox` match them. The relay's probe,
 * `outbox.probe`, is matched by its full type alone.
 */

import { UsageError } from "./errors.js";

const TYPE_BYTES_MAX = 255;
const PROBE = "outbox.probe";
const SEGMENT = "[A-Za-z0-9_][A-Za-z0-9_-]*";
const WORD = new RegExp(`^${SEGMENT}$`);

/**
 * Compile a pattern to a regular expression for whole types.
 *
 * @throws UsageError the pattern is invalid.
 */
export function parsePattern(pattern: string): RegExp {
  const parts = pattern.split(".");
  const isValid = parts.every(
    (part, n) => part === "*" || (part === "**" && n === parts.length - 1) || WORD.test(part),
  );
  if (pattern.length > TYPE_BYTES_MAX || !isValid) {
    throw new UsageError(
      `type pattern: ${JSON.stringify(pattern.slice(0, TYPE_BYTES_MAX))} is invalid: use segments of letters, digits, ` +
        '_ and - joined by dots, not beginning with -, "*" for one segment, a last "**" for the rest',
    );
  }
  const segments = parts.map((part) => (part === "*" ? SEGMENT : part === "**" ? `${SEGMENT}(?:\\.${SEGMENT})*` : part));
  const excluded = parts[0] !== "outbox" ? "(?!outbox\\.)" : pattern === PROBE ? "" : "(?!outbox\\.probe$)";
  return new RegExp(`^${excluded}${segments.join("\\.")}$`);
}
