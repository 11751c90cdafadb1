/**
 * Parser for a request in any format: one delivery, or a batch of deliveries.
 *
 * A body with metadata (`envelope`, `thin`, `cloudevents`) is signed as a whole. The `X-` headers repeat its fields for
 * proxies and logs, so a header that differs from the body was changed in transit. For the other formats (`raw`,
 * `cloudevents-binary`) the verified headers are the metadata, see `metadata`.
 */

import { MessageError } from "./errors.js";
import { arraySources, decodeUtf8, memberOf, objectSources, requireValidJson, type JsonMember } from "./json.js";
import {
  decodePercent,
  numberFromText,
  parseNumber,
  replayFromText,
  requireBoolean,
  requireInteger,
  requireJson,
  requireReplayOf,
  requireText,
  requireUuid,
} from "./message-fields.js";
import { ATTRIBUTE_PREFIX, CONTENT_TYPE } from "./metadata.js";
import { readPayload, type PayloadParser } from "./payload.js";
import { decodeBase64 } from "./text.js";

/** Message formats of an endpoint: how it wants its deliveries. */
export const FORMATS = ["envelope", "thin", "raw", "cloudevents", "cloudevents-binary"] as const;
/** Message format of an endpoint. */
export type FormatName = (typeof FORMATS)[number];

/** Content type of JSON payloads, which no other payload can have. */
const JSON_TYPE = "application/json";

/**
 * One delivery.
 *
 * Sequence numbers are `bigint`, because they go up to 2^63-1; `JSON.stringify` does not accept them.
 */
export interface Message {
  /** The idempotency key: the same for every attempt of this delivery. */
  readonly deliveryId: string;
  readonly eventId: string;
  readonly type: string;
  /** Time of publication, RFC 3339. */
  readonly timestamp: string;
  readonly tenant: string | null;
  readonly key: string | null;
  readonly lane: string;
  /** Its number in the lane: 1, 2, 3 … */
  readonly sequence: bigint;
  /** The last number before it that was not dead-lettered; 0: none. */
  readonly previousSequence: bigint;
  /** Lane and number of the dead letter that this delivery replays. */
  readonly replayOf: { readonly lane: string; readonly sequence: bigint } | null;
  /** Id of the backfill that sends the event again; null for the first delivery. */
  readonly backfill: bigint | null;
  /** This is the last delivery of its lane. */
  readonly laneEnds: boolean;
  /** From the header X-Attempt, which is not signed: for information only. */
  readonly attempt: number | null;
  /**
   * The payload: parsed JSON, or bytes (`Uint8Array`) if there is a content type. Null also for a thin message.
   *
   * It is parsed when it is read. No number is rounded: one that JavaScript cannot hold throws `UnreadablePayload`,
   * unless the option `parse` reads it.
   */
  readonly data: unknown;
  /** The JSON text of the payload as it was sent; null: there is no JSON payload. */
  readonly dataText: string | null;
  readonly format: FormatName;
  /** Of a payload that is not JSON; null: it is JSON. */
  readonly contentType: string | null;
}

/** Whether the body is a relay's delivery or batch, regardless of the headers. */
export function isDelivery(body: Uint8Array): boolean {
  try {
    const text = decodeUtf8(body);
    if (!text.includes('"previous_sequence"') && !text.includes('"previoussequence"')) {
      return false;
    }
    requireValidJson(text);
    return (arraySources(text) ?? [text]).every((element) => {
      const members = objectSources(element);
      return members !== null && NUMBERED.some((names) => names.every((name) => members.has(name)));
    });
  } catch {
    return false;
  }
}

const NUMBERED = [
  ["lane", "sequence", "previous_sequence"],
  ["lane", "lanesequence", "previoussequence"],
];

/**
 * Parse the deliveries of a request and check that headers and body agree.
 *
 * @param headers by lower-case name.
 * @param prefix begins the names of the headers that describe a delivery.
 * @param inHeaders the metadata is in the headers, whose signature was verified.
 * @param parse reads the JSON text of payloads.
 * @returns one message, or those of a batch in order.
 * @throws MessageError neither a delivery nor a batch, or headers and body differ.
 */
export function parseMessages(
  headers: ReadonlyMap<string, string>,
  body: Uint8Array,
  prefix: string,
  inHeaders: boolean,
  parse: PayloadParser | null = null,
): [Message, ...Message[]] {
  const read = new DeliveryHeaders(headers, prefix);
  const requestId = read.requestId();
  const attempt = read.attempt();
  if (inHeaders) {
    const format = headers.has(`${ATTRIBUTE_PREFIX}id`) ? "cloudevents-binary" : "raw";
    return [messageOf(read.envelope(body), requestId, attempt, format, parse)];
  }
  const text = requireJson(body);
  const elements = arraySources(text);
  if (elements !== null) {
    const messages = parseBatch(elements, attempt, parse);
    const last = messages.at(-1) ?? messages[0];
    read.requireMatch(messages[0], ["Last-Sequence", last.sequence.toString()]);
    return messages;
  }
  const members = objectSources(text);
  if (members === null) {
    throw new MessageError("the body is neither a JSON object nor an array of them");
  }
  const message = parseObject(members, requestId, attempt, parse);
  if (message.deliveryId !== requestId) {
    throw new MessageError('the body\'s "id" differs from the header webhook-id');
  }
  read.requireMatch(message, ["Event", message.type], ["Event-Id", message.eventId]);
  return [message];
}

function parseBatch(
  elements: readonly string[],
  attempt: number | null,
  parse: PayloadParser | null,
): [Message, ...Message[]] {
  const messages: Message[] = [];
  for (const source of elements) {
    const members = objectSources(source);
    if (members === null) {
      throw new MessageError("an element of the body's array is not an object");
    }
    const before = messages.at(-1);
    const deliveryId = memberOf(members.get("delivery") ?? "null");
    const message = parseObject(members, deliveryId, before ? null : attempt, parse);
    const follows =
      before === undefined ||
      (message.lane === before.lane &&
        message.sequence === before.sequence + 1n &&
        message.previousSequence === before.sequence);
    if (!follows) {
      throw new MessageError(`in the array, sequence ${message.sequence} cannot follow ${before.sequence}`);
    }
    messages.push(message);
  }
  const [first, ...more] = messages;
  if (first === undefined) {
    throw new MessageError("the body is an empty array");
  }
  return [first, ...more];
}

/** The members that all formats have, under their names in the envelope. */
interface Envelope {
  readonly fields: ReadonlyMap<string, JsonMember>;
  /** `bytes`: of a payload that is not JSON. */
  readonly payload: Pick<Message, "dataText" | "contentType"> & { readonly bytes: Uint8Array | null };
}

const TEXT_FIELDS = ["id", "type", "timestamp", "lane", "tenant", "key"];

function parseObject(
  members: ReadonlyMap<string, string>,
  deliveryId: JsonMember,
  attempt: number | null,
  parse: PayloadParser | null,
): Message {
  if (members.has("specversion")) {
    const id = memberOf(members.get("id") ?? "null");
    return messageOf(envelopeOfEvent(members), id, attempt, "cloudevents", parse);
  }
  const fields = new Map<string, JsonMember>();
  for (const name of [...TEXT_FIELDS, "sequence", "previous_sequence", "replay_of", "backfill", "lane_ends"]) {
    const source = members.get(name);
    if (source !== undefined) {
      fields.set(name, memberOf(source));
    }
  }
  const isThin = !members.has("data") && !members.has("data_base64");
  const payload = payloadOf(members, "content_type");
  return messageOf({ fields, payload }, deliveryId, attempt, isThin ? "thin" : "envelope", parse);
}

function messageOf(
  envelope: Envelope,
  deliveryId: JsonMember,
  attempt: number | null,
  format: FormatName,
  parse: PayloadParser | null,
): Message {
  const { fields } = envelope;
  const { bytes, dataText, contentType } = envelope.payload;
  let read: { readonly value: unknown } | null = null;
  const message: Message = {
    deliveryId: requireUuid(deliveryId, "the X-Delivery in the body"),
    eventId: requireText(fields, "id"),
    type: requireText(fields, "type"),
    timestamp: requireText(fields, "timestamp"),
    tenant: fields.has("tenant") ? requireText(fields, "tenant") : null,
    key: fields.has("key") ? requireText(fields, "key") : null,
    lane: requireText(fields, "lane"),
    sequence: requireInteger(fields, "sequence"),
    previousSequence: requireInteger(fields, "previous_sequence"),
    replayOf: requireReplayOf(fields.get("replay_of")),
    backfill: fields.has("backfill") ? requireInteger(fields, "backfill") : null,
    laneEnds: fields.has("lane_ends") ? requireBoolean(fields, "lane_ends") : false,
    attempt,
    format,
    get data() {
      read ??= { value: dataText === null ? bytes : readPayload(dataText, parse) };
      return read.value;
    },
    dataText,
    contentType,
  };
  if (message.previousSequence >= message.sequence) {
    throw new MessageError(`sequence ${message.sequence} cannot follow ${message.previousSequence}`);
  }
  return message;
}

/** A content type; an empty one is none. */
function requireContentType(fields: ReadonlyMap<string, JsonMember>, name: string): string {
  const contentType = requireText(fields, name);
  if (contentType === "") {
    throw new MessageError("the content type is empty");
  }
  return contentType;
}

/** The payload of an envelope or a CloudEvent, from its source texts. */
function payloadOf(members: ReadonlyMap<string, string>, typeName: string): Envelope["payload"] {
  const type = members.get(typeName);
  const base64 = members.get("data_base64");
  if (base64 === undefined) {
    // A thin message has the type alone. A CloudEvent with JSON has "application/json".
    const hasType = typeName === "content_type" && type !== undefined;
    const contentType = hasType ? requireContentType(new Map([[typeName, memberOf(type)]]), typeName) : null;
    return { bytes: null, dataText: members.get("data") ?? null, contentType };
  }
  const fields = new Map([
    [typeName, memberOf(type ?? "null")],
    ["data_base64", memberOf(base64)],
  ]);
  const contentType = requireContentType(fields, typeName);
  const bytes = decodeBase64(requireText(fields, "data_base64"));
  if (bytes === null) {
    throw new MessageError('the body\'s "data_base64" is not Base64');
  }
  return { bytes, dataText: null, contentType };
}

/** The envelope's members, from a CloudEvent of a relay. */
function envelopeOfEvent(members: ReadonlyMap<string, string>): Envelope {
  const event = new Map<string, JsonMember>();
  for (const [name, source] of members) {
    if (name !== "data" && name !== "data_base64") {
      event.set(name, memberOf(source));
    }
  }
  if (event.get("specversion") !== "1.0") {
    throw new MessageError('the body\'s "specversion" is not "1.0"');
  }
  const fields = new Map<string, JsonMember>([
    ["id", event.get("eventid") ?? null],
    ["type", event.get("type") ?? null],
    ["timestamp", event.get("time") ?? null],
    ["lane", event.get("lane") ?? null],
    ["sequence", numberFromText(event, "lanesequence")],
    ["previous_sequence", numberFromText(event, "previoussequence")],
  ]);
  for (const [name, plain, encoded] of [
    ["key", "subject", "encodedkey"],
    ["tenant", "tenant", "encodedtenant"],
  ] as const) {
    if (event.has(plain)) {
      fields.set(name, event.get(plain) ?? null);
    } else if (event.has(encoded)) {
      fields.set(name, decodePercent(requireText(event, encoded), encoded));
    }
  }
  if (event.has("replayof")) {
    fields.set("replay_of", replayFromText(requireText(event, "replayof")));
  }
  if (event.has("backfill")) {
    fields.set("backfill", numberFromText(event, "backfill"));
  }
  if (event.has("laneends")) {
    fields.set("lane_ends", event.get("laneends") ?? null);
  }
  return { fields, payload: payloadOf(members, "datacontenttype") };
}

/** The headers that describe a delivery, under the endpoint's prefix. */
class DeliveryHeaders {
  constructor(
    readonly headers: ReadonlyMap<string, string>,
    readonly prefix: string,
  ) {}

  requestId(): string {
    const name = `${this.prefix}Delivery`;
    const requestId = requireUuid(this.get("Delivery") ?? "", `the header ${name}`);
    if ((this.headers.get("webhook-id") ?? requestId) !== requestId) {
      // Only webhook-id is signed.
      throw new MessageError(`the headers ${name} and webhook-id differ`);
    }
    return requestId;
  }

  attempt(): number | null {
    const text = this.get("Attempt") ?? "";
    return /^[0-9]{1,9}$/.test(text) ? Number(text) : null;
  }

  requireMatch(first: Message, ...more: [string, string][]): void {
    for (const [name, value] of [
      ["Lane", first.lane],
      ["Sequence", first.sequence.toString()],
      ["Previous-Sequence", first.previousSequence.toString()],
      ...more,
    ] as [string, string][]) {
      if (this.get(name) !== value) {
        throw new MessageError(`the header ${this.prefix}${name} differs from the body`);
      }
    }
  }

  /** The envelope's members, from verified headers and the payload. */
  envelope(body: Uint8Array): Envelope {
    const fields = new Map<string, JsonMember>([
      ["id", this.get("Event-Id") ?? null],
      ["type", this.get("Event") ?? null],
      ["timestamp", this.get("Event-Time") ?? null],
      ["lane", this.get("Lane") ?? null],
      ["sequence", this.#number("Sequence")],
      ["previous_sequence", this.#number("Previous-Sequence")],
    ]);
    for (const [member, name] of [
      ["tenant", "Event-Tenant"],
      ["key", "Event-Key"],
    ] as const) {
      const text = this.get(name);
      if (text !== undefined) {
        fields.set(member, decodePercent(text, `the header ${this.prefix}${name}`));
      }
    }
    const replayed = this.get("Replay-Of");
    if (replayed !== undefined) {
      fields.set("replay_of", replayFromText(replayed));
    }
    if (this.get("Backfill") !== undefined) {
      fields.set("backfill", this.#number("Backfill"));
    }
    if (this.get("Lane-Ends") !== undefined) {
      fields.set("lane_ends", true);
    }
    return { fields, payload: this.#payload(body) };
  }

  get(name: string): string | undefined {
    return this.headers.get(`${this.prefix}${name}`.toLowerCase());
  }

  #number(name: string): bigint {
    return parseNumber(this.get(name) ?? "", `the header ${this.prefix}${name}`);
  }

  #payload(body: Uint8Array): Envelope["payload"] {
    const fields = new Map<string, JsonMember>([["content_type", this.headers.get(CONTENT_TYPE) ?? null]]);
    const contentType = requireContentType(fields, "content_type");
    if (contentType !== JSON_TYPE) {
      return { bytes: body, dataText: null, contentType };
    }
    return { bytes: null, dataText: requireJson(body), contentType: null };
  }
}
