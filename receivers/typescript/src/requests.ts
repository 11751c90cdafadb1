/**
 * Framework-independent requests and responses of a receiver.
 *
 * | status | cause | effect at the relay |
 * |---|---|---|
 * | 200 | processed, now or before | delivered |
 * | 400, 401 | headers and body disagree; no valid signature | dead letter |
 * | 405, 413 | not a POST; body too large | dead letter |
 * | 422 | refused by a handler, or sequence number used by another delivery | dead letter |
 * | 500 | a handler or the receiver failed | retried |
 * | 503 | overloaded, no database, or earlier deliveries missing | retried after Retry-After |
 * | 503, `X-Refused: timestamp` | a valid signature whose time is not tolerated | signed and sent again |
 */

import { Buffer } from "node:buffer";

import type { SignatureError } from "./errors.js";
import type { HeadersInput } from "./headers.js";
import { oneLine } from "./text.js";

/** Default limit of request bodies: 1 MiB, four times the largest payload that can be published by default. */
export const BODY_BYTES_MAX = 1024 * 1024;

/** An HTTP request to a receiver. */
export interface ReceiverRequest {
  readonly method: string;
  readonly headers: HeadersInput;
  /** The raw body, not parsed and serialized again. */
  readonly body: Uint8Array;
}

/**
 * Outcome of a request, for metrics.
 *
 * - `processed`;
 * - `duplicate`: processed before;
 * - `conflict`: its sequence number was used by another delivery;
 * - `rejected`: no valid signature, or headers and body disagree;
 * - `refused`: a handler threw `Refuse`;
 * - `failed`: a handler threw another error, or the receiver has an error;
 * - `put_off`: 503 with Retry-After.
 */
export type RequestOutcome =
  | "processed"
  | "duplicate"
  | "conflict"
  | "rejected"
  | "refused"
  | "failed"
  | "put_off";

/** The HTTP response to a request. */
export interface ReceiverResponse {
  readonly outcome: RequestOutcome;
  readonly status: number;
  /** One line for the sender's log; the body without its newline. */
  readonly text: string;
  /** The body: `text` and a newline. */
  readonly body: string;
  /** All headers, including Content-Type and Content-Length. */
  readonly headers: Readonly<Record<string, string>>;
}

/** Build a response; `headers` are those besides Content-Type and Content-Length. */
export function responseOf(
  outcome: RequestOutcome,
  status: number,
  reason: string,
  headers: Readonly<Record<string, string>> = {},
): ReceiverResponse {
  const text = oneLine(reason);
  const body = `${text}\n`;
  const length = Buffer.byteLength(body).toString();
  return {
    outcome,
    status,
    text,
    body,
    headers: { "Content-Type": "text/plain; charset=utf-8", "Content-Length": length, ...headers },
  };
}

/** Build a response for a request that is not a valid delivery. */
export function rejected(status: number, reason: string, headers: Readonly<Record<string, string>> = {}) {
  return responseOf("rejected", status, reason, headers);
}

/**
 * Build the 401 response, or 503 if the signature is valid and only its time is not tolerated. A forged request must
 * not get a status that makes its sender keep and repeat it.
 */
export function unverified(error: SignatureError): ReceiverResponse {
  return error.timestampRefused
    ? rejected(503, error.message, { "X-Refused": "timestamp" })
    : rejected(401, error.message);
}

/** Build a 503 response with Retry-After. */
export function putOff(reason: string, retryAfterS: number): ReceiverResponse {
  return responseOf("put_off", 503, reason, { "Retry-After": retryAfterS.toString() });
}

/** Build the 413 response. */
export function tooLarge(bytesMax: number): ReceiverResponse {
  return rejected(413, `the body is larger than ${bytesMax} bytes`);
}

/** Build the 405 response. */
export function notPost(): ReceiverResponse {
  return rejected(405, "send deliveries by POST", { Allow: "POST" });
}
