/** Reading the raw body of a request of Node within the limit of a receiver. */

import { Buffer } from "node:buffer";
import type { IncomingMessage } from "node:http";
import type { Readable } from "node:stream";

import { rejected, responseOf, tooLarge, type ReceiverResponse } from "../requests.js";
import type { Logger } from "../reporting.js";

/** Read a stream to its end. Null: it is larger than the limit; the rest is not read. */
export async function readBody(stream: Readable, bytesMax: number): Promise<Uint8Array | null> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of stream.iterator({ destroyOnReturn: false }) as AsyncIterable<Uint8Array | string>) {
    const bytes = typeof chunk === "string" ? Buffer.from(chunk) : chunk;
    size += bytes.length;
    if (size > bytesMax) {
      return null;
    }
    chunks.push(bytes);
  }
  return Buffer.concat(chunks);
}

/**
 * Read the body of a request within a limit.
 *
 * @param contentLength the header.
 * @param read reads the body. Null: it is larger than the limit.
 * @returns the body, or the response to one that is too large or ends early.
 */
export async function bodyWithin(
  bytesMax: number,
  contentLength: string | null | undefined,
  read: () => Promise<Uint8Array | null>,
): Promise<Uint8Array | ReceiverResponse> {
  if (announcesTooMuch(contentLength, bytesMax)) {
    return tooLargeAndClose(bytesMax);
  }
  try {
    return (await read()) ?? tooLargeAndClose(bytesMax);
  } catch {
    return rejected(400, "the body of the request is incomplete");
  }
}

/** Whether the header Content-Length announces more than the limit. */
function announcesTooMuch(contentLength: string | null | undefined, bytesMax: number): boolean {
  return /^[0-9]+$/.test(contentLength ?? "") && Number(contentLength) > bytesMax;
}

/** Header lines as pairs, which show repeated headers; `request.headers` joins or drops them. */
export function rawHeaderPairs(request: IncomingMessage): [string, string][] {
  const { rawHeaders } = request;
  const pairs: [string, string][] = [];
  for (let i = 0; i + 1 < rawHeaders.length; i += 2) {
    pairs.push([rawHeaders[i] ?? "", rawHeaders[i + 1] ?? ""]);
  }
  return pairs;
}

/** The 413 response. It closes the connection, because the rest of the body is not read. */
function tooLargeAndClose(bytesMax: number): ReceiverResponse {
  const response = tooLarge(bytesMax);
  return { ...response, headers: { ...response.headers, Connection: "close" } };
}

/** Log that something before the adapter has read the body, and build the 500 response. */
export function bodyLost(logger: Logger, advice: string): ReceiverResponse {
  logger.error(`the raw body was read before the receiver, so its signature cannot be verified: ${advice}`);
  return responseOf("failed", 500, "the receiver failed");
}
