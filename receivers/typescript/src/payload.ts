/** Payloads of messages: the exact text, and a value in which no number is rounded. */

import { UnreadablePayload } from "./errors.js";
import { DEPTH_MAX, depthOf, endOfString } from "./json.js";
import { errorText } from "./text.js";

/** Reads the JSON text of a payload. */
export type PayloadParser = (text: string) => unknown;

const SHOWN_CHARACTERS = 40;
const WAY_ON = "give the receiver the option parse, or read dataText";

/**
 * Read the JSON text of a payload.
 *
 * @param text valid JSON.
 * @throws UnreadablePayload it has a number that JavaScript rounds, or too many levels; or `parse` does not read it.
 */
export function readPayload(text: string, parse: PayloadParser | null): unknown {
  if (parse !== null) {
    try {
      return parse(text);
    } catch (error) {
      if (error instanceof SyntaxError || error instanceof RangeError) {
        throw new UnreadablePayload(`parse does not read the payload: ${errorText(error)}`, { cause: error });
      }
      throw error;
    }
  }
  if (depthOf(text) > DEPTH_MAX) {
    throw new UnreadablePayload(`the payload has more than ${DEPTH_MAX} levels of arrays and objects: ${WAY_ON}`);
  }
  const rounded = findRounded(text);
  if (rounded !== null) {
    const shown = rounded.length > SHOWN_CHARACTERS ? `${rounded.slice(0, SHOWN_CHARACTERS)}…` : rounded;
    throw new UnreadablePayload(`the payload has the number ${shown}, which JavaScript rounds: ${WAY_ON}`);
  }
  return JSON.parse(text);
}

/** The first number of valid JSON that is not exact in JavaScript; null: there is none. */
function findRounded(text: string): string | null {
  // A number of 15 digits with an exponent of two is exact.
  if (!/[0-9][0-9.]{15}|[0-9][eE][-+]?[0-9]{3}/.test(text)) {
    return null;
  }
  for (let i = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    if (code === 0x22) {
      i = endOfString(text, i) - 1;
    } else if (code === 0x2d || (code >= 0x30 && code <= 0x39)) {
      const start = i;
      while (/[-+0-9.eE]/.test(text.charAt(i + 1))) {
        i++;
      }
      const number = text.slice(start, i + 1);
      if (!isExact(number)) {
        return number;
      }
    }
  }
  return null;
}

/** Whether a double has the value, or its 17 digits are how programs write that double. */
function isExact(number: string): boolean {
  const value = Number(number);
  const exact = canonical(number);
  return exact === canonical(String(value)) || exact === canonical(value.toPrecision(17));
}

/** The significant digits of a decimal number, and the place of its point. */
function canonical(number: string): string {
  const [, sign = "", integer = "", fraction = "", exponent = "0"] =
    /^(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?$/.exec(number) ?? [];
  const digits = integer + fraction;
  const significant = digits.replace(/^0+/, "");
  if (significant === "") {
    // Of `Infinity`, too: it is no JSON, and differs from every number.
    return digits === "" ? number : "0";
  }
  const place = integer.length - (digits.length - significant.length) + Number(exponent);
  return `${sign}${withoutTrailingZeros(significant)}@${place}`;
}

/** A regular expression would be quadratic in a run of zeros that another digit follows. */
function withoutTrailingZeros(digits: string): string {
  let end = digits.length;
  while (end > 0 && digits.charCodeAt(end - 1) === 0x30) {
    end--;
  }
  return digits.slice(0, end);
}
