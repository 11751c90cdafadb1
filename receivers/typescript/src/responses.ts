/** Responses to processed deliveries, and to errors. */

import { Busy, Refuse } from "./errors.js";
import type { DeliveryResult } from "./inbox/process.js";
import type { DatabaseCondition } from "./inbox/store.js";
import type { Message } from "./message.js";
import type { Logger } from "./reporting.js";
import { putOff, responseOf, type ReceiverResponse } from "./requests.js";

/** Retry-After while the database is unavailable, and while it is busy. */
export const [UNAVAILABLE_S, BUSY_S] = [5, 1];

/** The response to one committed delivery; without a message it is a request of another sender. */
export function responseTo(result: DeliveryResult, message?: Message): ReceiverResponse {
  if (result.outcome === "conflict" && message !== undefined) {
    // Not 409: receivers use it for a duplicate that they already have.
    return responseOf("conflict", 422, `sequence ${message.sequence} of ${message.lane} was used by another delivery`);
  }
  return result.outcome === "fresh"
    ? responseOf("processed", 200, "processed")
    : responseOf("duplicate", 200, "processed before");
}

/**
 * The response to a batch that stopped at one of its messages: with X-Accepted-Through if messages before it were
 * committed.
 */
export function partialResponse(
  messages: readonly Message[],
  at: number,
  response: ReceiverResponse,
): ReceiverResponse {
  const before = messages[at - 1];
  if (before === undefined) {
    return response;
  }
  return { ...response, headers: { ...response.headers, "X-Accepted-Through": before.sequence.toString() } };
}

/**
 * Log the error of a rolled-back request and return its response, which never has the message of an unexpected error.
 *
 * @param condition the condition of the database that the error reports.
 * @param messageId of the request or the delivery, for the log.
 */
export function responseToError(
  error: unknown,
  condition: DatabaseCondition | null,
  messageId: string,
  log: Logger,
): ReceiverResponse {
  if (error instanceof Refuse) {
    return responseOf("refused", 422, error.message);
  }
  if (error instanceof Busy) {
    return putOff(error.message, error.retryAfterS);
  }
  if (condition === "unavailable") {
    log.error("the database is not available", error);
    return putOff("the receiver's database is not available", UNAVAILABLE_S);
  }
  if (condition === "busy") {
    log.warn(`the database is busy: ${messageId} is postponed`, error);
    return putOff("the receiver's database is busy", BUSY_S);
  }
  log.error(`delivery ${messageId} was not processed`, error);
  return responseOf("failed", 500, "the receiver failed");
}
