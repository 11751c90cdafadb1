/** Handlers of a receiver by event type, and how they are called. */

import { OutboxError, UnhandledType, UsageError, causesOf, isSystemError } from "./errors.js";
import { parsePattern } from "./pattern.js";
import type { Handler, UnhandledPolicy } from "./receiver-options.js";
import { oneLine } from "./text.js";

/** A handler failed with an error of the system, of its own I/O: drivers throw the same errors for the database. */
export class HandlerFailed extends OutboxError {}

/** Parameters of a handler, as examples name them. */
const DELIVERY_PARAMETERS = ["message", "tx"];
const FOREIGN_PARAMETERS = ["verified", "body", "tx"];

/** Registered handlers, each with a pattern of event types. */
export class HandlerRegistry<Tx> {
  readonly #handlers: { pattern: string; types: RegExp; handler: Handler<Tx> }[] = [];
  readonly #unhandled: UnhandledPolicy;

  /** @throws UsageError there is no such policy. */
  constructor(unhandled: UnhandledPolicy) {
    if (!["refuse", "ignore"].includes(unhandled)) {
      throw new UsageError(`unhandled: must be refuse or ignore, not ${JSON.stringify(unhandled)}`);
    }
    this.#unhandled = unhandled;
  }

  /** @throws UsageError the pattern is invalid, or the handler cannot be called. */
  add(pattern: string, handler: Handler<Tx>): void {
    if (typeof pattern !== "string") {
      throw new UsageError('on: needs a pattern of event types, as in receiver.on("order.paid", handler)');
    }
    requireHandler(handler, DELIVERY_PARAMETERS);
    this.#handlers.push({ pattern, types: parsePattern(pattern), handler });
  }

  /**
   * Return the handlers of an event type, in registration order.
   *
   * @throws UnhandledType there is none, and such events are refused.
   */
  matching(type: string): Handler<Tx>[] {
    const handlers = this.#handlers.filter(({ types }) => types.test(type)).map(({ handler }) => handler);
    if (handlers.length === 0 && this.#unhandled === "refuse") {
      const known = this.#handlers.map(({ pattern, handler }) => `${pattern} (${nameOf(handler)})`).join(", ");
      throw new UnhandledType(
        oneLine(
          `no handler for the event type ${type}; the receiver has ${known || "none"}: ` +
            'add one, subscribe the endpoint by --type, or set unhandled: "ignore"',
        ),
      );
    }
    return handlers;
  }
}

/** Check a handler of requests of other senders. */
export function requireForeignHandler(handler: unknown): void {
  requireHandler(handler, FOREIGN_PARAMETERS);
}

/** @throws UsageError it is no function, or needs other arguments than it is called with. */
function requireHandler(handler: unknown, parameters: readonly string[]): void {
  if (typeof handler !== "function") {
    throw new UsageError(`the handler is no function, but ${handler === null ? "null" : typeof handler}`);
  }
  if (/^(Async)?GeneratorFunction$/.test(handler.constructor.name)) {
    throw new UsageError(`the handler ${nameOf(handler)} is a generator: calling it would do nothing`);
  }
  if (handler.length > parameters.length) {
    throw new UsageError(
      `the handler ${nameOf(handler)} takes ${handler.length} arguments; it is called with (${parameters.join(", ")})`,
    );
  }
}

function nameOf(handler: { readonly name: string }): string {
  return handler.name || "a function";
}

/** Call a handler; a system error becomes HandlerFailed, also as the cause of another one, as `fetch` throws it. */
export async function callHandler(call: () => void | Promise<void>): Promise<void> {
  try {
    await call();
  } catch (error) {
    if (causesOf(error).some(isSystemError)) {
      throw new HandlerFailed("the handler's own I/O failed", { cause: error });
    }
    throw error;
  }
}
