/** Test program: a receiver behind one of the adapters, configured by environment variables. */

import { Buffer } from "node:buffer";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { Readable } from "node:stream";

import express from "express";
import fastify from "fastify";
import {
  FetchClient,
  MemoryStore,
  Receiver,
  type FormatName,
  type HttpReceiver,
  type Message,
  type ReceiverOptions,
} from "outbox-receiver";
import { expressHandler } from "outbox-receiver/express";
import { fastifyReceiver } from "outbox-receiver/fastify";
import { fetchHandler } from "outbox-receiver/fetch";
import { nodeListener } from "outbox-receiver/node";
import { PgStore } from "outbox-receiver/pg";
import pg from "pg";

/** What the server does besides receiving. */
interface Application {
  readonly receiver: HttpReceiver & Pick<Receiver<unknown>, "catchUp">;
  processed(): Promise<string[]>;
  close(): Promise<void>;
}

interface Reply {
  readonly status: number;
  readonly type: string;
  readonly body: string;
}

const { env } = process;
const application = createApplication();
const [host, port] = splitAddress(env["OUTBOX_LISTEN"] ?? "127.0.0.1:0");
const server = await listen(env["OUTBOX_ADAPTER"] ?? "node");
process.stdout.write(`listening on http://${host}:${(server.address() as AddressInfo).port}/\n`);
for (const signal of ["SIGTERM", "SIGINT"] as const) {
  process.once(signal, () => {
    server.close();
    server.closeAllConnections();
    void application.close().finally(() => process.exit(0));
  });
}

function createApplication(): Application {
  const secrets = list(env["OUTBOX_SECRET"]) ?? [];
  const formats = list(env["OUTBOX_FORMATS"]) as FormatName[] | null;
  const url = env["OUTBOX_FETCH_URL"];
  const options: ReceiverOptions = {
    formats,
    headerPrefix: list(env["OUTBOX_HEADER_PREFIX"]) ?? "X-",
    fetch: url ? new FetchClient(url, env["OUTBOX_FETCH_TOKEN"] ?? "") : null,
  };
  const dsn = env["DATABASE_URL"];
  if (!dsn) {
    const processed: string[] = [];
    const receiver = new Receiver(secrets, new MemoryStore(), options).on("**", (message) => {
      processed.push(message.eventId);
    });
    return { receiver, processed: async () => processed, close: async () => undefined };
  }
  const pool = new pg.Pool({ connectionString: dsn, max: 10, connectionTimeoutMillis: 5000 });
  pool.on("error", (error) => console.error("an idle connection was lost:", error.message));
  const receiver = new Receiver(secrets, new PgStore(pool), options).on("**", async (message, client) => {
    await client.query("INSERT INTO effect (event_id, type, key, data) VALUES ($1, $2, $3, $4)", [
      message.eventId,
      message.type,
      message.key,
      payloadText(message),
    ]);
  });
  return {
    receiver,
    processed: async () => {
      const { rows } = await pool.query<{ event_id: string }>("SELECT event_id FROM effect ORDER BY id");
      return rows.map((row) => row.event_id);
    },
    close: () => pool.end(),
  };
}

function payloadText({ data, dataText }: Message): string | null {
  return data instanceof Uint8Array ? Buffer.from(data).toString("base64") : dataText;
}

async function processedReply(): Promise<Reply> {
  return { status: 200, type: "application/json", body: JSON.stringify(await application.processed()) };
}

async function catchUpReply(): Promise<Reply> {
  try {
    const results = await application.receiver.catchUp();
    const processed = results.reduce((count, { fetched }) => count + fetched, 0);
    return { status: 200, type: "application/json", body: JSON.stringify({ processed }) };
  } catch (error) {
    return { status: 502, type: "text/plain", body: `${error instanceof Error ? error.message : "failed"}\n` };
  }
}

/** The reply to a request that is not a delivery; null: it is one. */
async function otherReply(method: string, path: string): Promise<Reply | null> {
  switch (`${method} ${path}`) {
    case "GET /processed":
      return processedReply();
    case "POST /catch-up":
      return catchUpReply();
    default:
      return path === "/" ? null : { status: 404, type: "text/plain", body: "not found\n" };
  }
}

async function listen(adapter: string): Promise<Server> {
  switch (adapter) {
    case "node":
      return listenWith(createServer(withOthers(nodeListener(application.receiver))));
    case "fetch":
      return listenWith(createServer(withOthers(webListener(fetchHandler(application.receiver)))));
    case "express": {
      const app = express();
      app.all("/", expressHandler(application.receiver));
      app.use(express.json());
      app.get("/processed", async (_request, response) => sendExpress(response, await processedReply()));
      app.post("/catch-up", async (_request, response) => sendExpress(response, await catchUpReply()));
      return listenWith(createServer(app));
    }
    case "fastify": {
      const app = fastify();
      await app.register(fastifyReceiver(application.receiver));
      app.get("/processed", async (_request, reply) => {
        const { status, type, body } = await processedReply();
        return reply.code(status).type(type).send(body);
      });
      app.post("/catch-up", async (_request, reply) => {
        const { status, type, body } = await catchUpReply();
        return reply.code(status).type(type).send(body);
      });
      await app.listen({ host, port });
      return app.server;
    }
    default:
      throw new Error(`OUTBOX_ADAPTER: unknown adapter ${adapter}`);
  }
}

type Listener = (request: IncomingMessage, response: ServerResponse) => Promise<void>;

function withOthers(receive: Listener): Listener {
  return async (request, response) => {
    const reply = await otherReply(request.method ?? "", (request.url ?? "/").split("?")[0] ?? "/");
    if (reply === null) {
      return receive(request, response);
    }
    response.writeHead(reply.status, { "Content-Type": reply.type }).end(reply.body);
    return undefined;
  };
}

function sendExpress(response: express.Response, { status, type, body }: Reply): void {
  response.status(status).type(type).send(body);
}

/** Serve a function from Web request to Web response with `node:http`. */
function webListener(handle: (request: Request) => Promise<Response>): Listener {
  return async (request, response) => {
    const headers = new Headers();
    for (let i = 0; i + 1 < request.rawHeaders.length; i += 2) {
      headers.append(request.rawHeaders[i] ?? "", request.rawHeaders[i + 1] ?? "");
    }
    const method = request.method ?? "GET";
    const hasBody = method !== "GET" && method !== "HEAD";
    const init = { method, headers, ...(hasBody ? { body: Readable.toWeb(request), duplex: "half" } : {}) };
    const result = await handle(new Request(`http://${host}/`, init as unknown as RequestInit));
    response.writeHead(result.status, Object.fromEntries(result.headers));
    response.end(Buffer.from(await result.arrayBuffer()));
  };
}

async function listenWith(created: Server): Promise<Server> {
  await new Promise<void>((resolve, reject) => {
    created.once("error", reject);
    created.listen(port, host, resolve);
  });
  return created;
}

function list(text: string | undefined): string[] | null {
  const items = (text ?? "").split(",").map((each) => each.trim());
  return items.some(Boolean) ? items.filter(Boolean) : null;
}

function splitAddress(address: string): [string, number] {
  const colon = address.lastIndexOf(":");
  return [address.slice(0, colon), Number(address.slice(colon + 1))];
}
