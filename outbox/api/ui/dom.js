// Elements from plain values.  Text is always text: nothing that an event, an endpoint or a
// receiver says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element[name] = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onkeydown"];

// Make `old` look like `next` and keep what is the same: focus, selection and open <details>
// survive a look that is repeated every two seconds.
export function patch(old, next) {
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName ||
      old.id !== next.id || (old.dataset?.key ?? "") !== (next.dataset?.key ?? "")) {
    old.replaceWith(next);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  // Whether <details> are open is up to who reads them.
  const theirs = (name) => name === "open" && old.nodeName === "DETAILS";
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !theirs(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !theirs(name)) old.setAttribute(name, value);
  }
  if (old.nodeName === "INPUT" && old.type === "checkbox") old.checked = next.checked;
  for (const name of HANDLERS) if (old[name] !== next[name]) old[name] = next[name];
  patchChildren(old, [...next.childNodes]);
}

export function patchChildren(parent, wanted) {
  const there = [...parent.childNodes];
  wanted.forEach((next, n) => {
    if (n < there.length) patch(there[n], next);
    else parent.append(next);
  });
  there.slice(wanted.length).forEach((each) => each.remove());
}

export function show(parent, ...children) {
  patchChildren(parent, children.flat(Infinity).filter(Boolean).map(
    (each) => (typeof each === "string" ? document.createTextNode(each) : each)));
}
