// Routes in the URL fragment: #/dead-letters?endpoint=billing is a place with a filter.

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function currentRoute() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [place = "", ...rest] = path.split("/");
  return { place: place || "overview", rest: rest.filter(Boolean).map(decode), values: Object.fromEntries(new URLSearchParams(search)) };
}

export function link(place, rest = [], values = {}) {
  const search = new URLSearchParams(values).toString();
  return `#/${[place, ...rest.map(encodeURIComponent)].join("/")}${search ? `?${search}` : ""}`;
}

// A list with an id leads to the item: #/endpoints/shop.
const ITEM_PLACES = { endpoints: "endpoint", "dead-letters": "dead-letter", events: "trace" };

// The canonical link for a route; null: the route needs no redirect.
export function canonicalLink({ place, rest }) {
  return rest.length && ITEM_PLACES[place] ? link(ITEM_PLACES[place], rest) : null;
}

// Go to a link, and call `then` when its view is shown.
export function navigate(href, then) {
  addEventListener("hashchange", then, { once: true });
  location.hash = href;
}
