package receiver

import (
	"regexp"
	"strings"
)

var hexDigits = regexp.MustCompile(`\A[0-9A-Fa-f]{32}\z`)

// uuidDigits returns the 32 digits of a UUID in any of its usual forms; false: it is none.
func uuidDigits(text string) (string, bool) {
	text = strings.ReplaceAll(strings.ReplaceAll(text, "urn:", ""), "uuid:", "")
	text = strings.ReplaceAll(strings.Trim(text, "{}"), "-", "")
	return text, hexDigits.MatchString(text)
}

func isUUID(text string) bool {
	_, ok := uuidDigits(text)
	return ok
}

// isDeliveryID reports whether a webhook-id is an X-Delivery: a UUID of version 8 (RFC 9562).
// Other senders have other ids.
func isDeliveryID(text string) bool {
	digits, ok := uuidDigits(text)
	return ok && digits[12] == '8' && strings.ContainsRune("89abAB", rune(digits[16]))
}
