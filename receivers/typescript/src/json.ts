/**
 * JSON with access to the source text of members.
 *
 * Sequence numbers go up to 2^63-1, and `JSON.parse` rounds integers above 2^53. `JSON.parse` therefore validates a
 * text and parses payloads, and a scanner over the valid text returns the source of each member, from which integers
 * are read as `bigint`. The reviver's `context.source` would do the same, but needs Node 21.
 */

import { hasLoneSurrogate } from "./text.js";

/** Levels of arrays and objects of a payload; deeper ones would exhaust the stack of programs that walk the value. */
export const DEPTH_MAX = 1024;

/** A JSON value that is neither text, integer, boolean nor null, as its source text. */
export class RawJson {
  constructor(readonly text: string) {}
}

/** A member of an object: text, integer, boolean, null, or the source text of any other value. */
export type JsonMember = string | bigint | boolean | null | RawJson;

const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/**
 * Decode bytes to JSON text.
 *
 * @throws SyntaxError the bytes are not UTF-8.
 */
export function decodeUtf8(bytes: Uint8Array): string {
  try {
    return decoder.decode(bytes);
  } catch {
    throw new SyntaxError("not UTF-8");
  }
}

/**
 * Require that a text is JSON.
 *
 * @throws SyntaxError it is not, or has a text that UTF-8 cannot represent. The message does not repeat the text.
 */
export function requireValidJson(text: string): void {
  try {
    JSON.parse(text);
  } catch {
    // The message of the engine quotes the text, which may be confidential.
    throw new SyntaxError("invalid syntax");
  }
  // Only an escape can be a lone surrogate: the text itself was UTF-8.
  if (/\\u[dD][89a-fA-F]/.test(text)) {
    requirePairs(text);
  }
}

/** The source text of each member of an object, the last one of each name, from valid JSON; null: not an object. */
export function objectSources(text: string): Map<string, string> | null {
  const at = skipSpace(text, 0);
  if (text[at] !== "{") {
    return null;
  }
  const sources = new Map<string, string>();
  let i = skipSpace(text, at + 1);
  while (text[i] !== "}") {
    const nameEnd = endOfValue(text, i);
    const name = JSON.parse(text.slice(i, nameEnd)) as string;
    const start = skipSpace(text, skipSpace(text, nameEnd) + 1);
    const end = endOfValue(text, start);
    sources.set(name, text.slice(start, end));
    i = skipSpace(text, end);
    if (text[i] === ",") {
      i = skipSpace(text, i + 1);
    }
  }
  return sources;
}

/** The source text of each element of an array, from valid JSON; null: not an array. */
export function arraySources(text: string): string[] | null {
  const at = skipSpace(text, 0);
  if (text[at] !== "[") {
    return null;
  }
  const sources: string[] = [];
  let i = skipSpace(text, at + 1);
  while (text[i] !== "]") {
    const end = endOfValue(text, i);
    sources.push(text.slice(i, end));
    i = skipSpace(text, end);
    if (text[i] === ",") {
      i = skipSpace(text, i + 1);
    }
  }
  return sources;
}

/** The value of a member from its source text. */
export function memberOf(source: string): JsonMember {
  if (/^-?[0-9]+$/.test(source)) {
    return BigInt(source);
  }
  const first = source[0];
  if (first === '"' || first === "t" || first === "f" || first === "n") {
    return JSON.parse(source) as string | boolean | null;
  }
  return new RawJson(source);
}

/** The levels of arrays and objects of valid JSON. */
export function depthOf(text: string): number {
  let depth = 0;
  let deepest = 0;
  for (let i = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code === 0x22) {
      i = endOfString(text, i) - 1;
    } else if (code === 0x7b || code === 0x5b) {
      deepest = Math.max(deepest, ++depth);
    } else if (code === 0x7d || code === 0x5d) {
      depth--;
    }
  }
  return deepest;
}

function requirePairs(text: string): void {
  for (let i = text.indexOf('"'); i >= 0; ) {
    const end = endOfString(text, i);
    if (hasLoneSurrogate(JSON.parse(text.slice(i, end)) as string)) {
      throw new SyntaxError("a lone surrogate");
    }
    i = text.indexOf('"', end);
  }
}

function skipSpace(text: string, at: number): number {
  let i = at;
  while (text[i] === " " || text[i] === "\n" || text[i] === "\r" || text[i] === "\t") {
    i++;
  }
  return i;
}

/** Index after the string that begins at `at`. */
export function endOfString(text: string, at: number): number {
  let i = at + 1;
  while (i < text.length && text.charCodeAt(i) !== 0x22) {
    i += text.charCodeAt(i) === 0x5c ? 2 : 1;
  }
  return i + 1;
}

/** Index after the value that begins at `at`. */
function endOfValue(text: string, at: number): number {
  const first = text[at];
  if (first === '"') {
    return endOfString(text, at);
  }
  let i = at;
  if (first !== "{" && first !== "[") {
    while (i < text.length && !/[\s,\]}]/.test(text.charAt(i))) {
      i++;
    }
    return i;
  }
  let depth = 0;
  do {
    const code = text.charCodeAt(i);
    if (code === 0x22) {
      i = endOfString(text, i) - 1;
    } else if (code === 0x7b || code === 0x5b) {
      depth++;
    } else if (code === 0x7d || code === 0x5d) {
      depth--;
    }
    i++;
  } while (depth > 0 && i < text.length);
  return i;
}
