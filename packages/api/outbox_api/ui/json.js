// JSON without loss.  JavaScript reads every number as a double.  One that a double cannot represent
// is kept as a marked text, and written as the number that it was.

const MARK = "\u0000number ";
const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
const NUMBER = /^(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?$/;
const MARKED = /"\\u0000number (-?[\d.eE+-]+)"/g;

// Equal for equal numbers: the digits without zeros around them, and the exponent.
function normalize(text) {
  const [, sign, whole, fraction = "", exponent = "0"] = NUMBER.exec(text);
  const digits = (whole + fraction).replace(/^0+/, "");
  // A regular expression would be quadratic in a run of zeros that another digit follows.
  let end = digits.length;
  while (end > 0 && digits[end - 1] === "0") {
    end -= 1;
  }
  const kept = digits.slice(0, end);
  return kept ? `${sign}${kept}e${Number(exponent) - fraction.length + digits.length - kept.length}` : "0";
}

function isExact(text) {
  const value = Number(text);
  return Number.isFinite(value) && normalize(String(value)) === normalize(text);
}

export const parse = (text) => JSON.parse(
  text.replace(TOKEN, (token) => (token.startsWith('"') || isExact(token) ? token : JSON.stringify(MARK + token))),
);

export const stringify = (value, indent) => JSON.stringify(value, null, indent).replace(MARKED, "$1");

export const readable = (value) => (typeof value === "string" && !value.startsWith(MARK) ? value : stringify(value, 2));

// The payload that was typed into a form.
export function parsePayload(text) {
  try {
    return text.trim() ? parse(text) : {};
  } catch (error) {
    throw new Error(`payload: is not JSON: ${error.message}`);
  }
}
