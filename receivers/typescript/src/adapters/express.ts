/**
 * Adapter for Express 4 and 5:
 *
 *     app.post("/hooks", expressHandler(receiver));
 *     app.use(express.json());
 *
 * The signature covers the raw body. Mount the handler before parsers such as `express.json()`, or keep the raw body
 * for it: `express.json({ limit: "1mb", verify: keepRawBody })`. Without `limit`, Express rejects bodies above 100 kB.
 */

import type { IncomingMessage, ServerResponse } from "node:http";

import type { HttpReceiver } from "../receiver-options.js";
import { receiveNode, writeNodeResponse } from "./node.js";

const ADVICE =
  "mount expressHandler() before express.json() and other body parsers, " +
  'or use express.json({ limit: "1mb", verify: keepRawBody })';

/** A request of Express, as far as the adapter uses it. */
export interface ExpressRequest extends IncomingMessage {
  body?: unknown;
  rawBody?: unknown;
}

/**
 * Make a request handler for a route of Express.
 *
 * If a parser has read the body and did not keep it, the response is 500 and a line is logged.
 */
export function expressHandler(
  receiver: HttpReceiver,
): (request: ExpressRequest, response: ServerResponse) => Promise<void> {
  return async (request, response) => {
    const raw = [request.rawBody, request.body].find((each) => each instanceof Uint8Array);
    const result = await receiveNode(receiver, request, { body: raw ?? null, advice: ADVICE });
    writeNodeResponse(response, result);
  };
}

/** Option `verify` of the body parsers of Express: keeps the raw body for `expressHandler`. */
export function keepRawBody(request: IncomingMessage, _response: ServerResponse, body: Uint8Array): void {
  (request as ExpressRequest).rawBody = body;
}
