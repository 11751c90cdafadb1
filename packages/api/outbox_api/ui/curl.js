// A request as text, and as a command of cURL.

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export const requestText = ({ method, url, headers, body, body_base64: base64 }) => [`${method} ${url}`,
  ...headers.map(([name, value]) => `${name}: ${value}`), "", body ?? base64 ?? ""].join("\n");

// Without --globoff, cURL expands [1-9] and {a,b} in a URL.
// Masked values (***) are part of the command: it shows where they belong.
export function toCurl({ method, url, headers, body, body_base64: base64 }) {
  const lines = [`curl --globoff -X ${method} ${quote(url)}`, ...headers.map(([name, value]) => `  -H ${quote(`${name}: ${value}`)}`)];
  lines.push(base64 === null || base64 === undefined ? `  --data-binary ${quote(body ?? "")}` : "  --data-binary @-");
  const command = lines.join(" \\\n");
  return base64 === null || base64 === undefined ? command : `printf %s ${quote(base64)} | base64 -d | ${command}`;
}
