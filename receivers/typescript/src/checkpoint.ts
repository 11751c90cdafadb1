/**
 * Receiver checkpoints: requests that report the last sequence number of each lane.
 *
 * A receiver detects a gap when a later number arrives. It cannot detect lost deliveries at the end of a lane without
 * the last number:
 *
 *     {"id": "…", "type": "outbox.checkpoint", "timestamp": "2026-01-31T12:00:00.000000Z",
 *      "lanes": [{"lane": "6f1c2a349d55-1-0", "generation": 1, "sequence": 41, "dead_lettered": [[37, 38]]}, …]}
 *
 * It is signed like a delivery but has no lane, number or delivery id of its own. It is not retried, and an old one can
 * arrive late.
 */

import { MessageError } from "./errors.js";
import { RawJson, arraySources, decodeUtf8, memberOf, objectSources, parseJson, type JsonMember } from "./json.js";
import type { Range } from "./ranges.js";

export const CHECKPOINT_TYPE = "outbox.checkpoint";
const LANES_MAX = 2000;
const DEAD_RANGES_MAX = 20;

/** The progress of one lane in a checkpoint. */
export interface LaneMark {
  readonly lane: string;
  /** The lane generation; it rises when the lanes of an endpoint are recreated. */
  readonly generation: bigint;
  /** The last acknowledged sequence number; 0: none. */
  readonly sequence: bigint;
  /** The newest dead-lettered ranges below it. */
  readonly deadLettered: readonly Range[];
}

/**
 * Parse the lanes of a checkpoint; null: the body is not a checkpoint.
 *
 * @throws MessageError the checkpoint is malformed.
 */
export function parseCheckpoint(body: Uint8Array): LaneMark[] | null {
  let members: Map<string, string> | null;
  try {
    const text = decodeUtf8(body);
    if (!text.includes(CHECKPOINT_TYPE)) {
      return null;
    }
    parseJson(text);
    members = objectSources(text);
  } catch {
    return null;
  }
  const type = members?.get("type");
  if (!members || type === undefined || memberOf(type) !== CHECKPOINT_TYPE || members.has("lane")) {
    return null;
  }
  const lanes = arraySources(members.get("lanes") ?? "null");
  if (lanes === null || lanes.length > LANES_MAX) {
    throw new MessageError(`the checkpoint's "lanes" is not a list of at most ${LANES_MAX}`);
  }
  return lanes.map(parseMark);
}

function parseMark(source: string): LaneMark {
  const members = objectSources(source) ?? new Map<string, string>();
  const [lane, generation, sequence] = ["lane", "generation", "sequence"].map((name) =>
    memberOf(members.get(name) ?? "null"),
  );
  const deadLettered = parseDeadLettered(memberOf(members.get("dead_lettered") ?? "[]"));
  // No database can hold a NUL character.
  const isLane = typeof lane === "string" && !lane.includes("\0");
  if (!isLane || !isNumber(generation) || !isNumber(sequence) || deadLettered === null) {
    throw new MessageError("a lane of the checkpoint has no valid name, generation and sequences");
  }
  return { lane, generation, sequence, deadLettered };
}

function parseDeadLettered(member: JsonMember): Range[] | null {
  const ranges = member instanceof RawJson ? arraySources(member.text) : null;
  if (ranges === null || ranges.length > DEAD_RANGES_MAX) {
    return null;
  }
  const parsed: Range[] = [];
  for (const source of ranges) {
    const [lo, hi, ...more] = (arraySources(source) ?? []).map(memberOf);
    if (!isNumber(lo) || !isNumber(hi) || more.length > 0 || lo === 0n || lo > hi) {
      return null;
    }
    parsed.push([lo, hi]);
  }
  return parsed;
}

function isNumber(value: JsonMember | undefined): value is bigint {
  return typeof value === "bigint" && value >= 0n && value < 2n ** 63n;
}
