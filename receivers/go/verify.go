package receiver

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"sort"
	"strings"
	"time"
)

// Verified is a request with a valid signature.
type Verified struct {
	// MessageID is the header webhook-id: the idempotency key of the request.  For a batch use the
	// DeliveryID of each message instead.
	MessageID string
	// Timestamp is the time of the signature.
	Timestamp time.Time
	// Messages has the delivery of a relay, or those of a batch; it is empty for requests of other
	// senders of Standard Webhooks.
	Messages []Message
}

// VerifierOptions are the options of [NewVerifier]; the zero value has the defaults.
type VerifierOptions struct {
	// HeaderPrefixes is the endpoint's `header_prefix`; both while it is being changed.  Default:
	// "X-".
	HeaderPrefixes []string
	// Formats is the endpoint's format; several while it is being changed.  Default: any.  An
	// endpoint whose format is raw or cloudevents-binary needs it: otherwise a payload that looks
	// like an envelope is read as one when headers are removed in transit.
	Formats []Format
	// Tolerance is the maximum difference between the signed time and the clock.  Default: 300 s.
	Tolerance time.Duration
	// Clock returns the time.  Default: time.Now.
	Clock func() time.Time
}

// Verifier verifies requests with a fixed set of keys.  It is safe for concurrent use.
type Verifier struct {
	keys           []*verificationKey
	prefixes       []string
	formats        map[Format]bool
	fetchedFormats map[Format]bool
	tolerance      time.Duration
	clock          func() time.Time
	names          map[string]bool
}

// NewVerifier returns a Verifier.
//
// The secrets are one or more of whsec_… (HMAC, also without its prefix) and whpk_… (Ed25519 public
// key): both the old and the new one while a secret is being rotated.  It returns an error if there is no secret, or an
// option is invalid; the error never contains a secret.
func NewVerifier(secrets []string, options VerifierOptions) (*Verifier, error) {
	v := &Verifier{
		prefixes:  options.HeaderPrefixes,
		tolerance: options.Tolerance,
		clock:     options.Clock,
		names: map[string]bool{
			idHeader: true, timestampHeader: true, signatureHeader: true, metadataSignatureHeader: true,
			contentTypeHeader: true,
		},
	}
	for _, text := range secrets {
		key, err := parseKey(text)
		if err != nil {
			return nil, err
		}
		v.keys = append(v.keys, key)
	}
	if len(v.keys) == 0 {
		return nil, errors.New("receiver: secret: at least one is required to verify signatures")
	}
	if v.tolerance == 0 {
		v.tolerance = SignatureTolerance
	}
	if v.tolerance < 0 {
		return nil, fmt.Errorf("receiver: tolerance: must not be negative, as %s", v.tolerance)
	}
	if v.clock == nil {
		v.clock = time.Now
	}
	if len(v.prefixes) == 0 {
		v.prefixes = []string{DefaultHeaderPrefix}
	}
	for _, prefix := range v.prefixes {
		if err := checkHeaderPrefix(prefix); err != nil {
			return nil, err
		}
		for _, name := range relayNames {
			v.names[strings.ToLower(prefix)+name] = true
		}
	}
	for _, name := range attributeNames {
		v.names[attributePrefix+name] = true
	}
	return v, v.setFormats(options.Formats)
}

func (v *Verifier) setFormats(given []Format) error {
	if len(given) == 0 {
		return nil
	}
	v.formats, v.fetchedFormats = map[Format]bool{}, map[Format]bool{}
	for _, format := range given {
		known := false
		for _, each := range formats {
			known = known || each == format
		}
		if !known {
			return fmt.Errorf("receiver: formats: there is no format %q", format)
		}
		v.formats[format] = true
		// What is fetched has what a thin message leaves out.
		if format == FormatThin {
			format = FormatEnvelope
		}
		v.fetchedFormats[format] = true
	}
	return nil
}

// Verify verifies one request and parses its deliveries.
//
// The body has to be the raw one, not parsed and serialized again.  The error is a
// [*SignatureError], or a [*MessageError] if the request is signed but not a valid delivery.
func (v *Verifier) Verify(header http.Header, body []byte) (*Verified, error) {
	return v.verify(header, body, false)
}

// Verify verifies one request with the default options; see [Verifier.Verify].
func Verify(header http.Header, body []byte, secrets ...string) (*Verified, error) {
	verifier, err := NewVerifier(secrets, VerifierOptions{})
	if err != nil {
		return nil, err
	}
	return verifier.Verify(header, body)
}

// verify verifies a request; fetched: it was fetched, so a thin message has its payload.
func (v *Verifier) verify(header http.Header, body []byte, fetched bool) (*Verified, error) {
	headers, err := foldHeaders(header, v.names)
	if err != nil {
		return nil, err
	}
	signed, err := verifyBody(headers, body, v.keys, v.clock(), v.tolerance)
	if err != nil {
		return nil, err
	}
	verified := &Verified{MessageID: signed.id, Timestamp: time.Unix(signed.timestamp, 0).UTC()}
	prefix, described := v.describedBy(headers)
	// Headers without a signature of their own can be removed: that must not turn a delivery into a
	// request of another sender.
	if described || isDelivery(body) {
		verified.Messages, err = v.parseSigned(headers, body, prefix, signed)
		if err != nil {
			return nil, err
		}
		if err := v.checkFormat(verified.Messages[0].Format, fetched); err != nil {
			return nil, err
		}
		return verified, nil
	}
	if isDeliveryID(signed.id) {
		return nil, badMessage("the headers of the delivery are missing")
	}
	return verified, nil
}

// describedBy returns the first prefix under which headers describe a delivery.
func (v *Verifier) describedBy(headers map[string]string) (string, bool) {
	// Publishers cannot set the lane under any prefix, but other names of another prefix.
	for _, prefix := range v.prefixes {
		if _, found := headers[strings.ToLower(prefix)+"lane"]; found {
			return prefix, true
		}
	}
	for _, prefix := range v.prefixes {
		for _, name := range relayNames {
			// Other senders may number their attempts, too.
			if name == "attempt" || name == "last-sequence" {
				continue
			}
			if _, found := headers[strings.ToLower(prefix)+name]; found {
				return prefix, true
			}
		}
	}
	return v.prefixes[0], false
}

func (v *Verifier) parseSigned(headers map[string]string, body []byte, prefix string,
	signed signedRequest) ([]Message, error) {
	signatures, metadataIsSigned := headers[metadataSignatureHeader]
	if metadataIsSigned {
		text := signedMetadata(headers, prefix, signed)
		if err := verifyText(metadataSignatureHeader, signatures, text, v.keys); err != nil {
			return nil, err
		}
	}
	return parseRequest(deliveryHeaders{values: headers, prefix: prefix}, body, metadataIsSigned)
}

func (v *Verifier) checkFormat(format Format, fetched bool) error {
	accepted := v.formats
	if fetched {
		if format == FormatThin {
			return badMessage("what was fetched has no payload")
		}
		accepted = v.fetchedFormats
	}
	if accepted == nil || accepted[format] {
		return nil
	}
	names := make([]string, 0, len(accepted))
	for each := range accepted {
		names = append(names, string(each))
	}
	sort.Strings(names)
	return badMessage("the format is %s, not %s", format, strings.Join(names, " or "))
}

// isDelivery reports whether the body is a relay's delivery or batch, regardless of the headers.
func isDelivery(body []byte) bool {
	if !bytes.Contains(body, []byte(`"previous_sequence"`)) && !bytes.Contains(body, []byte(`"previoussequence"`)) {
		return false
	}
	if checkJSON(body) != nil {
		return false
	}
	elements, isArray := parseArray(body)
	if !isArray {
		elements = append(elements, body)
	}
	for _, element := range elements {
		object, isObject := parseObject(element)
		if !isObject || !(object.has("lane", "sequence", "previous_sequence") ||
			object.has("lane", "lanesequence", "previoussequence")) {
			return false
		}
	}
	return true
}

func (m members) has(names ...string) bool {
	for _, name := range names {
		if _, found := m[name]; !found {
			return false
		}
	}
	return true
}
