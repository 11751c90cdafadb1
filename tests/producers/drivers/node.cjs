// Publishes with drivers of Node, which are found by NODE_PATH: reads {"driver", "dsn", "statements"}
// from stdin.  A statement is {"text", "arguments"}, with $1, $2 … in its text.
const { readFileSync } = require("node:fs");

/** Calls a template tag, as the compiler does: the text between the arguments, and the arguments. */
function tagged(tag, { text, arguments: given }) {
    const parts = text.split(/\$\d+/);
    return tag(Object.assign(parts, { raw: parts }), ...given);
}

const DRIVERS = {
    async pg(dsn) {
        const client = new (require("pg").Client)(dsn);
        await client.connect();
        return [({ text, arguments: given }) => client.query(text, given), () => client.end()];
    },
    async "pg-promise"(dsn) {
        const library = require("pg-promise")();
        const db = library(dsn);
        return [({ text, arguments: given }) => db.any(text, given), () => library.end()];
    },
    async postgres(dsn) {
        const sql = require("postgres")(dsn, { max: 1 });
        return [({ text, arguments: given }) => sql.unsafe(text, given), () => sql.end()];
    },
    async "postgres, tagged"(dsn) {
        const sql = require("postgres")(dsn, { max: 1 });
        return [(statement) => tagged(sql, statement), () => sql.end()];
    },
    async "postgres, unprepared"(dsn) {
        const sql = require("postgres")(dsn, { max: 1, prepare: false });
        return [(statement) => tagged(sql, statement), () => sql.end()];
    },
    async knex(dsn) {
        const db = require("knex")({ client: "pg", connection: dsn });
        const run = ({ text, arguments: given }) => db.raw(text.replace(/\$\d+/g, "?"), given);
        return [run, () => db.destroy()];
    },
    async kysely(dsn) {
        const { Kysely, PostgresDialect, sql } = require("kysely");
        const pool = new (require("pg").Pool)({ connectionString: dsn });
        const db = new Kysely({ dialect: new PostgresDialect({ pool }) });
        return [(statement) => tagged(sql, statement).execute(db), () => db.destroy()];
    },
    async sequelize(dsn) {
        const { Sequelize } = require("sequelize");
        const db = new Sequelize(dsn, { logging: false });
        return [({ text, arguments: given }) => db.query(text, { bind: given }), () => db.close()];
    },
    async typeorm(dsn) {
        require("reflect-metadata");
        const { DataSource } = require("typeorm");
        const source = await new DataSource({ type: "postgres", url: dsn }).initialize();
        return [({ text, arguments: given }) => source.query(text, given), () => source.destroy()];
    },
    async "drizzle-orm with pg"(dsn) {
        const { sql } = require("drizzle-orm");
        const pool = new (require("pg").Pool)({ connectionString: dsn });
        const db = require("drizzle-orm/node-postgres").drizzle(pool);
        return [(statement) => db.execute(drizzled(sql, statement)), () => pool.end()];
    },
    async "drizzle-orm with postgres"(dsn) {
        const { sql } = require("drizzle-orm");
        const client = require("postgres")(dsn, { max: 1 });
        const db = require("drizzle-orm/postgres-js").drizzle(client);
        return [(statement) => db.execute(drizzled(sql, statement)), () => client.end()];
    },
};

/** An array is one parameter: Drizzle makes a list of those in its templates. */
function drizzled(sql, { text, arguments: given }) {
    const parameters = given.map((each) => (Array.isArray(each) ? sql.param(each) : each));
    return tagged(sql, { text, arguments: parameters });
}

async function main() {
    const { driver, dsn, statements } = JSON.parse(readFileSync(0, "utf-8"));
    const [run, end] = await DRIVERS[driver](dsn);
    const failures = [];
    for (const statement of statements) {
        try {
            await run(statement);
        } catch (error) {
            // Drizzle's error has PostgreSQL's as its cause.
            failures.push(`${statement.name}: ${(error.cause ?? error).message}`);
        }
    }
    await end();
    console.log(JSON.stringify(failures));
}

main();
