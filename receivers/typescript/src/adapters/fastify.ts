/**
 * Adapter for Fastify 4 and 5:
 *
 *     await app.register(fastifyReceiver(receiver), { prefix: "/hooks" });
 *
 * The plugin has a content type parser of its own, which leaves the raw body to the receiver. It is encapsulated: other
 * routes keep their parsers.
 */

import { Readable } from "node:stream";

import type { FastifyPluginAsync, FastifyReply } from "fastify";

import type { HttpReceiver } from "../receiver-options.js";
import { notPost, type ReceiverResponse } from "../requests.js";
import { bodyWithin, rawHeaderPairs, readBody } from "./body.js";

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
      const stream = request.body instanceof Readable ? request.body : Readable.from([]);
      const body = await bodyWithin(receiver.bodyBytesMax, request.headers["content-length"], () =>
        readBody(stream, receiver.bodyBytesMax),
      );
      if (!(body instanceof Uint8Array)) {
        return send(reply, body);
      }
      return send(reply, await receiver.handle({ method: "POST", headers: rawHeaderPairs(request.raw), body }));
    });
  };
}

function send(reply: FastifyReply, response: ReceiverResponse): FastifyReply {
  return reply.code(response.status).headers(response.headers).send(response.body);
}
