/** Tests with PostgreSQL; `DATABASE_URL` names an empty database in which the role may create schemas. */

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Receiver, type Handler } from "outbox-receiver";
import { PgStore } from "outbox-receiver/pg";
import pg from "pg";

import { SECRET, batch, delivery, request, silentLogger, type Delivery } from "./sender.js";

const dsn = process.env["DATABASE_URL"];
const skip = dsn ? false : "DATABASE_URL is not set";
const pool = new pg.Pool({ connectionString: dsn ?? "postgresql://localhost", max: 10 });
let schemas = 0;

before(async () => {
  if (dsn) {
    await pool.query("CREATE TABLE IF NOT EXISTS effect (event_id text)");
  }
});
after(() => pool.end());

async function receiverWith(handler: Handler<pg.PoolClient>) {
  const schema = `test_${process.pid}_${++schemas}`;
  await pool.query(`CREATE SCHEMA ${schema}`);
  const store = new PgStore(pool, { prefix: `${schema}.hooks` });
  const receiver = new Receiver(SECRET, store, { logger: silentLogger(), logRequests: true }).on("**", handler);
  return { receiver, schema, store };
}

const insert: Handler<pg.PoolClient> = async (message, client) => {
  await client.query("INSERT INTO effect (event_id) VALUES ($1)", [message.eventId]);
};

async function effects(each: Delivery): Promise<number> {
  const { rows } = await pool.query("SELECT 1 FROM effect WHERE event_id = $1", [each.eventId]);
  return rows.length;
}

test("copies at several receivers are processed once", { skip }, async () => {
  const { receiver, schema } = await receiverWith(insert);
  const other = new Receiver(SECRET, new PgStore(pool, { prefix: `${schema}.hooks` })).on("**", insert);
  for (const sequence of [1, 2, 4]) {
    const each = delivery(sequence);
    const given = request(each);
    const responses = await Promise.all([receiver, other, receiver, other].map((to) => to.handle(given)));
    assert.deepEqual(responses.map(({ status }) => status), [200, 200, 200, 200]);
    assert.equal(await effects(each), 1);
  }
  const { rows } = await pool.query(`SELECT high, missing, holes FROM ${schema}.hooks_lane`);
  assert.deepEqual(rows, [{ high: "4", missing: [[3, 3]], holes: [] }]);
  const logged = await pool.query(`SELECT DISTINCT outcome FROM ${schema}.hooks_request ORDER BY outcome`);
  assert.deepEqual(logged.rows.map(({ outcome }) => outcome as string), ["duplicate", "processed"]);
});

test("numbers up to 2^63-1 are stored exactly", { skip }, async () => {
  const { receiver, schema } = await receiverWith(insert);
  const last = 2n ** 63n - 1n;
  await receiver.handle(request(delivery(last - 9n)));
  await receiver.handle(request(delivery(last)));
  const { rows } = await pool.query(`SELECT high, missing::text AS missing FROM ${schema}.hooks_lane`);
  assert.deepEqual(rows, [{ high: `${last}`, missing: `[[${last - 8n}, ${last - 1n}]]` }]);
  assert.equal((await receiver.handle(request(delivery(last - 3n)))).text, "processed");
});

test("an error of a handler rolls back the delivery and its effect", { skip }, async () => {
  let fails = true;
  const { receiver } = await receiverWith(async (message, client) => {
    await insert(message, client);
    if (fails) {
      throw new Error("broken");
    }
  });
  const each = delivery(1);
  assert.equal((await receiver.handle(request(each))).status, 500);
  assert.equal(await effects(each), 0);
  fails = false;
  assert.equal((await receiver.handle(request(each))).text, "processed");
  assert.equal(await effects(each), 1);
});

test("a rollback that a handler hides is detected", { skip }, async () => {
  for (const hide of ["ROLLBACK", "SELECT 1/0", "ROLLBACK; BEGIN"]) {
    const { receiver } = await receiverWith(async (message, client) => {
      await insert(message, client);
      await client.query(hide).catch(() => undefined);
    });
    const each = delivery(1);
    assert.equal((await receiver.handle(request(each))).status, 500, hide);
    assert.equal(await effects(each), 0);
    assert.equal((await receiver.handle(batch([delivery(1), delivery(2)]))).status, 500, hide);
  }
});

test("a connection that is lost, and a lock that is not granted, are postponed", { skip }, async () => {
  const { receiver } = await receiverWith(async (_message, client) => {
    await client.query("SELECT pg_terminate_backend(pg_backend_pid())");
  });
  const lost = await receiver.handle(request(delivery(1)));
  assert.deepEqual([lost.status, lost.headers["Retry-After"]], [503, "5"]);
  const busy = await receiverWith(async (_message, client) => {
    await client.query("SET LOCAL statement_timeout = '50ms'");
    await client.query("SELECT pg_sleep(5)");
  });
  const response = await busy.receiver.handle(request(delivery(1)));
  assert.deepEqual([response.status, response.headers["Retry-After"]], [503, "1"]);
  const nowhere = new pg.Pool({ connectionString: "postgresql://postgres@127.0.0.1:1/postgres" });
  const down = new Receiver(SECRET, new PgStore(nowhere), { logger: silentLogger() });
  assert.equal((await down.handle(request(delivery(1)))).status, 503);
  await nowhere.end();
});

test("an error of the handler's own connections is not one of the database", { skip }, async () => {
  const { receiver } = await receiverWith(async () => {
    await fetch("http://127.0.0.1:1/");
  });
  assert.equal((await receiver.handle(request(delivery(1)))).status, 500);
});

test("a role that cannot create tables uses existing ones", { skip }, async () => {
  const { receiver, schema } = await receiverWith(insert);
  const role = `${schema}_role`;
  await receiver.start();
  await pool.query(`CREATE ROLE ${role}; GRANT USAGE ON SCHEMA ${schema} TO ${role};
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ${schema} TO ${role};
    GRANT INSERT ON effect TO ${role}`);
  const restricted = new pg.Pool({ connectionString: dsn as string, options: `-c role=${role}` });
  const other = new Receiver(SECRET, new PgStore(restricted, { prefix: `${schema}.hooks` })).on("**", insert);
  assert.equal((await other.handle(request(delivery(1)))).text, "processed");
  await restricted.end();
});

test("receivers that start at the same time create the tables once", { skip }, async () => {
  const { schema } = await receiverWith(insert);
  const started = [1, 2, 3, 4].map(() => new Receiver(SECRET, new PgStore(pool, { prefix: `${schema}.hooks` })).start());
  await Promise.all(started);
});

test("expired deliveries are deleted, and their numbers remembered", { skip }, async () => {
  const { receiver, schema, store } = await receiverWith(insert);
  await receiver.handle(request(delivery(1)));
  await receiver.handle(request(delivery(2)));
  await pool.query(`UPDATE ${schema}.hooks_inbox SET received_at = now() - interval '8 days' WHERE sequence = 1`);
  assert.equal(await store.transaction((client) => receiver.inbox.expire(client)), 1);
  const { rows } = await pool.query(`SELECT forgotten FROM ${schema}.hooks_lane`);
  assert.deepEqual(rows, [{ forgotten: "1" }]);
});
