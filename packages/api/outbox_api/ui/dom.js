// DOM elements from plain values.  Values become text nodes, never HTML, and their hidden characters
// are escaped: payloads, names and receiver responses are untrusted.  What is edited stays exact.

import { visible } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";

const SHOWN = ["title", "alt", "placeholder", "aria-label"];

function fill(element, attributes, children) {
  const shown = (each) => (each instanceof Node || element.nodeName === "TEXTAREA" ? each : visible(each));
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element[name] = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : SHOWN.includes(name) ? visible(value) : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false).map(shown));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onkeydown"];

// Update `old` to match `next` in place: focus, selection and open <details> survive the
// refresh every two seconds.
export function patch(old, next) {
  if (old === next) return;
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName ||
      old.id !== next.id || (old.dataset?.key ?? "") !== (next.dataset?.key ?? "")) {
    old.replaceWith(next);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  // The user controls whether <details> is open.
  const isUserState = (name) => name === "open" && old.nodeName === "DETAILS";
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !isUserState(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !isUserState(name)) old.setAttribute(name, value);
  }
  if (old.nodeName === "INPUT" && old.type === "checkbox") {
    old.checked = next.checked;
    old.indeterminate = next.indeterminate;
  }
  for (const name of HANDLERS) if (old[name] !== next[name]) old[name] = next[name];
  patchChildren(old, [...next.childNodes]);
}

const keyOf = (node) => node.dataset?.key || null;

// Children with a key are matched by it, so that a new row leaves the others as they are; others by position.
function patchChildren(parent, nodes) {
  const wanted = new Set(nodes.map(keyOf));
  const known = new Map([...parent.childNodes].filter(keyOf).map((child) => [keyOf(child), child]));
  let current = parent.firstChild;
  const advance = () => {
    const passed = current;
    current = current.nextSibling;
    return passed;
  };
  for (const next of nodes) {
    while (current && keyOf(current) && !wanted.has(keyOf(current))) advance().remove();
    const key = keyOf(next);
    const same = known.get(key);
    known.delete(key);
    if (same) {
      let between = current;
      while (between && !keyOf(between)) between = between.nextSibling;
      // Without moving it, which would lose its focus, if only elements without a key precede it.
      if (between === same) while (current !== same) advance().remove();
      if (same === current) advance();
      else parent.insertBefore(same, current);
      patch(same, next);
    } else if (!key && current && !keyOf(current)) patch(advance(), next);
    else parent.insertBefore(next, current);
  }
  while (current) advance().remove();
}

export function show(parent, ...children) {
  patchChildren(parent, children.flat(Infinity).filter(Boolean).map(
    (each) => (typeof each === "string" ? document.createTextNode(visible(each)) : each)));
}
