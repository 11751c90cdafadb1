/**
 * Adapter for Web requests: Hono, Next, Deno, Bun.
 *
 *     const receive = fetchHandler(receiver);
 *     export const POST = receive;                              // a route of Next
 *     app.post("/hooks", (context) => receive(context.req.raw)); // Hono
 *     Deno.serve(receive);
 *     Bun.serve({ fetch: receive });
 */

import { Buffer } from "node:buffer";

import type { HttpReceiver } from "../receiver-options.js";
import { notPost, type ReceiverResponse } from "../requests.js";
import { bodyLost, bodyWithin } from "./body.js";

/** Make a function from a Web request to its response. It never rejects. */
export function fetchHandler(receiver: HttpReceiver): (request: Request) => Promise<Response> {
  return async (request) => webResponse(await receive(receiver, request));
}

async function receive(receiver: HttpReceiver, request: Request): Promise<ReceiverResponse> {
  if (request.method !== "POST") {
    return notPost();
  }
  if (request.bodyUsed) {
    return bodyLost(receiver.logger, "pass the request to the handler before its json(), text() or body is read");
  }
  const body = await bodyWithin(receiver.bodyBytesMax, request.headers.get("Content-Length"), () =>
    readBody(request, receiver.bodyBytesMax),
  );
  if (!(body instanceof Uint8Array)) {
    return body;
  }
  const headers: [string, string][] = [];
  request.headers.forEach((value, name) => headers.push([name, value]));
  return receiver.handle({ method: "POST", headers, body });
}

/** Read the body. Null: it is larger than the limit; the rest is not read. */
async function readBody(request: Request, bytesMax: number): Promise<Uint8Array | null> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  const reader = (request.body as ReadableStream<Uint8Array> | null)?.getReader();
  while (reader !== undefined) {
    const { done, value } = await reader.read();
    if (done) {
      break;
    }
    size += value.length;
    if (size > bytesMax) {
      await reader.cancel().catch(() => undefined);
      return null;
    }
    chunks.push(value);
  }
  return Buffer.concat(chunks);
}

function webResponse(response: ReceiverResponse): Response {
  // Hop-by-hop and framing headers belong to the server.
  const { Connection: _, "Content-Length": __, ...headers } = response.headers;
  return new Response(response.body, { status: response.status, headers });
}
