"""Values that every layer shares: events, endpoint settings, patterns, headers, ids, responses."""
