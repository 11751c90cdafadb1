/**
 * Client for the relay's listener for receivers: `outbox relay --receivers HOST:PORT`.
 *
 * It returns complete deliveries with new signatures, so that each is verified and processed like one that was sent;
 * the listener itself need not be trusted.
 */

import { Buffer } from "node:buffer";

import { FetchError, UsageError } from "./errors.js";
import { RawJson, arraySources, decodeUtf8, memberOf, objectSources, requireValidJson, type JsonMember } from "./json.js";
import type { ReceiverRequest } from "./requests.js";
import { decodeBase64, errorText, oneLine } from "./text.js";

/** Default time-out of one request, in seconds. */
const TIMEOUT_S = 30;
/** Items requested per page. */
const PAGE = 100;
/** Default limit of a response, in bytes. A page of the relay has at most one mebibyte, or one delivery. */
const RESPONSE_BYTES_MAX = 64 * 1024 * 1024;
const ERROR_BYTES_MAX = 10_000;
/** Total time spent on Retry-After hold-offs (429) of one request. */
const WAIT_MS_MAX = 60_000;

/** Progress of a lane according to its sender. */
export interface LaneProgress {
  readonly lane: string;
  /** Everything up to this sequence number was delivered or dead-lettered. */
  readonly acknowledged: bigint;
  /** It rises when the lanes of the endpoint are recreated. */
  readonly generation: bigint;
}

/** One sequence number of a lane. */
export interface PageItem {
  readonly sequence: bigint;
  readonly deadLettered: boolean;
  /** The delivery; null if its event was erased, or is missing. */
  readonly request: ReceiverRequest | null;
  /** The event is gone, and the sender has no record that it was erased. */
  readonly missing?: boolean;
}

/** A page of sequence numbers of a lane, in order. */
export interface LanePage {
  /** Requested numbers below this one are no longer retained. */
  readonly keptFrom: bigint;
  readonly items: readonly PageItem[];
  readonly acknowledged: bigint;
  /** The next page begins after this number; null on the last page. */
  readonly next: bigint | null;
}

/** What the option `fetch` of a receiver accepts: lists lanes and returns their deliveries. */
export interface DeliverySource {
  lanes(): Promise<LaneProgress[]>;
  page(lane: string, after: bigint): Promise<LanePage>;
  delivery(lane: string, sequence: bigint): Promise<PageItem>;
}

/** Options of a fetch client. */
export interface FetchClientOptions {
  /** Time-out of one request, from its start to the end of its response, in seconds; 30 by default. */
  readonly timeoutS?: number;
  /** Maximum size of a response in bytes; 64 MiB by default. */
  readonly responseBytesMax?: number;
}

const CLOSED: ReadonlySet<unknown> = new Set(["UND_ERR_SOCKET", "ECONNRESET", "EPIPE"]);

/** Client of the relay's listener for receivers, for one endpoint. */
export class FetchClient implements DeliverySource {
  readonly #url: string;
  readonly #headers: Readonly<Record<string, string>>;
  readonly #timeoutMs: number;
  readonly #responseBytesMax: number;

  /**
   * @param url URL of the relay's `--receivers` listener.
   * @param token fetch token of the endpoint, from `outbox endpoint fetch-token`.
   * @throws UsageError the URL or the token is invalid; the message never shows the token.
   */
  constructor(url: string, token: string, options: FetchClientOptions = {}) {
    const parsed = parseUrl(url);
    if (parsed === null || parsed.username !== "" || parsed.password !== "") {
      throw new UsageError("fetch: the URL must begin with http:// or https:// and have no user name");
    }
    const trimmed = token.trim();
    if (!/^[\x21-\x7e]+$/.test(trimmed)) {
      throw new UsageError("fetch: invalid token; create one with outbox endpoint fetch-token");
    }
    this.#url = (parsed.origin + parsed.pathname).replace(/\/+$/, "");
    this.#headers = { Authorization: `Bearer ${trimmed}`, Accept: "application/json" };
    this.#timeoutMs = (options.timeoutS ?? TIMEOUT_S) * 1000;
    this.#responseBytesMax = options.responseBytesMax ?? RESPONSE_BYTES_MAX;
    if (!(this.#timeoutMs > 0) || !(this.#responseBytesMax > 0)) {
      throw new UsageError("fetch: timeoutS and responseBytesMax must be more than 0");
    }
  }

  /**
   * Fetch the progress of each lane of the endpoint.
   *
   * @throws FetchError the relay cannot be reached, or rejected the request.
   */
  async lanes(): Promise<LaneProgress[]> {
    const lanes: LaneProgress[] = [];
    let after: string | null = "";
    while (after !== null) {
      const page: ResponseObject = await this.#get("/v1/lanes", after === "" ? {} : { after });
      lanes.push(...page.objects("items").map(progressOf));
      const next: string | null = page.textOrNull("next");
      if (next === after) {
        throw invalid("next");
      }
      after = next;
    }
    return lanes;
  }

  /**
   * Fetch a page of the deliveries and dead letters of a lane.
   *
   * @param after the page begins after this sequence number.
   * @throws FetchError the relay cannot be reached, or has no such lane.
   */
  async page(lane: string, after: bigint): Promise<LanePage> {
    const page = await this.#get(pathOf(lane), { after: after.toString(), limit: PAGE.toString() });
    const next = page.integerOrNull("next");
    if (next !== null && next <= after) {
      throw invalid("next");
    }
    return {
      keptFrom: page.integer("kept_from"),
      items: page.objects("items").map(itemOf),
      acknowledged: page.integer("acknowledged"),
      next,
    };
  }

  /**
   * Fetch one delivery of a lane, which may be pending, with its payload.
   *
   * @throws FetchError the relay cannot be reached, or has no such delivery.
   */
  async delivery(lane: string, sequence: bigint): Promise<PageItem> {
    return itemOf(await this.#get(`${pathOf(lane)}/${sequence}`, {}));
  }

  async #get(path: string, query: Readonly<Record<string, string>>): Promise<ResponseObject> {
    const url = `${this.#url}${path}?${new URLSearchParams(query)}`;
    const deadline = Date.now() + WAIT_MS_MAX;
    for (;;) {
      const { status, retryAfter, body } = await this.#request(url);
      if (status === 200) {
        return ResponseObject.parse(body);
      }
      const waitMs = status === 429 && /^[0-9]{1,6}$/.test(retryAfter) ? Number(retryAfter) * 1000 : null;
      if (waitMs === null || Date.now() + waitMs > deadline) {
        throw new FetchError(`the relay at ${this.#url} responded: ${detailOf(status, body)}`);
      }
      // With a thousand lanes a catch-up exceeds the rate limit of its token.
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  async #request(url: string, isResent = false): Promise<{ status: number; retryAfter: string; body: Uint8Array }> {
    try {
      const response = await fetch(url, {
        headers: this.#headers,
        // A redirect would send the token to another host.
        redirect: "manual",
        signal: AbortSignal.timeout(this.#timeoutMs),
      });
      const isOk = response.status === 200;
      const body = await readResponse(response, isOk ? this.#responseBytesMax : ERROR_BYTES_MAX, isOk);
      return { status: response.status, retryAfter: response.headers.get("Retry-After") ?? "", body };
    } catch (error) {
      // `fetch` reports "fetch failed", and the reason as its cause.
      const cause = error instanceof Error && error.cause !== undefined ? error.cause : error;
      // A connection that `fetch` reuses may have been closed by the relay, because it was idle.
      if (!isResent && CLOSED.has((cause as { code?: unknown }).code)) {
        return this.#request(url, true);
      }
      throw new FetchError(`the relay at ${this.#url} cannot be reached: ${oneLine(errorText(cause))}`);
    }
  }
}

/** An object of a response, which may come from any HTTP server. */
class ResponseObject {
  readonly #members: ReadonlyMap<string, string>;

  constructor(source: string) {
    const members = objectSources(source);
    if (members === null) {
      throw new FetchError("invalid response, not from a relay: no JSON object");
    }
    this.#members = members;
  }

  static parse(body: Uint8Array): ResponseObject {
    let text: string;
    try {
      text = decodeUtf8(body);
      requireValidJson(text);
    } catch {
      throw new FetchError("invalid response, not from a relay: no JSON");
    }
    return new ResponseObject(text);
  }

  has(name: string): boolean {
    return this.#members.has(name);
  }

  text(name: string): string {
    const value = this.textOrNull(name);
    if (value === null) {
      throw invalid(name);
    }
    return value;
  }

  textOrNull(name: string): string | null {
    const value = this.#member(name);
    if (value !== null && typeof value !== "string") {
      throw invalid(name);
    }
    return value;
  }

  integer(name: string): bigint {
    const value = this.integerOrNull(name);
    if (value === null) {
      throw invalid(name);
    }
    return value;
  }

  integerOrNull(name: string): bigint | null {
    const value = this.#member(name);
    if (value !== null && typeof value !== "bigint") {
      throw invalid(name);
    }
    return value;
  }

  objects(name: string): ResponseObject[] {
    const value = this.#member(name);
    const elements = value instanceof RawJson ? arraySources(value.text) : null;
    if (elements === null) {
      throw invalid(name);
    }
    return elements.map((source) => new ResponseObject(source));
  }

  /** An object whose values are texts. */
  texts(name: string): Record<string, string> {
    const value = this.#member(name);
    const members = value instanceof RawJson ? objectSources(value.text) : null;
    const texts = [...(members ?? [])].map(([key, source]) => [key, memberOf(source)] as const);
    if (members === null || !texts.every((pair): pair is readonly [string, string] => typeof pair[1] === "string")) {
      throw invalid(name);
    }
    return Object.fromEntries(texts);
  }

  #member(name: string): JsonMember {
    const source = this.#members.get(name);
    return source === undefined ? null : memberOf(source);
  }
}

function progressOf(item: ResponseObject): LaneProgress {
  return {
    lane: item.text("lane"),
    acknowledged: item.integer("acknowledged"),
    generation: item.integer("generation"),
  };
}

function itemOf(item: ResponseObject): PageItem {
  const hasRequest = item.has("headers") || item.has("body") || item.has("body_base64");
  return {
    sequence: item.integer("sequence"),
    deadLettered: item.has("dead_lettered"),
    missing: item.has("missing"),
    request: hasRequest ? { method: "POST", headers: item.texts("headers"), body: bodyOf(item) } : null,
  };
}

function bodyOf(item: ResponseObject): Uint8Array {
  if (item.has("body")) {
    return Buffer.from(item.text("body"));
  }
  const body = decodeBase64(item.text("body_base64"));
  if (body === null) {
    throw invalid("body_base64");
  }
  return body;
}

function invalid(name: string): FetchError {
  return new FetchError(`invalid response, not from a relay: the field "${name}" is absent or invalid`);
}

function pathOf(lane: string): string {
  return `/v1/lanes/${encodeURIComponent(lane)}/deliveries`;
}

function parseUrl(url: string): URL | null {
  try {
    const parsed = new URL(url);
    return parsed.protocol === "http:" || parsed.protocol === "https:" ? parsed : null;
  } catch {
    return null;
  }
}

/** Read a response up to a limit; beyond it, fail if it is needed as a whole. */
async function readResponse(response: Response, bytesMax: number, whole: boolean): Promise<Uint8Array> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  const reader = (response.body as ReadableStream<Uint8Array> | null)?.getReader();
  while (reader !== undefined) {
    const { done, value } = await reader.read();
    if (done) {
      break;
    }
    chunks.push(value);
    size += value.length;
    if (size > bytesMax) {
      await reader.cancel();
      if (whole) {
        throw new Error(`the response is larger than ${bytesMax} bytes`);
      }
      break;
    }
  }
  return Buffer.concat(chunks).subarray(0, bytesMax);
}

/** The status of an error response and the `detail` of its JSON, if it has one. */
function detailOf(status: number, body: Uint8Array): string {
  try {
    const detail = (JSON.parse(decodeUtf8(body)) as { detail?: unknown }).detail;
    return typeof detail === "string" ? `${status}, ${oneLine(detail)}` : status.toString();
  } catch {
    return status.toString();
  }
}
