/**
 * Standard Webhooks 1.0 signatures: keys, signing and verification.
 *
 * https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
 *
 * The signed text is `{webhook-id}.{webhook-timestamp}.{body}`; the header `webhook-signature` has one or more
 * signatures, separated by spaces, each with its version. During a secret rotation the sender signs with both secrets.
 * Version `v1` is HMAC-SHA256 with a shared secret, `v1a` is Ed25519 with a key pair.
 */

import { Buffer } from "node:buffer";
import { createHmac, createPublicKey, timingSafeEqual, verify as verifyEd25519, type KeyObject } from "node:crypto";

import { SignatureError, UsageError } from "./errors.js";
import { decodeBase64, hasLoneSurrogate } from "./text.js";

export const ID_HEADER = "webhook-id";
export const TIMESTAMP_HEADER = "webhook-timestamp";
export const SIGNATURE_HEADER = "webhook-signature";

/** Default of the maximum difference between signature time and clock, in seconds. */
export const TOLERANCE_S = 300;
/** Signatures in one header. */
export const SIGNATURES_MAX = 32;
/** Every Ed25519 check costs a pass over the body, and unauthenticated senders can cause it. */
export const ED25519_SIGNATURES_MAX = 4;

const SECRET_PREFIX = "whsec_";
const PUBLIC_PREFIX = "whpk_";
const SECRET_BYTES_MIN = 24;
const SECRET_BYTES_MAX = 64;
const PUBLIC_KEY_BYTES = 32;

/** A verification key: the bytes of a shared secret, or a public key. */
export type VerificationKey =
  | { readonly version: "v1"; readonly secret: Uint8Array }
  | { readonly version: "v1a"; readonly publicKey: KeyObject };

/** The signed values of a verified request, besides the body. */
export interface VerifiedSignature {
  readonly messageId: string;
  /** Time of the signature in epoch seconds. */
  readonly timestamp: number;
}

/**
 * Decode a shared secret, `whsec_…` or its base64 alone, or an Ed25519 public key `whpk_…`.
 *
 * @throws UsageError the text is neither; the message never contains it.
 */
export function parseKey(text: string): VerificationKey {
  if (text.startsWith(PUBLIC_PREFIX)) {
    return { version: "v1a", publicKey: parsePublicKey(text) };
  }
  return { version: "v1", secret: parseSecret(text) };
}

/**
 * Sign a request with a shared secret, as a relay does. For tests of a receiver.
 *
 * @param secret `whsec_…`.
 * @param messageId the header `webhook-id`.
 * @param timestamp epoch seconds.
 * @param body the raw body.
 * @returns the header `webhook-signature`, `v1,…`.
 * @throws UsageError the secret is invalid.
 */
export function sign(secret: string, messageId: string, timestamp: number, body: Uint8Array | string): string {
  const signed = [Buffer.from(`${messageId}.${timestamp}.`), Buffer.from(body)];
  return `v1,${hmac(parseSecret(secret), signed).toString("base64")}`;
}

/**
 * Verify that one of the keys signed this request within the tolerance.
 *
 * Signatures of versions without a key are ignored, as the specification requires.
 *
 * @param headers by lower-case name.
 * @param now epoch seconds.
 * @throws SignatureError none did.
 */
export function verifySignature(
  headers: ReadonlyMap<string, string>,
  body: Uint8Array,
  keys: readonly VerificationKey[],
  now: number,
  toleranceS: number,
): VerifiedSignature {
  const [messageId, timestampText, signatures] = [ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER].map((name) => {
    const value = headers.get(name);
    if (!value) {
      throw new SignatureError("missing_header", `the header ${name} is missing`);
    }
    return value;
  }) as [string, string, string];
  if (messageId.includes(".")) {
    // Otherwise the same signed bytes could be another id, time stamp and body.
    throw malformed(ID_HEADER, 'contains a ".", which separates the signed parts');
  }
  requireUtf8(ID_HEADER, messageId);
  if (!/^[0-9]{1,15}$/.test(timestampText)) {
    throw malformed(TIMESTAMP_HEADER, "is not a number of epoch seconds");
  }
  const candidates = candidatesOf(SIGNATURE_HEADER, signatures, keys);
  requireMatch([Buffer.from(`${messageId}.${timestampText}.`), body], candidates, keys);
  // Last, so that the error of a time shows that the request has a valid signature.
  const timestamp = Number(timestampText);
  if (timestamp < now - toleranceS) {
    const ago = Math.round(now - timestamp);
    throw new SignatureError("timestamp_too_old", `signed ${ago} s ago; ${toleranceS} s are tolerated`);
  }
  if (timestamp > now + toleranceS) {
    const ahead = Math.round(timestamp - now);
    throw new SignatureError("timestamp_too_new", `signed ${ahead} s in the future; ${toleranceS} s are tolerated`);
  }
  return { messageId, timestamp };
}

/**
 * Verify that one of the keys signed a text besides the body.
 *
 * @param header its name, for errors.
 * @param signatures its value, in the form of `webhook-signature`.
 * @param signed the text, which has the id and the time stamp of a verified request.
 * @throws SignatureError none did.
 */
export function verifyTextSignature(
  header: string,
  signatures: string,
  signed: string,
  keys: readonly VerificationKey[],
): void {
  requireUtf8(header, signed);
  requireMatch([Buffer.from(signed)], candidatesOf(header, signatures, keys), keys);
}

type Candidates = Readonly<Record<"v1" | "v1a", readonly string[]>>;

function requireMatch(signed: readonly Uint8Array[], candidates: Candidates, keys: readonly VerificationKey[]): void {
  let matches = false;
  for (const key of keys) {
    // No early exit: the duration must not reveal which secret matched.
    if (key.version === "v1") {
      const expected = Buffer.from(hmac(key.secret, signed).toString("base64"));
      for (const candidate of candidates.v1) {
        const given = Buffer.from(candidate);
        matches = (given.length === expected.length && timingSafeEqual(given, expected)) || matches;
      }
    } else {
      for (const candidate of candidates.v1a) {
        matches = verifiesEd25519(key.publicKey, candidate, signed) || matches;
      }
    }
  }
  if (!matches) {
    throw new SignatureError(
      "mismatch",
      "no signature matches: the secret differs, or the request was changed in transit",
    );
  }
}

/** The signatures by version, for versions with a key, without the version prefix. */
function candidatesOf(header: string, text: string, keys: readonly VerificationKey[]): Candidates {
  const versions = new Set(keys.map((key) => key.version));
  const byVersion: Record<"v1" | "v1a", string[]> = { v1: [], v1a: [] };
  const signatures = text.split(" ");
  if (signatures.length > SIGNATURES_MAX) {
    throw malformed(header, `has more than ${SIGNATURES_MAX} signatures`);
  }
  for (const signature of signatures) {
    const comma = signature.indexOf(",");
    const version = signature.slice(0, Math.max(comma, 0));
    if ((version === "v1" || version === "v1a") && versions.has(version)) {
      byVersion[version].push(signature.slice(comma + 1));
    }
  }
  if (byVersion.v1a.length > ED25519_SIGNATURES_MAX) {
    throw malformed(header, `has more than ${ED25519_SIGNATURES_MAX} signatures of version v1a`);
  }
  if (byVersion.v1.length === 0 && byVersion.v1a.length === 0) {
    throw malformed(header, `has no signature of version ${[...versions].sort().join(" or ")}`);
  }
  return byVersion;
}

function hmac(secret: Uint8Array, signed: readonly Uint8Array[]): Buffer {
  const hash = createHmac("sha256", secret);
  for (const part of signed) {
    hash.update(part);
  }
  return hash.digest();
}

function verifiesEd25519(key: KeyObject, signature: string, signed: readonly Uint8Array[]): boolean {
  const bytes = decodeBase64(signature);
  return bytes !== null && bytes.length === 64 && verifyEd25519(null, Buffer.concat(signed), key, bytes);
}

function malformed(header: string, reason: string): SignatureError {
  return new SignatureError("malformed_header", `the header ${header} ${reason}`);
}

function requireUtf8(header: string, text: string): void {
  if (hasLoneSurrogate(text)) {
    throw malformed(header, "has characters that a header cannot contain");
  }
}

function decodeUnpadded(text: string): Uint8Array | null {
  // Tools of other senders print secrets without padding.
  return decodeBase64(text + "=".repeat((4 - (text.length % 4)) % 4));
}

function parseSecret(text: string): Uint8Array {
  const size = `${SECRET_BYTES_MIN} to ${SECRET_BYTES_MAX} bytes`;
  const secret = decodeUnpadded(text.startsWith(SECRET_PREFIX) ? text.slice(SECRET_PREFIX.length) : text);
  if (secret === null) {
    throw new UsageError(`secret: must be ${size} in base64, with or without "${SECRET_PREFIX}" before it`);
  }
  if (secret.length < SECRET_BYTES_MIN || secret.length > SECRET_BYTES_MAX) {
    throw new UsageError(`secret: must hold ${size}, not ${secret.length}`);
  }
  return secret;
}

const FIELD_PRIME = 2n ** 255n - 19n;
const ORDER_8_Y = 0x7a03ac9277fdc74ec6cc392cfa53202a0f67100d760b3cba4fd84d3d706a17c7n;
/**
 * The points of small order, by the y coordinate in all its encodings, canonical or not; the sign bit is ignored.
 * RFC 8032, section 5.1.7, leaves this check to applications, and OpenSSL does not make it.
 */
const SMALL_ORDER_Y: ReadonlySet<bigint> = new Set([
  0n,
  1n,
  FIELD_PRIME - 1n,
  FIELD_PRIME,
  FIELD_PRIME + 1n,
  ORDER_8_Y,
  FIELD_PRIME - ORDER_8_Y,
]);
const SIGN_BIT = 1n << 255n;

function parsePublicKey(text: string): KeyObject {
  const bytes = decodeUnpadded(text.slice(PUBLIC_PREFIX.length));
  if (bytes === null || bytes.length !== PUBLIC_KEY_BYTES) {
    throw new UsageError(`key: must be "${PUBLIC_PREFIX}", followed by ${PUBLIC_KEY_BYTES} bytes in base64`);
  }
  // Little-endian.
  const point = BigInt(`0x${Buffer.from(bytes).reverse().toString("hex")}`);
  if (SMALL_ORDER_Y.has(point & (SIGN_BIT - 1n))) {
    throw new UsageError("key: this public key has small order, so anybody can forge signatures");
  }
  const x = Buffer.from(bytes).toString("base64url");
  return createPublicKey({ key: { kty: "OKP", crv: "Ed25519", x }, format: "jwk" });
}
