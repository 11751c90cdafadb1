// The lanes of an endpoint as bars: the higher, the more it owes.

import { svg } from "./dom.js";
import { count, duration, plural } from "./say.js";

const HEIGHT = 20;
const LEAST = 3;

const kindOf = (lane) => (lane.blocked ? "blocked" : lane.failing ? "failing" : lane.owed ? "owing" : "idle");

// What the longest bar of all stands for, so that those of several endpoints can be compared.
export const highest = (endpoints) => Math.max(1, ...endpoints.flatMap((each) => each.lanes.map((lane) => lane.owed)));

// `all` lanes there are, of which `found` are drawn; `top` is what a bar of full height owes.
export function lanes(name, found, { all = found.length, top = highest([{ lanes: found }]), oldest = null } = {}) {
  const owing = found.filter((lane) => lane.owed);
  const stuck = found.filter((lane) => lane.failing || lane.blocked).length;
  const age = oldest === null ? "" : `, the oldest for ${duration(oldest)}`;
  const bars = found.map((lane, n) => {
    // By powers: a lane that owes a thousand does not hide one that owes ten.
    const height = lane.owed ? LEAST + (HEIGHT - LEAST) * Math.log1p(lane.owed) / Math.log1p(top) : lane.blocked ? HEIGHT : 2;
    const kind = kindOf(lane);
    const word = lane.owed ? `owes ${count(lane.owed)}` : "owes nothing";
    const since = lane.owed && owing.length === 1 ? age : "";
    return svg("rect", { class: kind, x: n * 7, y: HEIGHT - height, width: 5, height, rx: 1 },
      svg("title", null, `lane ${n}: ${word}${since}${stuck && kind !== "owing" && kind !== "idle" ? `, ${kind}` : ""}`));
  });
  const total = owing.reduce((sum, lane) => sum + lane.owed, 0);
  const told = `${name}: ${plural(all, "lane")}, ${owing.length} ${owing.length === 1 ? "owes" : "owe"}`
    + `${total ? ` ${count(total)}${age}` : ""}${stuck ? `; ${stuck} ${stuck === 1 ? "fails or is" : "fail or are"} blocked` : ""}`;
  return svg("svg", {
    class: "lanes", viewBox: `0 0 ${Math.max(found.length * 7 - 2, 5)} ${HEIGHT}`, width: Math.max(found.length, 1) * 18,
    height: HEIGHT, role: "img", "aria-label": told, preserveAspectRatio: "none",
  }, svg("title", null, told), bars);
}
