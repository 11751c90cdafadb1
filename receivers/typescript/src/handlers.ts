/** Handlers of a receiver by event type, and how they are called. */

import { OutboxError, causesOf, isSystemError } from "./errors.js";
import { parsePattern } from "./pattern.js";
import type { Handler } from "./receiver-options.js";
import type { Logger } from "./reporting.js";

const UNHANDLED_TYPES_MAX = 1000;

/** A handler failed with an error of the system, of its own I/O: drivers throw the same errors for the database. */
export class HandlerFailed extends OutboxError {}

/** Registered handlers, each with a pattern of event types. */
export class HandlerRegistry<Tx> {
  readonly #handlers: { pattern: RegExp; handler: Handler<Tx> }[] = [];
  readonly #unhandledTypes = new Set<string>();
  readonly #log: Logger;

  constructor(log: Logger) {
    this.#log = log;
  }

  /** @throws UsageError the pattern is invalid. */
  add(pattern: string, handler: Handler<Tx>): void {
    this.#handlers.push({ pattern: parsePattern(pattern), handler });
  }

  /** Return the handlers of an event type, in registration order; logs each type without one once. */
  matching(type: string): Handler<Tx>[] {
    const handlers = this.#handlers.filter(({ pattern }) => pattern.test(type)).map(({ handler }) => handler);
    if (handlers.length === 0 && !this.#unhandledTypes.has(type) && this.#unhandledTypes.size < UNHANDLED_TYPES_MAX) {
      this.#unhandledTypes.add(type);
      this.#log.warn(`no handler for event type ${JSON.stringify(type)}: its events are recorded, not processed`);
    }
    return handlers;
  }
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
