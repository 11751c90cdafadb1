// Connection state: an indicator in the header, and a banner with the error and the age of the data.

import { session } from "./api.js";
import { h, show } from "./dom.js";
import { clock, sentence } from "./format.js";

let indicator = ["", ""];
// Time of the last successful response; null: this view has shown no data yet.
let updatedAt = null;
let timer = 0;

export const indicatorElement = () => h("span", { id: "pulse", class: `pulse ${indicator[0]}`, title: "Connection to the relay" }, indicator[1]);

function setIndicator(kind, text) {
  indicator = [kind, text];
  const place = document.getElementById("pulse");
  if (!place) return;
  place.className = `pulse ${kind}`;
  place.textContent = text;
}

function showError(error) {
  document.getElementById("main").classList.toggle("stale", Boolean(error && updatedAt));
  show(document.getElementById("banner"), error && h("p", null, sentence(error.message),
    updatedAt ? ` Data as of ${clock(updatedAt)}.` : ""));
}

export function resetConnection() {
  updatedAt = null;
  clearInterval(timer);
  showError(null);
}

export function connected() {
  clearInterval(timer);
  updatedAt = session.now();
  setIndicator("good", "live");
  showError(null);
}

// Show the error and count down to the next attempt, at `retryAt` by the local clock.
export function disconnected(error, retryAt) {
  clearInterval(timer);
  const countDown = () => {
    const left = Math.ceil((retryAt - Date.now()) / 1000);
    setIndicator("bad", left > 0 ? `offline, retry in ${left} s` : "offline, retrying");
  };
  countDown();
  timer = setInterval(countDown, 500);
  showError(error);
}
