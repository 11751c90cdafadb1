// Whether the relay answers: a word at the top, and in the page what is wrong and how old it is.

import { session } from "./api.js";
import { h, show } from "./dom.js";
import { clock, sentence } from "./say.js";

let word = ["", ""];
// When what is shown was true; null: nothing of this view is shown yet.
let goodAt = null;
let timer = 0;

export const pulse = () => h("span", { id: "pulse", class: `pulse ${word[0]}`, title: "Whether the relay answers" }, word[1]);

function say(kind, text) {
  word = [kind, text];
  const place = document.getElementById("pulse");
  if (!place) return;
  place.className = `pulse ${kind}`;
  place.textContent = text;
}

function stale(error) {
  document.getElementById("main").classList.toggle("stale", Boolean(error && goodAt));
  show(document.getElementById("banner"), error && h("p", null, sentence(error.message),
    goodAt ? ` What is shown is as of ${clock(goodAt)}.` : ""));
}

export function newView() {
  goodAt = null;
  clearInterval(timer);
  stale(null);
}

export function answered() {
  clearInterval(timer);
  goodAt = session.now();
  say("good", "live");
  stale(null);
}

// It is asked again at `againAt`, by this machine's clock.
export function lost(error, againAt) {
  clearInterval(timer);
  const tell = () => {
    const left = Math.ceil((againAt - Date.now()) / 1000);
    say("bad", left > 0 ? `offline, again in ${left} s` : "offline, trying");
  };
  tell();
  timer = setInterval(tell, 500);
  stale(error);
}
