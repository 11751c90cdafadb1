package receiver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// members are the members of a JSON object by their exact names; decoding into a struct would
// ignore the case of names.
type members map[string]json.RawMessage

// checkJSON returns an error unless the text is JSON (RFC 8259).  encoding/json replaces invalid
// UTF-8 and lone surrogates by U+FFFD; the value would differ from the one that was signed.
func checkJSON(text []byte) error {
	if !utf8.Valid(text) {
		return errors.New("invalid UTF-8")
	}
	var value json.RawMessage
	if err := json.Unmarshal(text, &value); err != nil {
		return err
	}
	if hasLoneSurrogate(text) {
		return errors.New("an escaped surrogate without its other half")
	}
	return nil
}

// hasLoneSurrogate reports whether valid JSON escapes half of a surrogate pair.
func hasLoneSurrogate(text []byte) bool {
	for {
		start := bytes.IndexByte(text, '\\')
		if start < 0 {
			return false
		}
		text = text[start:]
		if text[1] != 'u' {
			text = text[2:]
			continue
		}
		first := escapedUnit(text)
		text = text[6:]
		if !utf16.IsSurrogate(first) {
			continue
		}
		if !bytes.HasPrefix(text, []byte(`\u`)) ||
			utf16.DecodeRune(first, escapedUnit(text)) == utf8.RuneError {
			return true
		}
		text = text[6:]
	}
}

func escapedUnit(text []byte) rune {
	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return utf8.RuneError
	}
	return rune(unit)
}

// parseObject returns the members of checked JSON; false: it is not an object.
func parseObject(value json.RawMessage) (members, bool) {
	var object members
	if !startsWith(value, '{') || json.Unmarshal(value, &object) != nil {
		return nil, false
	}
	return object, true
}

// parseArray returns the elements of checked JSON; false: it is not an array.
func parseArray(value json.RawMessage) ([]json.RawMessage, bool) {
	var array []json.RawMessage
	if !startsWith(value, '[') || json.Unmarshal(value, &array) != nil {
		return nil, false
	}
	return array, true
}

func startsWith(value json.RawMessage, first byte) bool {
	trimmed := bytes.TrimLeft(value, " \t\r\n")
	return len(trimmed) > 0 && trimmed[0] == first
}

var integerText = regexp.MustCompile(`\A-?(?:0|[1-9][0-9]*)\z`)

// parseString returns a JSON string; false: it is absent or another type.
func parseString(value json.RawMessage) (string, bool) {
	var text string
	if !startsWith(value, '"') || json.Unmarshal(value, &text) != nil {
		return "", false
	}
	return text, true
}

// parseNumber returns an integer from 0 to 2^63-1; false: it is absent or another value.
func parseNumber(value json.RawMessage) (int64, bool) {
	number, err := strconv.ParseInt(string(value), 10, 64)
	return number, err == nil && number >= 0 && integerText.Match(value)
}

// text returns a member that has to be a string.
func (m members) text(name string) (string, error) {
	text, ok := parseString(m[name])
	if !ok {
		return "", badMessage("the body's %q is not a string", name)
	}
	// PostgreSQL's text cannot store NUL: the inbox would fail, and the sender retry.
	if strings.ContainsRune(text, 0) {
		return "", badMessage("the body's %q has a NUL character, which no database can hold", name)
	}
	return text, nil
}

// optionalText returns a member that may be absent.
func (m members) optionalText(name string) (*string, error) {
	if _, found := m[name]; !found {
		return nil, nil
	}
	text, err := m.text(name)
	if err != nil {
		return nil, err
	}
	return &text, nil
}

// number returns a member that has to be an integer from 0 to 2^63-1.
func (m members) number(name string) (int64, error) {
	if !integerText.Match(m[name]) {
		return 0, badMessage("the body's %q is not an integer", name)
	}
	number, ok := parseNumber(m[name])
	if !ok {
		return 0, badMessage("the body's %q is not between 0 and 2^63", name)
	}
	return number, nil
}

// boolean returns a member that has to be true or false.
func (m members) boolean(name string) (bool, error) {
	switch string(m[name]) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, badMessage("the body's %q is not true or false", name)
}

// setText adds a string.
func (m members) setText(name, text string) error {
	if !utf8.ValidString(text) {
		return badMessage("the %q of the delivery is not UTF-8", name)
	}
	quoted, err := json.Marshal(text)
	if err != nil {
		return fmt.Errorf("receiver: quoting a text: %w", err)
	}
	m[name] = quoted
	return nil
}

// setNumber adds an integer.
func (m members) setNumber(name string, number int64) {
	m[name] = strconv.AppendInt(nil, number, 10)
}
