// Signs and verifies with npm's standardwebhooks, which is found by NODE_PATH: reads a list of
// requests from stdin, and writes the list of results to stdout.
const { readFileSync } = require("node:fs");
const { Webhook } = require("standardwebhooks");

function response({ secret, body, headers, id, timestamp }) {
    const webhook = new Webhook(secret);
    const bytes = Buffer.from(body, "base64");
    if (headers === undefined) return webhook.sign(id, new Date(timestamp * 1000), bytes);
    try {
        webhook.verify(bytes, headers, { jsonParse: false });
        return true;
    } catch {
        return false;
    }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf-8")).map(response)));
