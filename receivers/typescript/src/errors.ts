/**
 * Errors of the package.
 *
 *     OutboxError
 *     ├── UsageError          a wrong argument or setting
 *     ├── SignatureError      no valid, recent signature: respond 401, or 503 if only the time is refused
 *     ├── MessageError        signed, but not a valid delivery: respond 400
 *     ├── Refuse              thrown by a handler: respond 422
 *     │   └── UnreadablePayload   thrown by `message.data`: JavaScript would round a number of the payload
 *     ├── Busy                thrown by a handler: respond 503 with Retry-After
 *     └── FetchError          the relay's listener for receivers cannot be reached or rejects a request
 *
 * No message contains a secret or a token.
 */

/** Base class of all errors that this package throws on purpose. */
export class OutboxError extends Error {
  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** An argument or setting is wrong; the message says which. */
export class UsageError extends OutboxError {}

/** Cause of a `SignatureError`. */
export type SignatureProblem =
  | "missing_header"
  | "repeated_header"
  | "malformed_header"
  | "timestamp_too_old"
  | "timestamp_too_new"
  | "mismatch";

/**
 * The request has no valid, recent signature. Respond 401, or 503 with `X-Refused: timestamp` if `timestampRefused`.
 */
export class SignatureError extends OutboxError {
  constructor(
    /** The cause, for metrics and tests. */
    readonly problem: SignatureProblem,
    message: string,
  ) {
    super(message);
  }

  /** The signature is valid and only its time is not tolerated: the sender signs each attempt anew. */
  get timestampRefused(): boolean {
    return this.problem === "timestamp_too_old" || this.problem === "timestamp_too_new";
  }
}

/** The request is signed, but is not a valid delivery, or headers and body differ. Respond 400. */
export class MessageError extends OutboxError {}

/**
 * Thrown by a handler when an event can never be processed.
 *
 * The response is 422 with the message as its reason. The sender makes the event a dead letter, which an operator can
 * inspect and replay.
 */
export class Refuse extends OutboxError {}

/** No handler has the type of an event; see the option `unhandled`. */
export class UnhandledType extends Refuse {}

/**
 * Thrown when `message.data` is read: the payload cannot be parsed without rounding a number. A handler that does not
 * catch it refuses the event.
 */
export class UnreadablePayload extends Refuse {}

/** Thrown by a handler to postpone a delivery: the response is 503 with Retry-After. */
export class Busy extends OutboxError {
  /** Hold-off in whole seconds. */
  readonly retryAfterS: number;

  /**
   * @param reason one line for the sender's log.
   * @param options `retryAfterS`: hold-off in whole seconds, 1 by default.
   */
  constructor(reason = "busy", options: { retryAfterS?: number } = {}) {
    super(reason);
    this.retryAfterS = Math.max(0, Math.ceil(options.retryAfterS ?? 1));
  }
}

/** An error and its causes, the outermost first. */
export function causesOf(error: unknown): Error[] {
  const causes: Error[] = [];
  for (let cause = error; cause instanceof Error && causes.length < CAUSES_MAX; cause = cause.cause) {
    causes.push(cause);
  }
  return causes;
}

/** An error can be its own cause. */
const CAUSES_MAX = 10;

/** Whether an error is one of the operating system, such as ECONNREFUSED. */
export function isSystemError(error: Error): boolean {
  // A host name with several addresses makes an AggregateError, which has the code of the last attempt.
  return "code" in error && ("syscall" in error || error instanceof AggregateError);
}

/** The relay's listener could not be reached, rejected the request, or sent an invalid response. */
export class FetchError extends OutboxError {}
