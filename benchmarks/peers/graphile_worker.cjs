// graphile-worker: jobs are fetched in groups into a local queue, and completed in batches.
const { makeWorkerUtils, run, Logger } = require("graphile-worker");
const { asked, pieces, posting, ready } = require("./asked.cjs");

const NAME = "deliver";
const AT_ONCE = 2000; // Jobs per statement that writes the backlog.
// What the client itself sends.
const ENQUEUE = `SELECT graphile_worker.add_job('${NAME}', $1::text::json)`;

async function work() {
    const preset = {
        worker: {
            connectionString: asked.dsn,
            logger: new Logger(() => () => {}),
            ...asked.mode.worker,
        },
    };
    const utils = await makeWorkerUtils({ preset });
    await utils.migrate();
    const payload = JSON.parse(asked.body);
    for (const jobs of pieces(AT_ONCE)) {
        await utils.addJobs(Array.from({ length: jobs }, () => ({ identifier: NAME, payload })));
    }
    await utils.release();
    await ready(ENQUEUE, [asked.body]);
    const post = posting(asked.mode.worker.concurrentJobs);
    await run({ preset, noHandleSignals: true, taskList: { [NAME]: post } });
}

work();
