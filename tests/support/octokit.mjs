// Verifies with npm's @octokit/webhooks, which is below NODE_PATH: reads a list of requests from
// stdin, and writes the list of results to stdout.
import { readFileSync } from "node:fs";

const { Webhooks } = await import(`${process.env.NODE_PATH}/webhooks/dist-bundle/index.js`);

const accepts = ({ secret, body, signature }) => new Webhooks({ secret }).verify(body, signature);

console.log(JSON.stringify(await Promise.all(JSON.parse(readFileSync(0, "utf-8")).map(accepts))));
