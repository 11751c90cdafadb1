/**
 * Metadata in headers, for bodies that are the payload alone (formats `raw` and `cloudevents-binary`).
 *
 * `webhook-metadata-signature` has the same form and keys as `webhook-signature` and signs
 *
 *     metadata.{webhook-id}.{webhook-timestamp}.{lines}
 *
 * where the lines are `name:value` of Content-Type, of the headers below without their prefix, and of the attributes
 * of a CloudEvent, in this order. Names are in lower case, lines are joined by line feeds, absent ones are left out.
 * The text cannot be the signed text of any body: there, a number stands where this text has an id.
 */

import { Buffer } from "node:buffer";

export const METADATA_SIGNATURE_HEADER = "webhook-metadata-signature";
export const CONTENT_TYPE = "content-type";
export const ATTRIBUTE_PREFIX = "ce-";

const NAMES = [
  "delivery",
  "event",
  "event-id",
  "event-time",
  "event-tenant",
  "event-key",
  "lane",
  "sequence",
  "previous-sequence",
  "replay-of",
  "backfill",
  "lane-ends",
];
/** Lower-case names of the signed attributes of a CloudEvent in binary mode. */
export const ATTRIBUTE_HEADERS: readonly string[] = [
  "specversion",
  "id",
  "source",
  "type",
  "time",
  "subject",
  "partitionkey",
  "lane",
  "lanesequence",
  "previoussequence",
  "eventid",
  "tenant",
  "encodedkey",
  "encodedtenant",
  "traceparent",
  "tracestate",
  "replayof",
  "backfill",
  "laneends",
].map((name) => ATTRIBUTE_PREFIX + name);

/**
 * The text that `webhook-metadata-signature` signs.
 *
 * @param headers by lower-case name.
 * @param prefix begins the names of the headers that describe a delivery, in lower case.
 */
export function signedMetadata(
  headers: ReadonlyMap<string, string>,
  prefix: string,
  messageId: string,
  timestamp: number,
): string {
  const named: [string, string | undefined][] = [
    [CONTENT_TYPE, headers.get(CONTENT_TYPE)],
    ...NAMES.map((name): [string, string | undefined] => [name, headers.get(prefix + name)]),
    ...ATTRIBUTE_HEADERS.map((name): [string, string | undefined] => [name, headers.get(name)]),
  ];
  const lines = named.filter(([, value]) => value !== undefined).map(([name, value]) => `${name}:${value}`);
  return `metadata.${messageId}.${timestamp}.${lines.join("\n")}`;
}

/**
 * Decode a percent-encoded text (CloudEvents HTTP binding 1.0, 3.1.3.2).
 *
 * Unlike `decodeURIComponent`, a percent sign without two hexadecimal digits stands for itself.
 *
 * @throws TypeError the bytes are not UTF-8.
 */
export function decodeText(value: string): string {
  const bytes: Uint8Array[] = [];
  for (const [, escapes, text] of value.matchAll(/((?:%[0-9A-Fa-f]{2})+)|((?:(?!%[0-9A-Fa-f]{2}).)+)/gsu)) {
    bytes.push(escapes ? Buffer.from(escapes.replaceAll("%", ""), "hex") : Buffer.from(text ?? ""));
  }
  return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Buffer.concat(bytes));
}
