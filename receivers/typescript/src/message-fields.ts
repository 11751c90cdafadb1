/** Members of deliveries, with the checks that all formats share. Each function throws a `MessageError`. */

import { MessageError } from "./errors.js";
import { RawJson, decodeUtf8, memberOf, objectSources, requireValidJson, type JsonMember } from "./json.js";
import { decodeText } from "./metadata.js";
import { errorText } from "./text.js";

/** The text of a body that must be JSON. */
export function requireJson(body: Uint8Array): string {
  try {
    const text = decodeUtf8(body);
    requireValidJson(text);
    return text;
  } catch (error) {
    throw new MessageError(`the body is not JSON: ${errorText(error)}`);
  }
}

/** A member that must be a text. */
export function requireText(fields: ReadonlyMap<string, JsonMember>, name: string): string {
  const value = fields.get(name);
  if (typeof value !== "string") {
    throw new MessageError(`the body's "${name}" is not a string`);
  }
  if (value.includes("\0")) {
    // PostgreSQL's text cannot store NUL: the inbox would fail, and the sender retry.
    throw new MessageError(`the body's "${name}" has a NUL character, which no database can hold`);
  }
  return value;
}

/** A member that must be an integer from 0 to 2^63-1. */
export function requireInteger(fields: ReadonlyMap<string, JsonMember>, name: string): bigint {
  const value = fields.get(name);
  if (typeof value !== "bigint") {
    throw new MessageError(`the body's "${name}" is not an integer`);
  }
  if (value < 0n || value >= 2n ** 63n) {
    throw new MessageError(`the body's "${name}" is not between 0 and 2^63`);
  }
  return value;
}

/** A member that must be a boolean. */
export function requireBoolean(fields: ReadonlyMap<string, JsonMember>, name: string): boolean {
  const value = fields.get(name);
  if (typeof value !== "boolean") {
    throw new MessageError(`the body's "${name}" is not true or false`);
  }
  return value;
}

/** A value that must be a UUID; `what` names it in the error. */
export function requireUuid(value: JsonMember, what: string): string {
  if (!isUuid(value)) {
    throw new MessageError(`${what} is not a UUID`);
  }
  return value;
}

function isUuid(value: JsonMember): value is string {
  return typeof value === "string" && /^[0-9a-f]{32}$/i.test(value.replaceAll("-", ""));
}

/** Whether a text is a UUID of version 8, which every delivery id of a relay is. */
export function isDeliveryId(text: string): boolean {
  return isUuid(text) && /^.{12}8.{3}[89ab]/i.test(text.replaceAll("-", ""));
}

/** Lane and number of `replay_of`; null if it is absent. */
export function requireReplayOf(member: JsonMember | undefined): { lane: string; sequence: bigint } | null {
  if (member === undefined) {
    return null;
  }
  const members = member instanceof RawJson ? objectSources(member.text) : null;
  if (members === null) {
    throw new MessageError('the body\'s "replay_of" is not an object');
  }
  const fields = new Map([...members].map(([name, source]) => [name, memberOf(source)]));
  return { lane: requireText(fields, "lane"), sequence: requireInteger(fields, "sequence") };
}

/** `replay_of` as a JSON object, from `lane/number`. */
export function replayFromText(text: string): RawJson {
  const slash = text.lastIndexOf("/");
  const sequence = parseNumber(text.slice(slash + 1), "the replayed sequence");
  return new RawJson(`{"lane":${JSON.stringify(text.slice(0, Math.max(slash, 0)))},"sequence":${sequence}}`);
}

/** A number that is sent as text. */
export function numberFromText(fields: ReadonlyMap<string, JsonMember>, name: string): bigint {
  return parseNumber(requireText(fields, name), `the body's "${name}"`);
}

/** A decimal number without leading zeros. */
export function parseNumber(text: string, what: string): bigint {
  if (!/^(?:0|[1-9][0-9]{0,18})$/.test(text)) {
    throw new MessageError(`${what} is not a number`);
  }
  return BigInt(text);
}

/** A percent-encoded text. */
export function decodePercent(text: string, what: string): string {
  try {
    return decodeText(text);
  } catch {
    throw new MessageError(`${what} is not percent-encoded UTF-8`);
  }
}
