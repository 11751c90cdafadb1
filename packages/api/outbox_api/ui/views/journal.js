// Journal: what people changed, or everything that was changed.

import { session } from "../api.js";
import { h, show } from "../dom.js";
import { journalList } from "../journal_list.js";
import { follow } from "../listing.js";
import { link } from "../router.js";
import { searchField } from "../search_field.js";

const KINDS = ["endpoint_added", "endpoint_updated", "endpoint_paused", "endpoint_resumed", "endpoint_enabled", "endpoint_removing",
  "dead_replayed", "dead_discarded", "skip_requested", "backfill_requested", "schedule_changed", "token_added", "token_revoked", "erased", "logins_failed"];
const EXAMPLES = [...KINDS.map((each) => `kind:${each}`), "since:1d", "by:relays"];

export function view(place, _, values) {
  const { by, ...others } = values;
  const list = journalList(values);
  show(place, h("h1", null, "Journal"),
    h("p", { class: "hint" }, by ? "" : `What people changed${session.tenant === null ? "" : " at your endpoints"}, with the user or token of each. `,
      by ? h("a", { href: link("journal", [], others) }, "Show what people changed only")
        : h("a", { href: link("journal", [], { ...others, by: "all" }) }, "Show what relays did, too")),
    searchField({
      names: ["endpoint", "kind", "actor", "since", "until", "by"], bare: "actor", values, examples: EXAMPLES,
      placeholder: "a user or token; or endpoint:shop, kind:endpoint_paused, since:1d …",
      onChange: (next) => { location.hash = link("journal", [], next); } }),
    list.place);
  return follow(place, list);
}
