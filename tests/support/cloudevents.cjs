// Reads requests with npm's cloudevents, which is found by NODE_PATH: a list of them on stdin, and
// of the events of each on stdout.
const { readFileSync } = require("node:fs");
const { HTTP } = require("cloudevents");

function events({ headers, body }) {
    const bytes = Buffer.from(body, "base64");
    // The library takes binary data as bytes, and JSON as text.
    const isText = /json/.test(headers["content-type"]);
    const message = { headers, body: isText ? bytes.toString("utf-8") : bytes };
    const read = HTTP.toEvent(message);
    const several = Array.isArray(read) ? read : [read];
    several.forEach((event) => event.validate());
    return several.map((event) => event.toJSON());
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf-8")).map(events)));
