/** A sender for tests: builds signed requests as a relay does. */

import { randomUUID } from "node:crypto";

import { sign, type ReceiverRequest } from "outbox-receiver";

export const SECRET = "whsec_dGVzdGluZyBvbmx5LCBub3QgYSBzZWNyZXQ=";

export interface Delivery {
  readonly deliveryId: string;
  readonly eventId: string;
  readonly type: string;
  readonly lane: string;
  readonly sequence: bigint;
  readonly previous: bigint;
  /** The payload, as JSON text. */
  readonly data: string;
  /** More members of the envelope, as JSON text: `,"key":"k"`. */
  readonly more: string;
}

/** A new delivery id: a UUID of version 8. */
export function newDeliveryId(): string {
  return randomUUID().replace(/^(.{14})./, "$18");
}

export function delivery(sequence: bigint | number, given: Partial<Delivery> = {}): Delivery {
  return {
    deliveryId: newDeliveryId(),
    eventId: randomUUID(),
    type: "order.paid",
    lane: "lane-1",
    sequence: BigInt(sequence),
    previous: BigInt(sequence) - 1n,
    data: '{"n":1}',
    more: "",
    ...given,
  };
}

export function envelope(each: Delivery, inBatch = false): string {
  const id = inBatch ? `"delivery":"${each.deliveryId}",` : "";
  const numbers = `"sequence":${each.sequence},"previous_sequence":${each.previous}`;
  const texts = `"id":"${each.eventId}","type":"${each.type}","timestamp":"2026-01-31T12:00:00.000001Z"`;
  return `{${id}${texts},"lane":"${each.lane}",${numbers},"data":${each.data}${each.more}}`;
}

export function signed(
  id: string,
  body: string | Uint8Array,
  headers: Record<string, string> = {},
  at = Math.floor(Date.now() / 1000),
): ReceiverRequest & { headers: Record<string, string> } {
  return {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      "webhook-id": id,
      "webhook-timestamp": `${at}`,
      "webhook-signature": sign(SECRET, id, at, body),
      ...headers,
    },
    body: Buffer.from(body),
  };
}

export function request(each: Delivery): ReturnType<typeof signed> {
  return signed(each.deliveryId, envelope(each), {
    "X-Delivery": each.deliveryId,
    "X-Event": each.type,
    "X-Event-Id": each.eventId,
    "X-Lane": each.lane,
    "X-Sequence": `${each.sequence}`,
    "X-Previous-Sequence": `${each.previous}`,
    "X-Attempt": "1",
  });
}

export function batch(deliveries: readonly Delivery[]): ReturnType<typeof signed> {
  const [first, last] = [deliveries[0], deliveries.at(-1)];
  const id = randomUUID();
  return signed(id, `[${deliveries.map((each) => envelope(each, true)).join(",")}]`, {
    "X-Delivery": id,
    "X-Lane": `${first?.lane}`,
    "X-Sequence": `${first?.sequence}`,
    "X-Last-Sequence": `${last?.sequence}`,
    "X-Previous-Sequence": `${first?.previous}`,
  });
}

/** A logger that keeps its lines. */
export function silentLogger() {
  const lines: string[] = [];
  const log = (text: string) => void lines.push(text);
  return { lines, info: log, warn: log, error: log };
}
