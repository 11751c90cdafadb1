/**
 * Adapter for `node:http`:
 *
 *     http.createServer(nodeListener(receiver)).listen(9000, "127.0.0.1");
 *
 * It receives deliveries at every path; call it for one path of your own server.
 */

import type { IncomingMessage, ServerResponse } from "node:http";

import type { HttpReceiver } from "../receiver-options.js";
import { notPost, type ReceiverResponse } from "../requests.js";
import { bodyLost, bodyWithin, rawHeaderPairs, readBody } from "./body.js";

/**
 * Make a request listener for `http.createServer`.
 *
 * @returns a listener; its promise resolves after the response, and never rejects.
 */
export function nodeListener(
  receiver: HttpReceiver,
): (request: IncomingMessage, response: ServerResponse) => Promise<void> {
  return async (request, response) => {
    const result = await receiveNode(receiver, request, {
      body: null,
      advice: "call the listener before anything that reads the request",
    });
    writeNodeResponse(response, result);
  };
}

/**
 * Read and process a request of Node.
 *
 * @param given `body`: the raw body, if it is known already. `advice`: what to change when the body was read before.
 */
export async function receiveNode(
  receiver: HttpReceiver,
  request: IncomingMessage,
  given: { body: Uint8Array | null; advice: string },
): Promise<ReceiverResponse> {
  if (request.method !== "POST") {
    return notPost();
  }
  if (given.body === null && (request.readableDidRead || request.readableEnded)) {
    return bodyLost(receiver.logger, given.advice);
  }
  const body =
    given.body ??
    (await bodyWithin(receiver.bodyBytesMax, request.headers["content-length"], () =>
      readBody(request, receiver.bodyBytesMax),
    ));
  if (!(body instanceof Uint8Array)) {
    return body;
  }
  return receiver.handle({ method: "POST", headers: rawHeaderPairs(request), body });
}

/** Write a response; does nothing if the client has disconnected. */
export function writeNodeResponse(response: ServerResponse, result: ReceiverResponse): void {
  if (!response.destroyed && !response.headersSent) {
    response.writeHead(result.status, { ...result.headers });
    response.end(result.body);
  }
}
