// Addresses: #/dead?endpoint=billing is a place, what follows it, and a filter.

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function here() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [place = "", ...rest] = path.split("/");
  return { place: place || "overview", rest: rest.filter(Boolean).map(decoded), values: Object.fromEntries(new URLSearchParams(search)) };
}

export function link(place, rest = [], values = {}) {
  const search = new URLSearchParams(values).toString();
  return `#/${[place, ...rest.map(encodeURIComponent)].join("/")}${search ? `?${search}` : ""}`;
}

// What people write when they mean one of a list.
const ONE_OF = { endpoints: "endpoint", dead: "letter", events: "trace" };

// Where an address leads that is nearly right; null: it is right, or nothing like it.
export function meant({ place, rest }) {
  return rest.length && ONE_OF[place] ? link(ONE_OF[place], rest) : null;
}
