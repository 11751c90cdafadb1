package receiver

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
)

// DefaultHeaderPrefix begins the names of the headers that describe a delivery, unless the
// endpoint has another `header_prefix`.
const DefaultHeaderPrefix = "X-"

const (
	contentTypeHeader = "content-type"
	attributePrefix   = "ce-"
	jsonContentType   = "application/json"
)

// relayNames are the headers that describe a delivery, without their prefix.
var relayNames = []string{
	"attempt", "backfill", "delivery", "event", "event-id", "event-key", "event-tenant", "event-time",
	"lane", "lane-ends", "last-sequence", "previous-sequence", "replay-of", "sequence",
}

// metadataNames are the headers that webhook-metadata-signature covers after Content-Type, without
// their prefix and in the order in which they are signed.
var metadataNames = []string{
	"delivery", "event", "event-id", "event-time", "event-tenant", "event-key", "lane", "sequence",
	"previous-sequence", "replay-of", "backfill", "lane-ends",
}

// attributeNames are the attributes of a CloudEvent in binary mode, in the order in which they are
// signed.
var attributeNames = []string{
	"specversion", "id", "source", "type", "time", "subject", "partitionkey", "lane", "lanesequence",
	"previoussequence", "eventid", "tenant", "encodedkey", "encodedtenant", "traceparent", "tracestate",
	"replayof", "backfill", "laneends",
}

var (
	headerPrefix = regexp.MustCompile(`\A[A-Za-z](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?-\z`)
	// Prefixes with a meaning of their own.
	foreignPrefixes = []string{
		"webhook-", "x-forwarded-", "proxy-", "sec-", "content-", "accept-", attributePrefix,
	}
)

func checkHeaderPrefix(prefix string) error {
	valid := headerPrefix.MatchString(prefix)
	for _, foreign := range foreignPrefixes {
		valid = valid && !strings.HasPrefix(strings.ToLower(prefix), foreign)
	}
	if !valid {
		return fmt.Errorf("receiver: header prefix: %q must be letters, digits and dashes, such as "+
			"X-Acme-, and not begin with %s", prefix, strings.Join(foreignPrefixes, ", "))
	}
	return nil
}

// foldHeaders returns the headers with these lower-case names.  A header that occurs more than
// once is an error, because the signed value would be unknown.
func foldHeaders(header http.Header, names map[string]bool) (map[string]string, error) {
	folded := make(map[string]string, len(header))
	for name, values := range header {
		lower := strings.ToLower(name)
		if !names[lower] {
			continue
		}
		for _, value := range values {
			if _, repeated := folded[lower]; repeated {
				return nil, headerError(ErrRepeatedHeader, lower, "occurs more than once")
			}
			folded[lower] = value
		}
	}
	return folded, nil
}
