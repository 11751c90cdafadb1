// The same receiver for Node's http module and three frameworks.
const [framework, port] = process.argv.slice(2);
const idle = { keepAliveTimeout: 1000 };

function listen(server) {
  server.keepAliveTimeout = idle.keepAliveTimeout;
  server.listen(Number(port), "127.0.0.1");
}

if (framework === "http") {
  listen(require("node:http").createServer((request, response) => {
    request.resume().on("end", () => response.end("ok"));
  }));
} else if (framework === "express") {
  const app = require("express")();
  app.use((request, response) => request.resume().on("end", () => response.end("ok")));
  listen(require("node:http").createServer(app));
} else if (framework === "fastify") {
  const app = require("fastify")(idle);
  app.addContentTypeParser("*", { parseAs: "buffer" }, (request, body, done) => done(null, body));
  app.all("/*", async () => "ok");
  app.listen({ port: Number(port), host: "127.0.0.1" });
} else {
  const Koa = require("koa");
  const app = new Koa();
  app.use(async (context) => {
    for await (const part of context.req) void part;
    context.body = "ok";
  });
  listen(require("node:http").createServer(app.callback()));
}
