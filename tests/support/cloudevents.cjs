// Reads requests with npm's cloudevents, which is found by NODE_PATH: a list of them on stdin, and
// of the events of each on stdout.
const { readFileSync } = require("node:fs");
const { HTTP } = require("cloudevents");

function events({ headers, body }) {
    const message = { headers, body: Buffer.from(body, "base64").toString("utf-8") };
    const read = HTTP.toEvent(message);
    const several = Array.isArray(read) ? read : [read];
    several.forEach((event) => event.validate());
    return several.map((event) => event.toJSON());
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf-8")).map(events)));
