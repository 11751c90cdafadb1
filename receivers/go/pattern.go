package receiver

import (
	"fmt"
	"regexp"
	"strings"
)

const (
	patternBytesMax = 255
	reservedPrefix  = "outbox."
	probeType       = reservedPrefix + "probe"
)

const segmentOfType = `[A-Za-z0-9_][A-Za-z0-9_-]*`

var patternSegment = regexp.MustCompile(`\A` + segmentOfType + `\z`)

// pattern is a pattern of event types: `order.paid`, `order.*`, `**`.
//
// Types under `outbox.` are operational events: only patterns that start with `outbox` match them,
// and only its full type matches the probe.
type pattern struct {
	text  string
	types *regexp.Regexp
}

func parsePattern(text string) (pattern, error) {
	invalid := fmt.Errorf("receiver: type pattern: %q is invalid: use segments of letters, digits, _ and - "+
		`joined by dots, not beginning with -, "*" for one segment, a last "**" for the rest`, text)
	if len(text) > patternBytesMax {
		return pattern{}, fmt.Errorf("receiver: type pattern: longer than %d bytes", patternBytesMax)
	}
	segments := strings.Split(text, ".")
	for i, segment := range segments {
		switch {
		case segment == "**" && i == len(segments)-1:
			segments[i] = segmentOfType + `(?:\.` + segmentOfType + `)*`
		case segment == "*":
			segments[i] = segmentOfType
		case !patternSegment.MatchString(segment):
			return pattern{}, invalid
		}
	}
	types, err := regexp.Compile(`\A` + strings.Join(segments, `\.`) + `\z`)
	if err != nil {
		return pattern{}, invalid
	}
	return pattern{text: text, types: types}, nil
}

func (p pattern) matches(eventType string) bool {
	if strings.HasPrefix(eventType, reservedPrefix) {
		if p.text != "outbox" && !strings.HasPrefix(p.text, reservedPrefix) {
			return false
		}
		if eventType == probeType && p.text != probeType {
			return false
		}
	}
	return p.types.MatchString(eventType)
}
