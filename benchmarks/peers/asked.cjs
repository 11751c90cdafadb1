// What a contestant's process is asked, as asked.py has it.  Packages are found by NODE_PATH.
const { createInterface } = require("node:readline");
const { Pool } = require("undici");

const asked = JSON.parse(process.argv[2]);
const lines = createInterface({ input: process.stdin });
lines.on("close", () => process.exit(0));

// Tell how one more is put in, and wait for the word to begin.
function ready(statement, values) {
    const told = new Promise((resolve) => lines.once("line", resolve));
    process.stdout.write(JSON.stringify({ statement, values }) + "\n");
    return told;
}

// What POSTs a job's data as JSON, over so many connections that are kept.
function posting(connections) {
    const url = new URL(asked.url);
    const pool = new Pool(url.origin, { connections });
    const request = {
        path: url.pathname, method: "POST", headers: { "content-type": "application/json" },
    };
    return async (data) => {
        const response = await pool.request({ ...request, body: JSON.stringify(data) });
        await response.body.dump();
        if (response.statusCode >= 300) throw new Error(`answered with ${response.statusCode}`);
    };
}

// The numbers at which pieces of the backlog begin, and how long each is.
function* pieces(size) {
    for (let put = 0; put < asked.jobs; put += size) yield Math.min(size, asked.jobs - put);
}

module.exports = { asked, pieces, posting, ready };
