/** The program of the README, as a process. Needs `DATABASE_URL`, as `pg.test.ts` does. */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFile, writeFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import pg from "pg";

import { SECRET, delivery, request } from "./sender.js";

const dsn = process.env["DATABASE_URL"];

test("the program of the README receives a delivery", { skip: dsn ? false : "DATABASE_URL is not set" }, async () => {
  const readme = await readFile(new URL("../../README.md", import.meta.url), "utf8");
  const program = /```js\n(import .*?)```/s.exec(readme)?.[1] ?? "";
  const path = fileURLToPath(new URL("../receiver.mjs", import.meta.url));
  await writeFile(path, program);
  const env = { ...process.env, OUTBOX_SECRET: SECRET, PORT: "0" };
  const server = spawn(process.execPath, [path], { env, stdio: ["ignore", "pipe", "inherit"] });
  const exit = once(server, "exit");
  try {
    const [line] = (await once(createInterface({ input: server.stdout }), "line")) as [string];
    const url = line.replace("listening on ", "");
    const key = `order ${process.pid}`;
    const paid = request(delivery(1, { lane: `lane ${process.pid}`, more: `,"key":"${key}"` }));
    const response = await fetch(url, { method: "POST", headers: paid.headers, body: paid.body });
    assert.deepEqual([response.status, await response.text()], [422, "the order has no total\n"]);
    const complete = delivery(2, { lane: `lane ${process.pid}`, more: `,"key":"${key}","data":{"total":12.5}` });
    assert.equal((await fetch(url, { method: "POST", headers: request(complete).headers, body: request(complete).body })).status, 200);
    const pool = new pg.Pool({ connectionString: dsn as string });
    const { rows } = await pool.query("SELECT total FROM paid_order WHERE id = $1", [key]);
    await pool.end();
    assert.deepEqual(rows, [{ total: "12.5" }]);
  } finally {
    server.kill();
    await exit;
  }
});
