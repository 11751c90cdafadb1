/** Test program: verifies the requests of stdin; one JSON object a line. */

import { Buffer } from "node:buffer";
import { createInterface } from "node:readline";

import { MessageError, SignatureError, UnreadablePayload, verify, type FormatName, type Message, type Verified } from "outbox-receiver";

interface Input {
  readonly headers: Record<string, string>;
  readonly body: string;
  readonly secrets: string[];
  readonly formats?: FormatName[] | null;
  readonly header_prefix?: string | string[] | null;
  readonly now: number;
}

for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim() !== "") {
    process.stdout.write(`${run(JSON.parse(line) as Input)}\n`);
  }
}

function run(input: Input): string {
  try {
    const verified = verify({ headers: input.headers, body: Buffer.from(input.body, "base64") }, input.secrets, {
      formats: input.formats ?? null,
      headerPrefix: input.header_prefix ?? "X-",
      clock: () => input.now,
    });
    return formatVerified(verified);
  } catch (error) {
    if (error instanceof SignatureError || error instanceof MessageError) {
      const signature = error instanceof SignatureError;
      const kind = !signature ? "message" : error.timestampRefused ? "timestamp" : "signature";
      return JSON.stringify({ error: kind, text: error.message });
    }
    throw error;
  }
}

function formatVerified({ messages }: Verified): string {
  return `{"messages":[${messages.map(formatMessage).join(",")}]}`;
}

/** The payload, or why it cannot be read. */
function read(message: Message): { data: unknown; refused: string | null } {
  try {
    return { data: message.data, refused: null };
  } catch (error) {
    if (error instanceof UnreadablePayload) {
      return { data: null, refused: error.message };
    }
    throw error;
  }
}

function formatMessage(message: Message): string {
  const { replayOf, dataText } = message;
  const { data, refused } = read(message);
  // Sources of JSON values: `JSON.stringify` does not accept `bigint`.
  const sources: Record<string, string> = {
    delivery_id: JSON.stringify(message.deliveryId),
    event_id: JSON.stringify(message.eventId),
    type: JSON.stringify(message.type),
    timestamp: JSON.stringify(message.timestamp),
    tenant: JSON.stringify(message.tenant),
    key: JSON.stringify(message.key),
    lane: JSON.stringify(message.lane),
    sequence: `${message.sequence}`,
    previous_sequence: `${message.previousSequence}`,
    replay_of: replayOf ? `[${JSON.stringify(replayOf.lane)},${replayOf.sequence}]` : "null",
    backfill: `${message.backfill}`,
    lane_ends: `${message.laneEnds}`,
    format: JSON.stringify(message.format),
    content_type: JSON.stringify(message.contentType || null),
    data_text: JSON.stringify(dataText),
    refused: JSON.stringify(refused),
    data:
      data instanceof Uint8Array ? JSON.stringify({ base64: Buffer.from(data).toString("base64") }) : "null",
  };
  return `{${Object.entries(sources)
    .map(([name, source]) => `"${name}":${source}`)
    .join(",")}}`;
}
