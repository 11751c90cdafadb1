/** Test program: applies operations of stdin to lanes; one JSON object a line. */

import { createInterface } from "node:readline";

import { LaneOrder, type Range } from "outbox-receiver";

import { arraySources, memberOf, objectSources, requireValidJson } from "./sources.js";

for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim() !== "") {
    process.stdout.write(`${run(line)}\n`);
  }
}

function run(line: string): string {
  requireValidJson(line);
  const members = objectSources(line) ?? new Map<string, string>();
  const lane = new LaneOrder({ fromStart: members.get("from_start") === "true" });
  const results = (arraySources(members.get("operations") ?? "[]") ?? []).map((operation) => apply(lane, operation));
  const { high, ended, missing, holes, unknown } = lane.toState();
  const state = `"high":${high},"ended":${ended},"missing":${format(missing)},"holes":${format(holes)}`;
  return `{"results":[${results.join(",")}],"state":{${state},"unknown":${format(unknown)}}}`;
}

function apply(lane: LaneOrder, operation: string): string {
  const [name, ...parts] = arraySources(operation) ?? [];
  const number = (n: number) => BigInt(parts[n] ?? 0);
  switch (memberOf(name ?? "null")) {
    case "observe": {
      const seen = lane.observe(number(0), number(1), { laneEnds: parts[2] === "true" });
      const lost = seen.lost === null ? "null" : `[${seen.lost.join(",")}]`;
      const ranges = `"missing":${format(seen.missing)},"holes":${format(seen.holes)}`;
      return `{"kind":"${seen.kind}",${ranges},"was":${JSON.stringify(seen.was)},"lost":${lost}}`;
    }
    case "close":
      return JSON.stringify(lane.close(number(0)));
    case "progress": {
      const ranges = (arraySources(parts[1] ?? "[]") ?? []).map((range): Range => {
        const [lo, hi] = arraySources(range) ?? [];
        return [BigInt(lo ?? 0), BigInt(hi ?? 0)];
      });
      lane.applyProgress(number(0), ranges);
      return "null";
    }
    case "unavailable":
      return format(lane.markUnavailable(number(0), number(1)));
    default:
      throw new Error(`unknown operation: ${operation}`);
  }
}

function format(ranges: readonly Range[]): string {
  return `[${ranges.map((range) => `[${range.join(",")}]`).join(",")}]`;
}
