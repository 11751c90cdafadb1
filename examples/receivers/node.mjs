// Receiver that applies transfers to accounts: Node without any library.
//
//     OUTBOX_SECRET=whsec_… PORT=9000 node node.mjs
//
// State is kept in memory to keep the example short.  In a real receiver `seen` and `lanes` are
// tables in the database of the accounts, written in the same transaction.

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const secret = Buffer.from(process.env.OUTBOX_SECRET.replace(/^whsec_/, ""), "base64");
const TOLERANCE_S = 300;
const BODY_BYTES_MAX = 1024 * 1024;

const accounts = new Map();
const processed = [];
const seen = new Set(); // X-Delivery values
const lanes = new Map(); // highest sequence number of each lane

class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

// Standard Webhooks 1.0: HMAC-SHA256 of id, time and body.
function verify(headers, body) {
  const id = headers["webhook-id"];
  const time = headers["webhook-timestamp"];
  const signatures = headers["webhook-signature"];
  if (!id || !time || !signatures || id.includes(".")) throw new Refused(401, "not signed");
  if (!/^[0-9]{1,15}$/.test(time)) throw new Refused(401, "not a time");
  if (Math.abs(Date.now() / 1000 - Number(time)) > TOLERANCE_S) throw new Refused(401, "too old");
  const expected = createHmac("sha256", secret).update(`${id}.${time}.`).update(body).digest();
  const matches = signatures
    .split(" ")
    .filter((each) => each.startsWith("v1,"))
    .map((each) => Buffer.from(each.slice(3), "base64"))
    .some((given) => given.length === expected.length && timingSafeEqual(given, expected));
  if (!matches) throw new Refused(401, "no signature matches");
}

function parse(body) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(body));
  } catch {
    throw new Refused(400, "not JSON");
  }
}

// Only the body is signed: a header that differs from it was changed in transit.
function read(headers, delivery) {
  const { id, type, lane, sequence, previous_sequence: previous } = delivery ?? {};
  if (
    typeof id !== "string" ||
    typeof type !== "string" ||
    typeof lane !== "string" ||
    !Number.isSafeInteger(sequence) ||
    !Number.isSafeInteger(previous) ||
    !(0 <= previous && previous < sequence)
  )
    throw new Refused(400, "not a delivery");
  // An endpoint with another header_prefix has it in place of "x-".
  const expected = {
    "x-event": type,
    "x-event-id": id,
    "x-lane": lane,
    "x-sequence": String(sequence),
    "x-previous-sequence": String(previous),
    "x-delivery": headers["webhook-id"],
  };
  for (const [name, value] of Object.entries(expected))
    if (headers[name] !== value) throw new Refused(400, `${name} contradicts the body`);
  return delivery;
}

function receive(deliveryId, delivery) {
  const { lane, sequence, previous_sequence: previous } = delivery;
  const high = lanes.get(lane) ?? previous; // First delivery of the lane: this receiver joins it here.
  if (previous > high) console.warn(`lane ${lane}: ${high + 1} to ${previous} are missing`);
  lanes.set(lane, Math.max(high, sequence));
  if (seen.has(deliveryId)) return;
  seen.add(deliveryId);
  if (delivery.type === "account.moved") {
    const { account, cents } = delivery.data;
    accounts.set(account, (accounts.get(account) ?? 0) + cents);
  }
  processed.push(delivery.id);
}

createServer((request, response) => {
  const respond = (status, text, headers = {}) => response.writeHead(status, headers).end(text);
  if (request.url === "/processed") return respond(200, JSON.stringify(processed));
  if (request.method !== "POST") return respond(405, "send deliveries by POST\n", { Allow: "POST" });
  const chunks = [];
  let size = 0;
  request.on("data", (chunk) => {
    size += chunk.length;
    if (size <= BODY_BYTES_MAX) chunks.push(chunk);
    else if (!response.headersSent) respond(413, "too large\n", { Connection: "close" });
  });
  request.on("end", () => {
    if (response.headersSent) return;
    try {
      const body = Buffer.concat(chunks);
      verify(request.headers, body);
      receive(request.headers["x-delivery"], read(request.headers, parse(body)));
      respond(200, "ok\n");
    } catch (error) {
      respond(error.status ?? 500, `${error.status ? error.message : "failed"}\n`);
    }
  });
}).listen(Number(process.env.PORT ?? 9000), "127.0.0.1");
