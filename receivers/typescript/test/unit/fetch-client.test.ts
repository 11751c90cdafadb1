import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { after, test } from "node:test";

import { FetchClient, FetchError, MemoryStore, Receiver, Refuse, UsageError, type InboxOptions, type Message } from "outbox-receiver";

import { SECRET, delivery, request, silentLogger, type Delivery } from "./sender.js";

const servers: Server[] = [];
after(() => servers.forEach((server) => (server.closeAllConnections(), server.close())));

async function serve(respond: (request: IncomingMessage, response: ServerResponse) => void): Promise<string> {
  const server = createServer(respond);
  servers.push(server);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}

/** A relay that has completed these numbers of `lane-1`; numbers below `keptFrom` are no longer retained. */
async function relay(deliveries: readonly Delivery[], keptFrom = 1, dead: readonly bigint[] = []): Promise<string> {
  return serve((given, response) => {
    const url = new URL(given.url ?? "", "http://relay");
    const acknowledged = deliveries.at(-1)?.sequence;
    if (given.headers.authorization !== "Bearer token") {
      response.writeHead(401).end('{"detail":"unknown token"}');
    } else if (url.pathname === "/v1/lanes") {
      const lane = `{"lane":"lane-1","generation":1,"acknowledged":${acknowledged}}`;
      response.end(`{"items":[${lane}],"next":null}`);
    } else {
      const from = Number(url.searchParams.get("after"));
      // Pages of two items.
      const rest = deliveries.filter((each) => Number(each.sequence) > from && Number(each.sequence) >= keptFrom);
      const items = rest.slice(0, 2).map((each) => {
        const { headers, body } = request(each);
        const content = `"headers":${JSON.stringify(headers)},"body":${JSON.stringify(body.toString())}`;
        const reason = dead.includes(each.sequence) ? ',"dead_lettered":"refused"' : "";
        return `{"sequence":${each.sequence},${content}${reason}}`;
      });
      const next = rest.length > 2 ? rest[1]?.sequence : null;
      response.end(`{"items":[${items}],"kept_from":${keptFrom},"acknowledged":${acknowledged},"next":${next}}`);
    }
  });
}

function receiverAt(
  url: string,
  options: { gaps?: "report" | "catch_up"; inbox?: InboxOptions; refuses?: bigint } = {},
) {
  const processed: bigint[] = [];
  const { refuses, ...others } = options;
  const receiver = new Receiver(SECRET, new MemoryStore(), {
    fetch: new FetchClient(url, "token"),
    logger: silentLogger(),
    ...others,
  }).on("**", ({ sequence }: Message) => {
    if (sequence === refuses) {
      throw new Refuse("never");
    }
    processed.push(sequence);
  });
  return { receiver, processed };
}

test("a request that meets the close of an idle connection is sent again, once", async () => {
  const seen: string[] = [];
  let closes = 1;
  const url = await serve((given, response) => {
    seen.push(given.url ?? "");
    if (seen.length > 1 && closes > 0) {
      closes -= 1;
      given.socket.destroy();
      return;
    }
    response.end('{"items":[],"next":null}');
  });
  const client = new FetchClient(url, "token");
  assert.deepEqual(await client.lanes(), []);
  assert.deepEqual(await client.lanes(), []);
  assert.equal(seen.length, 3);
  closes = 2;
  await assert.rejects(client.lanes(), FetchError);
  assert.equal(seen.length, 5);
});

test("missing deliveries and those after the highest are processed once and in order", async () => {
  const deliveries = [1, 2, 3, 4, 5, 6].map((n) => delivery(n));
  const { receiver, processed } = receiverAt(await relay(deliveries));
  await receiver.handle(request(deliveries[0] as Delivery));
  await receiver.handle(request(deliveries[3] as Delivery));
  const [result] = await receiver.catchUp();
  assert.deepEqual(processed, [1n, 4n, 2n, 3n, 5n, 6n]);
  assert.deepEqual([result?.fetched, result?.unavailable, result?.failed], [4, [], null]);
  assert.deepEqual(await receiver.catchUp(), []);
});

test("numbers that are no longer retained become unknown", async () => {
  const deliveries = [1, 2, 3, 4, 5].map((n) => delivery(n));
  const { receiver, processed } = receiverAt(await relay(deliveries, 4));
  await receiver.handle(request(deliveries[0] as Delivery));
  await receiver.handle(request(deliveries[4] as Delivery));
  const [result] = await receiver.catchUp();
  assert.deepEqual(result?.unavailable, [[2n, 3n]]);
  assert.deepEqual(processed, [1n, 5n, 4n]);
});

test("the end of a lane that is dead-lettered or refused is recorded once", async () => {
  const deliveries = [1, 2, 3, 4, 5, 6].map((n) => delivery(n));
  const { receiver, processed } = receiverAt(await relay(deliveries, 1, [4n, 5n]), { refuses: 6n });
  await receiver.handle(request(deliveries[0] as Delivery));
  const [result] = await receiver.catchUp();
  assert.deepEqual(processed, [1n, 2n, 3n]);
  assert.deepEqual([result?.fetched, result?.deadLettered, result?.unavailable], [2, 2, [[6n, 6n]]]);
  assert.deepEqual(await receiver.catchUp(), []);
});

test("a whole lane that was lost is fetched if the inbox is older than it", async () => {
  const deliveries = [1, 2].map((n) => delivery(n));
  const url = await relay(deliveries);
  assert.deepEqual(await receiverAt(url).receiver.catchUp(), []);
  const { receiver, processed } = receiverAt(url, { inbox: { fromStart: true } });
  await receiver.catchUp();
  assert.deepEqual(processed, [1n, 2n]);
});

test("the policy catch_up fetches missing deliveries first", async () => {
  const deliveries = [1, 2, 3, 4].map((n) => delivery(n));
  const { receiver, processed } = receiverAt(await relay(deliveries), { gaps: "catch_up" });
  await receiver.handle(request(deliveries[0] as Delivery));
  assert.equal((await receiver.handle(request(deliveries[2] as Delivery))).status, 200);
  assert.deepEqual(processed, [1n, 2n, 3n, 4n]);
});

test("a fetched delivery with a wrong signature is refused", async () => {
  const deliveries = [1, 2].map((n) => delivery(n));
  const url = await relay(deliveries);
  const receiver = new Receiver("whsec_YW5vdGhlciBzZWNyZXQgZm9yIHRlc3Rpbmc=", new MemoryStore(), {
    fetch: new FetchClient(url, "token"),
  });
  await assert.rejects(receiver.catchUp("lane-1"), FetchError);
});

test("redirects, slow and large responses, and other servers are errors without the token", async () => {
  const secret = "s3cr3t-token";
  const urls = [
    await serve((_request, response) => response.writeHead(302, { Location: "http://127.0.0.1:1/" }).end()),
    await serve(() => undefined),
    await serve((_request, response) => response.end(`"${"x".repeat(5000)}"`)),
    await serve((_request, response) => response.end("<html>")),
    await serve((_request, response) => response.writeHead(403).end('{"detail":"no access"}')),
    "http://127.0.0.1:1",
  ];
  for (const url of urls) {
    const client = new FetchClient(url, secret, { timeoutS: 0.2, responseBytesMax: 1000 });
    await assert.rejects(
      client.lanes(),
      (error) => error instanceof FetchError && !error.message.includes(secret),
      url,
    );
  }
  assert.throws(() => new FetchClient("ftp://relay", secret), UsageError);
  assert.throws(
    () => new FetchClient("http://relay", "s3\ncr3t"),
    (error) => error instanceof UsageError && !error.message.includes("cr3t"),
  );
});

test("a hold-off of the rate limit is obeyed", async () => {
  let requests = 0;
  const url = await serve((_request, response) => {
    requests++;
    if (requests === 1) {
      response.writeHead(429, { "Retry-After": "0" }).end();
    } else {
      response.end('{"items":[],"next":null}');
    }
  });
  assert.deepEqual(await new FetchClient(url, "token").lanes(), []);
  assert.equal(requests, 2);
});
