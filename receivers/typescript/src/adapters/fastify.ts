/**
 * Adapter for Fastify 4 and 5:
 *
 *     await app.register(fastifyReceiver(receiver), { prefix: "/hooks" });
 *
 * The plugin has a content type parser of its own, which leaves the raw body to the receiver. It is encapsulated: other
 * routes keep their parsers.
 */

import { Buffer } from "node:buffer";
import { Readable } from "node:stream";

import type { FastifyPluginAsync, FastifyReply } from "fastify";

import type { HttpReceiver } from "../receiver-options.js";
import { notPost, type ReceiverResponse } from "../requests.js";
import { announcesTooMuch, bodyAborted, rawHeaderPairs, readBody, tooLargeAndClose } from "./body.js";

/** Make a plugin that receives deliveries at `/` of its prefix. */
export function fastifyReceiver(receiver: HttpReceiver): FastifyPluginAsync {
  return async (instance) => {
    instance.removeAllContentTypeParsers();
    // The handler reads the stream, with the limit of the receiver.
    instance.addContentTypeParser("*", (_request, payload, done) => done(null, payload));
    instance.all("/", async (request, reply) => {
      if (request.method !== "POST") {
        return send(reply, notPost());
      }
      if (announcesTooMuch(request.headers["content-length"], receiver.bodyBytesMax)) {
        return send(reply, tooLargeAndClose(receiver.bodyBytesMax));
      }
      let body: Uint8Array | null = Buffer.alloc(0);
      if (request.body instanceof Readable) {
        try {
          body = await readBody(request.body, receiver.bodyBytesMax);
        } catch {
          return send(reply, bodyAborted());
        }
      }
      if (body === null) {
        return send(reply, tooLargeAndClose(receiver.bodyBytesMax));
      }
      return send(reply, await receiver.handle({ method: "POST", headers: rawHeaderPairs(request.raw), body }));
    });
  };
}

function send(reply: FastifyReply, response: ReceiverResponse): FastifyReply {
  return reply.code(response.status).headers(response.headers).send(response.body);
}
