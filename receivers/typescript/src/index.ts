/**
 * Receiver for deliveries of an outbox relay.
 *
 * - `verify`, `Verifier`: signatures and messages.
 * - `Receiver`: processes each event once and in order, in the transaction of its effects.
 * - `MemoryStore`, and `PgStore` of `outbox-receiver/pg`: where a receiver records deliveries.
 * - `Inbox`, `LaneOrder`: the parts, for programs with their own transactions.
 * - `FetchClient`: fetches missing deliveries from the relay.
 *
 * Adapters for HTTP servers: `outbox-receiver/node`, `/express`, `/fastify`, `/fetch`.
 */

export type { CatchUpResult } from "./catch-up.js";
export {
  Busy,
  FetchError,
  MessageError,
  OutboxError,
  Refuse,
  SignatureError,
  UnreadablePayload,
  UsageError,
  type SignatureProblem,
} from "./errors.js";
export {
  FetchClient,
  type DeliverySource,
  type FetchClientOptions,
  type LanePage,
  type LaneProgress,
  type PageItem,
} from "./fetch-client.js";
export type { HeadersInput } from "./headers.js";
export { Inbox, type InboxOptions } from "./inbox/inbox.js";
export { MemoryStore, MemoryTransaction } from "./inbox/memory.js";
export type { DeliveryOutcome, DeliveryResult } from "./inbox/process.js";
export type {
  Claim,
  DatabaseCondition,
  InboxStatements,
  LatestEvent,
  RequestRow,
  Store,
  StoredLane,
} from "./inbox/store.js";
export { LaneOrder, type LaneState, type Observation, type OrderKind, type SequenceState } from "./lane-order.js";
export { FORMATS, type FormatName, type Message } from "./message.js";
export type { PayloadParser } from "./payload.js";
export type { Range } from "./ranges.js";
export { Receiver } from "./receiver.js";
export type { ForeignHandler, GapPolicy, Handler, HttpReceiver, ReceiverOptions, UnhandledPolicy } from "./receiver-options.js";
export type { DeliveryListener, Logger, ReceiverTotals } from "./reporting.js";
export type { ReceiverRequest, ReceiverResponse, RequestOutcome } from "./requests.js";
export { sign } from "./signature.js";
export { Verifier, verify, type SignedRequest, type Verified, type VerifierOptions } from "./verification.js";
