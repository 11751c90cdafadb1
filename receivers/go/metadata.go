package receiver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Metadata in headers, for bodies that are the payload alone, with a signature of its own.

// signedMetadata returns what webhook-metadata-signature signs: lines of `name:value`, without the
// headers that are absent.  It cannot be the signature of a body, where a number follows the id.
func signedMetadata(headers map[string]string, prefix string, signed signedRequest) []byte {
	var lines []string
	add := func(name, header string) {
		if value, found := headers[header]; found {
			lines = append(lines, name+":"+value)
		}
	}
	add(contentTypeHeader, contentTypeHeader)
	for _, name := range metadataNames {
		add(name, strings.ToLower(prefix)+name)
	}
	for _, name := range attributeNames {
		add(attributePrefix+name, attributePrefix+name)
	}
	return []byte(fmt.Sprintf("metadata.%s.%d.%s", signed.id, signed.timestamp, strings.Join(lines, "\n")))
}

// parseSignedHeaders parses a delivery whose metadata is in verified headers.
func parseSignedHeaders(h deliveryHeaders, body []byte, requestID string) (Message, error) {
	from := source{deliveryID: requestID, attempt: h.attempt(), format: FormatRaw}
	if _, isEvent := h.values[attributePrefix+"id"]; isEvent {
		from.format = FormatCloudEventsBinary
	}
	envelope, err := envelopeOfHeaders(h)
	if err != nil {
		return Message{}, err
	}
	message, err := parseMetadata(envelope, from)
	if err != nil {
		return Message{}, err
	}
	contentType, found := h.values[contentTypeHeader]
	switch {
	case contentType == jsonContentType:
		if err := checkJSON(body); err != nil {
			return Message{}, badMessage("the body is not JSON: %v", err)
		}
		message.Data = body
	case !found:
		return Message{}, badMessage("the header %s is missing", contentTypeHeader)
	case contentType == "":
		return Message{}, errEmptyContentType
	case !utf8.ValidString(contentType) || strings.ContainsRune(contentType, 0):
		return Message{}, badMessage("the header %s is not UTF-8", contentTypeHeader)
	default:
		message.Binary, message.ContentType = append([]byte{}, body...), contentType
	}
	return message, nil
}

// envelopeOfHeaders returns the members of an envelope, from verified headers.
func envelopeOfHeaders(h deliveryHeaders) (members, error) {
	envelope := members{}
	for member, name := range map[string]string{
		"id": "Event-Id", "type": "Event", "timestamp": "Event-Time", "lane": "Lane",
	} {
		if text, found := h.get(name); found {
			if err := envelope.setText(member, text); err != nil {
				return nil, err
			}
		}
	}
	for member, name := range map[string]string{"sequence": "Sequence", "previous_sequence": "Previous-Sequence"} {
		text, _ := h.get(name)
		number, ok := parseDecimal(text)
		if !ok {
			return nil, badMessage("the header %s%s is not a number", h.prefix, name)
		}
		envelope.setNumber(member, number)
	}
	for member, name := range map[string]string{"tenant": "Event-Tenant", "key": "Event-Key"} {
		if text, found := h.get(name); found {
			if err := envelope.setDecoded(member, text, "the header "+h.prefix+name); err != nil {
				return nil, err
			}
		}
	}
	if text, found := h.get("Replay-Of"); found {
		if err := envelope.setReplay(text); err != nil {
			return nil, err
		}
	}
	if text, found := h.get("Backfill"); found {
		number, ok := parseDecimal(text)
		if !ok {
			return nil, badMessage("the header %sBackfill is not a number", h.prefix)
		}
		envelope.setNumber("backfill", number)
	}
	if _, found := h.get("Lane-Ends"); found {
		envelope["lane_ends"] = json.RawMessage("true")
	}
	return envelope, nil
}

// setReplay adds `replay_of`, from a text `lane/number`.
func (m members) setReplay(text string) error {
	slash := strings.LastIndexByte(text, '/')
	sequence, ok := parseDecimal(text[slash+1:])
	if !ok {
		return badMessage("the replayed sequence is not a number")
	}
	lane := ""
	if slash >= 0 {
		lane = text[:slash]
	}
	replayed := members{}
	if err := replayed.setText("lane", lane); err != nil {
		return err
	}
	m["replay_of"] = json.RawMessage(`{"lane":` + string(replayed["lane"]) + `,"sequence":` +
		strconv.FormatInt(sequence, 10) + `}`)
	return nil
}

// setDecoded adds a text that is percent-encoded (CloudEvents HTTP binding, 3.1.3.2).
func (m members) setDecoded(name, encoded, what string) error {
	text := percentDecode(encoded)
	if !utf8.ValidString(text) {
		return badMessage("%s is not percent-encoded UTF-8", what)
	}
	return m.setText(name, text)
}

// percentDecode decodes %XX; a percent sign that begins no such sequence stands for itself.
func percentDecode(text string) string {
	if decoded, err := url.PathUnescape(text); err == nil {
		return decoded
	}
	var decoded bytes.Buffer
	for i := 0; i < len(text); i++ {
		if text[i] == '%' && i+2 < len(text) {
			if value, err := strconv.ParseUint(text[i+1:i+3], 16, 8); err == nil {
				decoded.WriteByte(byte(value))
				i += 2
				continue
			}
		}
		decoded.WriteByte(text[i])
	}
	return decoded.String()
}

var decimalText = regexp.MustCompile(`\A(?:0|[1-9][0-9]{0,18})\z`)

// parseDecimal parses a number from 0 to 2^63-1 that is sent as text.
func parseDecimal(text string) (int64, bool) {
	if !decimalText.MatchString(text) {
		return 0, false
	}
	number, err := strconv.ParseInt(text, 10, 64)
	return number, err == nil
}
