package receiver

import (
	"encoding/json"
	"regexp"
	"strconv"
	"strings"
)

// Format is the shape of the requests to an endpoint (its setting `format`).
type Format string

// The formats of a relay.
const (
	// FormatEnvelope is a JSON object with metadata and payload.
	FormatEnvelope Format = "envelope"
	// FormatThin is the same object without the payload; see [Receiver.FetchPayload].
	FormatThin Format = "thin"
	// FormatRaw is the payload; the metadata is in headers with a signature of their own.
	FormatRaw Format = "raw"
	// FormatCloudEvents is CloudEvents 1.0 in structured mode.
	FormatCloudEvents Format = "cloudevents"
	// FormatCloudEventsBinary is CloudEvents 1.0 in binary mode, signed as FormatRaw.
	FormatCloudEventsBinary Format = "cloudevents-binary"
)

var formats = []Format{FormatEnvelope, FormatThin, FormatRaw, FormatCloudEvents, FormatCloudEventsBinary}

// LanePosition names a delivery by its lane and its sequence number.
type LanePosition struct {
	Lane     string
	Sequence int64
}

// Message is one delivery.
type Message struct {
	// DeliveryID is the X-Delivery, the idempotency key: the same for every attempt of a delivery.
	DeliveryID string
	// EventID is the id of the event.
	EventID string
	// Type is the event's type, such as "order.paid".
	Type string
	// Timestamp is when the event was published, RFC 3339 in UTC with microseconds.
	Timestamp string
	// Tenant is nil for an event without one.
	Tenant *string
	// Key is nil for an event without one.
	Key *string
	// Lane is the sequence of deliveries that this one belongs to.
	Lane string
	// Sequence is the number of the delivery in its lane, from 1 to 2^63-1.
	Sequence int64
	// PreviousSequence is the last number before it that was not dead-lettered; 0: none.
	PreviousSequence int64
	// ReplayOf is the dead letter that this delivery replays, or nil.
	ReplayOf *LanePosition
	// Backfill is the id of the backfill that sends the event again, or nil.
	Backfill *int64
	// LaneEnds reports that this is the last delivery of its lane.
	LaneEnds bool
	// Attempt is the number of the attempt from 1; 0: unknown.  It is not signed.
	Attempt int
	// Format is the format in which the delivery came.
	Format Format
	// Data is the payload as JSON text; nil for a payload that is not JSON and for a thin message.
	Data json.RawMessage
	// Binary is a payload that is not JSON; nil for other payloads.
	Binary []byte
	// ContentType is the type of a payload that is not JSON; "" for JSON.
	ContentType string
}

// source is what a message has from elsewhere than its envelope.
type source struct {
	deliveryID string
	attempt    int
	format     Format
}

// deliveryHeaders are the headers that describe a delivery, under the endpoint's prefix.
type deliveryHeaders struct {
	values map[string]string
	prefix string
}

func (h deliveryHeaders) get(name string) (string, bool) {
	value, found := h.values[strings.ToLower(h.prefix+name)]
	return value, found
}

func (h deliveryHeaders) requestID() (string, error) {
	id, _ := h.get("Delivery")
	if !isUUID(id) {
		return "", badMessage("the header %sDelivery is not a UUID", h.prefix)
	}
	if h.values[idHeader] != id {
		// Only webhook-id is signed.
		return "", badMessage("the headers %sDelivery and webhook-id differ", h.prefix)
	}
	return id, nil
}

var attemptText = regexp.MustCompile(`\A[0-9]{1,9}\z`)

func (h deliveryHeaders) attempt() int {
	text, _ := h.get("Attempt")
	if !attemptText.MatchString(text) {
		return 0
	}
	attempt, _ := strconv.Atoi(text)
	return attempt
}

// requireMatch compares headers with the body, because only the body is signed.
func (h deliveryHeaders) requireMatch(first Message, more ...[2]string) error {
	wanted := append([][2]string{
		{"Lane", first.Lane},
		{"Sequence", strconv.FormatInt(first.Sequence, 10)},
		{"Previous-Sequence", strconv.FormatInt(first.PreviousSequence, 10)},
	}, more...)
	for _, each := range wanted {
		if value, found := h.get(each[0]); !found || value != each[1] {
			return badMessage("the header %s%s differs from the body", h.prefix, each[0])
		}
	}
	return nil
}

// parseRequest parses the deliveries of a request, and checks that headers and body agree.
//
// metadataIsSigned: the metadata is in headers whose signature was verified.
func parseRequest(h deliveryHeaders, body []byte, metadataIsSigned bool) ([]Message, error) {
	requestID, err := h.requestID()
	if err != nil {
		return nil, err
	}
	if metadataIsSigned {
		message, err := parseSignedHeaders(h, body, requestID)
		return []Message{message}, err
	}
	if err := checkJSON(body); err != nil {
		return nil, badMessage("the body is not JSON: %v", err)
	}
	if elements, isArray := parseArray(body); isArray {
		return parseBatch(h, elements)
	}
	object, isObject := parseObject(body)
	if !isObject {
		return nil, badMessage("the body is neither a JSON object nor an array of them")
	}
	message, err := parseElement(object, requestID, h.attempt())
	if err != nil {
		return nil, err
	}
	if message.DeliveryID != requestID {
		return nil, badMessage(`the body's "id" differs from the header webhook-id`)
	}
	err = h.requireMatch(message, [2]string{"Event", message.Type}, [2]string{"Event-Id", message.EventID})
	return []Message{message}, err
}

func parseBatch(h deliveryHeaders, elements []json.RawMessage) ([]Message, error) {
	if len(elements) == 0 {
		return nil, badMessage("the body is an empty array")
	}
	messages := make([]Message, 0, len(elements))
	attempt := h.attempt()
	for _, element := range elements {
		object, isObject := parseObject(element)
		if !isObject {
			return nil, badMessage("an element of the body's array is not an object")
		}
		deliveryID, _ := parseString(object["delivery"])
		message, err := parseElement(object, deliveryID, attempt)
		if err != nil {
			return nil, err
		}
		if len(messages) > 0 {
			before := messages[len(messages)-1]
			if message.Lane != before.Lane || message.Sequence-1 != before.Sequence ||
				message.PreviousSequence != before.Sequence {
				return nil, badMessage("in the array, sequence %d cannot follow %d",
					message.Sequence, before.Sequence)
			}
		}
		messages = append(messages, message)
		attempt = 0
	}
	last := strconv.FormatInt(messages[len(messages)-1].Sequence, 10)
	return messages, h.requireMatch(messages[0], [2]string{"Last-Sequence", last})
}

// parseElement parses a body, or an element of a batch.
func parseElement(object members, deliveryID string, attempt int) (Message, error) {
	from := source{deliveryID: deliveryID, attempt: attempt, format: FormatEnvelope}
	if _, isEvent := object["specversion"]; isEvent {
		from.format = FormatCloudEvents
		from.deliveryID, _ = parseString(object["id"])
		envelope, err := envelopeOfEvent(object)
		if err != nil {
			return Message{}, err
		}
		object = envelope
	} else if object["data"] == nil && object["data_base64"] == nil {
		from.format = FormatThin
	}
	message, err := parseMetadata(object, from)
	if err != nil {
		return Message{}, err
	}
	if err := addPayload(&message, object); err != nil {
		return Message{}, err
	}
	return message, nil
}

// parseMetadata parses an envelope without its payload.
func parseMetadata(envelope members, from source) (Message, error) {
	message := Message{DeliveryID: from.deliveryID, Attempt: from.attempt, Format: from.format}
	if !isUUID(from.deliveryID) {
		return Message{}, badMessage("the X-Delivery in the body is not a UUID")
	}
	for _, each := range []struct {
		name  string
		value *string
	}{
		{"id", &message.EventID},
		{"type", &message.Type},
		{"timestamp", &message.Timestamp},
		{"lane", &message.Lane},
	} {
		text, err := envelope.text(each.name)
		if err != nil {
			return Message{}, err
		}
		*each.value = text
	}
	var err error
	if message.Tenant, err = envelope.optionalText("tenant"); err != nil {
		return Message{}, err
	}
	if message.Key, err = envelope.optionalText("key"); err != nil {
		return Message{}, err
	}
	if message.Sequence, err = envelope.number("sequence"); err != nil {
		return Message{}, err
	}
	if message.PreviousSequence, err = envelope.number("previous_sequence"); err != nil {
		return Message{}, err
	}
	if err := addOptions(&message, envelope); err != nil {
		return Message{}, err
	}
	if message.PreviousSequence >= message.Sequence {
		return Message{}, badMessage("sequence %d cannot follow %d", message.Sequence, message.PreviousSequence)
	}
	return message, nil
}

// addOptions adds what only replays, backfills and the last delivery of a lane have.
func addOptions(message *Message, envelope members) error {
	if value, found := envelope["replay_of"]; found {
		replayed, isObject := parseObject(value)
		if !isObject {
			return badMessage(`the body's "replay_of" is not an object`)
		}
		lane, err := replayed.text("lane")
		if err != nil {
			return err
		}
		sequence, err := replayed.number("sequence")
		if err != nil {
			return err
		}
		message.ReplayOf = &LanePosition{Lane: lane, Sequence: sequence}
	}
	if _, found := envelope["backfill"]; found {
		backfill, err := envelope.number("backfill")
		if err != nil {
			return err
		}
		message.Backfill = &backfill
	}
	if _, found := envelope["lane_ends"]; found {
		ends, err := envelope.boolean("lane_ends")
		if err != nil {
			return err
		}
		message.LaneEnds = ends
	}
	return nil
}

// errEmptyContentType refuses what would be read as JSON, for which ContentType is "".
var errEmptyContentType = badMessage("the content type is empty")

// addPayload adds `data`, or the bytes of `data_base64`.
func addPayload(message *Message, envelope members) error {
	_, isBinary := envelope["data_base64"]
	if _, found := envelope["content_type"]; found || isBinary {
		// A thin message has the type alone.
		contentType, err := envelope.text("content_type")
		if err != nil {
			return err
		}
		if contentType == "" {
			return errEmptyContentType
		}
		message.ContentType = contentType
	}
	if !isBinary {
		message.Data = envelope["data"]
		return nil
	}
	text, err := envelope.text("data_base64")
	if err != nil {
		return err
	}
	payload, err := decodeBase64(text)
	if err != nil {
		return badMessage(`the body's "data_base64" is not Base64`)
	}
	message.Binary = append([]byte{}, payload...)
	return nil
}
