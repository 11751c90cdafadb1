/** Test program: verifies the requests of stdin; one JSON object a line. */

import { Buffer } from "node:buffer";
import { createInterface } from "node:readline";

import { MessageError, SignatureError, verify, type FormatName, type Message, type Verified } from "outbox-receiver";

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
      const kind = error instanceof SignatureError ? "signature" : "message";
      return JSON.stringify({ error: kind, text: error.message });
    }
    throw error;
  }
}

function formatVerified({ messages }: Verified): string {
  return `{"messages":[${messages.map(formatMessage).join(",")}]}`;
}

function formatMessage(message: Message): string {
  const { replayOf, data, dataText } = message;
  // Sources of JSON values: `JSON.stringify` does not accept `bigint`, and would round integers of payloads.
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
    content_type: JSON.stringify(message.contentType),
    data:
      data instanceof Uint8Array
        ? JSON.stringify({ base64: Buffer.from(data).toString("base64") })
        : // In a line, JSON text has no line breaks: those between tokens are spaces as well.
          (dataText ?? "null").replace(/[\r\n]+/g, " "),
  };
  return `{${Object.entries(sources)
    .map(([name, source]) => `"${name}":${source}`)
    .join(",")}}`;
}
