/** Texts: Base64, order by bytes, one-line texts. */

import { Buffer } from "node:buffer";

/** Decode padded Base64; null if the text is anything else. `Buffer.from` alone ignores invalid characters. */
export function decodeBase64(text: string): Uint8Array | null {
  const end = text.endsWith("==") ? text.length - 2 : text.endsWith("=") ? text.length - 1 : text.length;
  if (text.length % 4 !== 0 || /[^A-Za-z0-9+/]/.test(text.slice(0, end))) {
    return null;
  }
  return Uint8Array.from(Buffer.from(text, "base64"));
}

/** Compare two texts by their UTF-8 bytes, as PostgreSQL's collation "C" does. */
export function compareBytes(a: string, b: string): number {
  return Buffer.compare(Buffer.from(a), Buffer.from(b));
}

/** Whether a text has a surrogate without its partner, which UTF-8 cannot represent. */
export function hasLoneSurrogate(text: string): boolean {
  return /\p{Surrogate}/u.test(text);
}

/** Collapse a text to one line of at most 500 characters. */
export function oneLine(text: string): string {
  return text.split(/\s+/).filter(Boolean).join(" ").slice(0, 500);
}

/** The message of anything that was thrown. */
export function errorText(error: unknown): string {
  return error instanceof Error ? error.message || error.name : String(error);
}

/** A time in UTC with microseconds, `2026-01-31T12:00:00.000000Z`, the form of the relay's timestamps. */
export function rfc3339(epochMs: number): string {
  return new Date(epochMs).toISOString().replace("Z", "000Z");
}
