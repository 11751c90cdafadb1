// pg-boss: workers that each fetch a batch, process it, and complete it in one statement.
const { PgBoss } = require("pg-boss");
const { asked, pieces, posting, ready } = require("./asked.cjs");

const NAME = "deliver";
const AT_ONCE = 2000; // Jobs per statement that writes the backlog.

// What the client sends for one job: it lets a caller's own transaction send it.
async function enqueuing(boss, data) {
    let sent;
    const db = {
        async executeSql(statement, values) {
            sent = { statement, values };
            return { rows: [{ id: null }] };
        },
    };
    await boss.send(NAME, data, { db });
    return sent;
}

async function work() {
    const boss = new PgBoss({ connectionString: asked.dsn, ...asked.mode.instance });
    boss.on("error", (error) => process.stderr.write(`pg-boss: ${error.message}\n`));
    await boss.start();
    await boss.createQueue(NAME, asked.mode.queue);
    const data = JSON.parse(asked.body);
    for (const jobs of pieces(AT_ONCE)) {
        await boss.insert(NAME, Array.from({ length: jobs }, () => ({ data })));
    }
    const { statement, values } = await enqueuing(boss, data);
    await ready(statement, values);
    const post = posting(asked.mode.connections);
    await boss.work(NAME, asked.mode.work, (jobs) => Promise.all(jobs.map((job) => post(job.data))));
}

work();
