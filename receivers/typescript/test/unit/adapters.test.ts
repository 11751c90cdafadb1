import assert from "node:assert/strict";
import { createServer, request as httpRequest, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { after, test } from "node:test";

import express from "express";
import fastify from "fastify";
import { MemoryStore, Receiver, type HttpReceiver } from "outbox-receiver";
import { expressHandler, keepRawBody } from "outbox-receiver/express";
import { fastifyReceiver } from "outbox-receiver/fastify";
import { fetchHandler } from "outbox-receiver/fetch";
import { nodeListener } from "outbox-receiver/node";

import { SECRET, delivery, request, silentLogger } from "./sender.js";

const servers: Server[] = [];
after(() => servers.forEach((server) => (server.closeAllConnections(), server.close())));

function newReceiver() {
  const logger = silentLogger();
  return { logger, receiver: new Receiver(SECRET, new MemoryStore(), { logger, bodyBytesMax: 2000 }).on("**", () => undefined) };
}

async function listen(server: Server): Promise<number> {
  servers.push(server);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return (server.address() as AddressInfo).port;
}

async function send(
  port: number,
  given: { method?: string; headers?: Record<string, string>; body?: Uint8Array; chunked?: boolean },
): Promise<[number | undefined, string]> {
  return new Promise((resolve, reject) => {
    const length = given.chunked || !given.body ? {} : { "Content-Length": given.body.length };
    const headers = { ...given.headers, ...length };
    const sent = httpRequest({ host: "127.0.0.1", port, method: given.method ?? "POST", headers }, (response) => {
      let text = "";
      response.on("data", (chunk) => (text += chunk)).on("end", () => resolve([response.statusCode, text]));
    });
    sent.on("error", reject);
    sent.end(given.body);
  });
}

const adapters: Record<string, (receiver: HttpReceiver) => Promise<number>> = {
  node: (receiver) => listen(createServer(nodeListener(receiver))),
  express: (receiver) => {
    const app = express();
    app.all("/", expressHandler(receiver));
    return listen(createServer(app));
  },
  "express after express.json() that keeps the raw body": (receiver) => {
    const app = express();
    app.use(express.json({ verify: keepRawBody, limit: "3kb" }));
    app.all("/", expressHandler(receiver));
    return listen(createServer(app));
  },
  fastify: async (receiver) => {
    const app = fastify({ bodyLimit: 10 });
    await app.register(fastifyReceiver(receiver));
    await app.listen({ host: "127.0.0.1", port: 0 });
    servers.push(app.server);
    return (app.server.address() as AddressInfo).port;
  },
};

for (const [name, start] of Object.entries(adapters)) {
  test(`${name}: deliveries are processed; other methods and large bodies are rejected`, async () => {
    const port = await start(newReceiver().receiver);
    assert.deepEqual(await send(port, request(delivery(1))), [200, "processed\n"]);
    assert.deepEqual(await send(port, { ...request(delivery(2)), chunked: true }), [200, "processed\n"]);
    assert.equal((await send(port, { method: "GET" }))[0], 405);
    const large = Buffer.from(JSON.stringify({ text: "x".repeat(2000) }));
    assert.equal((await send(port, { ...request(delivery(3)), body: large }))[0], 413);
    assert.equal((await send(port, {}))[0], 401);
    const raw = { ...request(delivery(4)), body: Buffer.from([0xff, 0xfe]) };
    raw.headers["Content-Type"] = "application/octet-stream";
    assert.equal((await send(port, raw))[0], 401);
  });
}

test("a body that arrives in chunks is limited", async () => {
  for (const name of ["node", "express", "fastify"]) {
    const port = (await adapters[name]?.(newReceiver().receiver)) ?? 0;
    const large = { ...request(delivery(1)), body: Buffer.alloc(3000), chunked: true };
    assert.equal((await send(port, large))[0], 413, name);
  }
});

test("Express: a raw body that a parser has read is an error, and the log says what to do", async () => {
  const { receiver, logger } = newReceiver();
  const app = express();
  app.use(express.json());
  app.post("/", expressHandler(receiver));
  const port = await listen(createServer(app));
  assert.deepEqual(await send(port, request(delivery(1))), [500, "the receiver failed\n"]);
  assert.equal(logger.lines.length, 1);
  assert.match(logger.lines[0] ?? "", /mount expressHandler\(\) before express\.json\(\)/);
});

test("Fastify: other routes keep their parsers", async () => {
  const app = fastify();
  await app.register(fastifyReceiver(newReceiver().receiver), { prefix: "/hooks" });
  app.post("/other", async (given) => given.body);
  const response = await app.inject({ method: "POST", url: "/other", payload: { a: 1 } });
  assert.deepEqual(response.json(), { a: 1 });
  await app.close();
});

test("fetch: a Web request is processed; large and used bodies are not", async () => {
  const { receiver, logger } = newReceiver();
  const handle = fetchHandler(receiver);
  const web = ({ headers, body }: ReturnType<typeof request>) => new Request("http://hooks/", { method: "POST", headers, body });
  const response = await handle(web(request(delivery(1))));
  assert.deepEqual([response.status, await response.text()], [200, "processed\n"]);
  assert.equal((await handle(new Request("http://hooks/"))).status, 405);
  assert.equal((await handle(web({ ...request(delivery(2)), body: Buffer.alloc(2001) }))).status, 413);
  const used = web(request(delivery(3)));
  await used.text();
  assert.equal((await handle(used)).status, 500);
  assert.match(logger.lines.at(-1) ?? "", /before its json\(\)/);
});
