// The request to a contestant's process, as in asked.py.  Packages are found by NODE_PATH.
const { createInterface } = require("node:readline");
const { Pool } = require("undici");

const asked = JSON.parse(process.argv[2]);
const lines = createInterface({ input: process.stdin });
lines.on("close", () => process.exit(0));

// Report the enqueue statement, and wait for the start command.
function ready(statement, values) {
    const started = new Promise((resolve) => lines.once("line", resolve));
    process.stdout.write(JSON.stringify({ statement, values }) + "\n");
    return started;
}

// Return a function that POSTs a job's data as JSON over `connections` kept-alive connections.
function posting(connections) {
    const url = new URL(asked.url);
    const pool = new Pool(url.origin, { connections });
    const request = {
        path: url.pathname, method: "POST", headers: { "content-type": "application/json" },
    };
    return async (data) => {
        const response = await pool.request({ ...request, body: JSON.stringify(data) });
        await response.body.dump();
        if (response.statusCode >= 300) throw new Error(`responded with ${response.statusCode}`);
    };
}

// Yield the number of jobs in each piece of the backlog.
function* pieces(size) {
    for (let put = 0; put < asked.jobs; put += size) yield Math.min(size, asked.jobs - put);
}

module.exports = { asked, pieces, posting, ready };
