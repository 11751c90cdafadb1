/**
 * Signature verification of requests.
 *
 *     const verified = verify({ headers, body }, "whsec_…");
 *
 * It accepts every sender that signs according to Standard Webhooks 1.0. For deliveries of a relay it also parses the
 * body and compares the `X-` headers with it, because the signature does not cover them.
 */

import { MessageError, UsageError } from "./errors.js";
import { DEFAULT_PREFIX, foldHeaders, parsePrefixes, relayHeaders, type HeadersInput } from "./headers.js";
import { isDeliveryId } from "./message-fields.js";
import { FORMATS, isDelivery, parseMessages, type FormatName, type Message } from "./message.js";
import type { PayloadParser } from "./payload.js";
import { ATTRIBUTE_HEADERS, CONTENT_TYPE, METADATA_SIGNATURE_HEADER, signedMetadata } from "./metadata.js";
import {
  ID_HEADER,
  SIGNATURE_HEADER,
  TIMESTAMP_HEADER,
  TOLERANCE_S,
  parseKey,
  verifySignature,
  verifyTextSignature,
  type VerificationKey,
} from "./signature.js";

const SIGNED_HEADERS = [
  ID_HEADER,
  TIMESTAMP_HEADER,
  SIGNATURE_HEADER,
  METADATA_SIGNATURE_HEADER,
  CONTENT_TYPE,
  ...ATTRIBUTE_HEADERS,
];

/** A request with a valid signature. */
export interface Verified {
  /**
   * The header `webhook-id`: the idempotency key of the request. For a batch, use the `deliveryId` of each message
   * instead.
   */
  readonly messageId: string;
  /** Time of the signature in epoch seconds. */
  readonly timestamp: number;
  /** The delivery of a relay, or those of a batch; empty for requests of other senders. */
  readonly messages: readonly Message[];
}

/** Headers and raw body of a request. */
export interface SignedRequest {
  readonly headers: HeadersInput;
  /** The raw body, not parsed and serialized again. */
  readonly body: Uint8Array;
}

/** Options of `verify`, `Verifier` and `Receiver`. */
export interface VerifierOptions {
  /** Maximum difference between signature time and clock, in seconds; 300 by default. */
  readonly toleranceS?: number;
  /** Prefix of the endpoint's header names, if it is not `X-`; several while the endpoint's prefix is being changed. */
  readonly headerPrefix?: string | readonly string[];
  /**
   * The endpoint's format; several while it is being changed; any by default. An endpoint whose format is `raw` or
   * `cloudevents-binary` needs it: otherwise a payload that looks like an envelope is read as one when headers are
   * removed in transit.
   */
  readonly formats?: readonly FormatName[] | null;
  /**
   * Reads the JSON text of a payload when `message.data` is read. By default it is `JSON.parse`, except for numbers that
   * this would round: they throw `UnreadablePayload`. Give `JSON.parse` to have them rounded.
   */
  readonly parse?: PayloadParser | null;
  /** Returns epoch seconds; the system clock by default. */
  readonly clock?: () => number;
}

/** Verifies requests with a fixed set of keys. */
export class Verifier {
  /** Prefixes of the header names that describe a delivery. */
  readonly headerPrefixes: readonly string[];
  readonly #keys: readonly VerificationKey[];
  readonly #toleranceS: number;
  readonly #clock: () => number;
  readonly #formats: ReadonlySet<FormatName> | null;
  readonly #fetchedFormats: ReadonlySet<FormatName> | null;
  readonly #names: ReadonlySet<string>;
  readonly #parse: PayloadParser | null;

  /**
   * @param secrets one or more of `whsec_…` (HMAC secret, also without its prefix) and `whpk_…` (Ed25519 public key);
   *   both the old and the new one while a secret is being rotated.
   * @throws UsageError no secret, an invalid one, or another invalid option; the message never shows a secret.
   */
  constructor(secrets: string | readonly string[], options: VerifierOptions = {}) {
    this.#keys = (typeof secrets === "string" ? [secrets] : [...(secrets ?? [])]).map(parseOneKey);
    if (this.#keys.length === 0) {
      throw new UsageError("secret: at least one is required to verify signatures");
    }
    this.headerPrefixes = parsePrefixes(options.headerPrefix ?? DEFAULT_PREFIX);
    this.#toleranceS = options.toleranceS ?? TOLERANCE_S;
    this.#parse = options.parse ?? null;
    this.#clock = options.clock ?? (() => Date.now() / 1000);
    const formats = options.formats ?? null;
    requireFormats(formats);
    this.#formats = formats && new Set(formats);
    // What is fetched has the payload that a thin message leaves out.
    this.#fetchedFormats = formats && new Set(formats.map((name) => (name === "thin" ? "envelope" : name)));
    this.#names = new Set([...SIGNED_HEADERS, ...this.headerPrefixes.flatMap(relayHeaders)]);
  }

  /**
   * Verify one request.
   *
   * @param options `fetched`: the request was fetched from the relay, so a thin message has its payload.
   * @throws SignatureError no valid signature.
   * @throws MessageError signed, but headers and body differ.
   */
  verify(request: SignedRequest, options: { fetched?: boolean } = {}): Verified {
    const { body } = request;
    const headers = foldHeaders(request.headers, this.#names);
    const { messageId, timestamp } = verifySignature(headers, body, this.#keys, this.#clock(), this.#toleranceS);
    // Publishers cannot set the lane under any prefix, but other names of another prefix.
    const found =
      this.headerPrefixes.find((prefix) => headers.has(`${prefix.toLowerCase()}lane`)) ??
      this.headerPrefixes.find((prefix) => hasDeliveryHeader(headers, prefix));
    // Headers without a signature of their own can be removed: that must not turn a delivery into a request of another
    // sender.
    if (found !== undefined || isDelivery(body)) {
      const prefix = found ?? this.headerPrefixes[0] ?? DEFAULT_PREFIX;
      const metadataSignature = headers.get(METADATA_SIGNATURE_HEADER);
      if (metadataSignature !== undefined) {
        const signed = signedMetadata(headers, prefix.toLowerCase(), messageId, timestamp);
        verifyTextSignature(METADATA_SIGNATURE_HEADER, metadataSignature, signed, this.#keys);
      }
      const messages = parseMessages(headers, body, prefix, metadataSignature !== undefined, this.#parse);
      this.#requireFormat(messages[0].format, options.fetched ?? false);
      return { messageId, timestamp, messages };
    }
    if (isDeliveryId(messageId)) {
      throw new MessageError("the headers of the delivery are missing");
    }
    return { messageId, timestamp, messages: [] };
  }

  #requireFormat(format: FormatName, fetched: boolean): void {
    if (fetched && format === "thin") {
      throw new MessageError("what was fetched has no payload");
    }
    const accepted = fetched ? this.#fetchedFormats : this.#formats;
    if (accepted !== null && !accepted.has(format)) {
      throw new MessageError(`the format is ${format}, not ${[...accepted].sort().join(" or ")}`);
    }
  }
}

/**
 * Verify the signature of a request and parse its deliveries.
 *
 * @param request headers and raw body.
 * @param secrets as of `Verifier`.
 * @throws SignatureError no valid signature: respond 401, or 503 if only its time is refused.
 * @throws MessageError signed, but headers and body differ: respond 400.
 * @throws UsageError no secret, or an invalid one.
 */
export function verify(
  request: SignedRequest,
  secrets: string | readonly string[],
  options: VerifierOptions = {},
): Verified {
  return new Verifier(secrets, options).verify(request);
}

function parseOneKey(text: unknown): VerificationKey {
  if (typeof text !== "string") {
    throw new UsageError(`secret: must be a text or an array of texts, not ${typeof text}`);
  }
  if ((text.match(/whsec_|whpk_/g) ?? []).length > 1) {
    throw new UsageError('secret: one text has several; give an array, such as text.split(",")');
  }
  return parseKey(text.trim());
}

/** Whether a request has a header of a delivery. Other senders may number their attempts, too. */
function hasDeliveryHeader(headers: ReadonlyMap<string, string>, prefix: string): boolean {
  const others = ["attempt", "last-sequence"].map((name) => prefix.toLowerCase() + name);
  return relayHeaders(prefix).some((name) => headers.has(name) && !others.includes(name));
}

function requireFormats(formats: readonly string[] | null): void {
  if (formats !== null && formats.length === 0) {
    throw new UsageError("formats: at least one is required");
  }
  for (const each of formats ?? []) {
    if (!(FORMATS as readonly string[]).includes(each)) {
      throw new UsageError(`formats: there is no format ${JSON.stringify(each.slice(0, 100))}`);
    }
  }
}
