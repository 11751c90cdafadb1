package receiver

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"
)

func testVerifier(t *testing.T, options VerifierOptions, secrets ...string) *Verifier {
	t.Helper()
	if options.Clock == nil {
		options.Clock = testClock
	}
	if len(secrets) == 0 {
		secrets = []string{testKey}
	}
	v, err := NewVerifier(secrets, options)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestSignatureErrors(t *testing.T) {
	ok := event(1).request()
	for name, each := range map[string]struct {
		change func(http.Header)
		cause  error
	}{
		"valid":            {func(http.Header) {}, nil},
		"two signatures":   {func(h http.Header) { h.Set(signatureHeader, "v1,AAAA "+h.Get(signatureHeader)) }, nil},
		"unknown version":  {func(h http.Header) { h.Set(signatureHeader, "v9,x v1a,AAAA "+h.Get(signatureHeader)) }, nil},
		"no id":            {func(h http.Header) { h.Del(idHeader) }, ErrMissingHeader},
		"no signature":     {func(h http.Header) { h.Del(signatureHeader) }, ErrMissingHeader},
		"repeated":         {func(h http.Header) { h.Add("X-Lane", "other") }, ErrRepeatedHeader},
		"dot in the id":    {func(h http.Header) { h.Set(idHeader, "a.b") }, ErrMalformedHeader},
		"no number":        {func(h http.Header) { h.Set(timestampHeader, "1e9") }, ErrMalformedHeader},
		"no version known": {func(h http.Header) { h.Set(signatureHeader, "v9,AAAA") }, ErrMalformedHeader},
		"33 signatures":    {func(h http.Header) { h.Set(signatureHeader, strings.Repeat("v1,a ", 33)) }, ErrMalformedHeader},
		"another secret":   {func(h http.Header) { h.Set(signatureHeader, hmacSignature(otherKey, nil)) }, ErrSignatureMismatch},
		"half a signature": {func(h http.Header) { h.Set(signatureHeader, h.Get(signatureHeader)[:20]) }, ErrSignatureMismatch},
		"changed id":       {func(h http.Header) { h.Set(idHeader, "msg_1") }, ErrSignatureMismatch},
	} {
		header := ok.Header.Clone()
		each.change(header)
		_, err := testVerifier(t, VerifierOptions{}).Verify(header, ok.Body)
		if !errors.Is(err, each.cause) {
			t.Errorf("%s: %v, not %v", name, err, each.cause)
		}
		var typed *SignatureError
		if each.cause != nil && !errors.As(err, &typed) {
			t.Errorf("%s: %T is no SignatureError", name, err)
		}
	}
}

func TestSignatureAge(t *testing.T) {
	for offset, cause := range map[time.Duration]error{
		0: nil, 300 * time.Second: nil, -300 * time.Second: nil,
		301 * time.Second: ErrTimestampTooOld, -301 * time.Second: ErrTimestampTooNew,
	} {
		v := testVerifier(t, VerifierOptions{Clock: func() time.Time { return testTime.Add(offset) }})
		request := event(1).request()
		if _, err := v.Verify(request.Header, request.Body); !errors.Is(err, cause) {
			t.Errorf("%s: %v, not %v", offset, err, cause)
		}
		// A forged request is not refused for its time: its sender would keep and repeat it.
		if _, err := v.Verify(request.Header, []byte("{}")); !errors.Is(err, ErrSignatureMismatch) {
			t.Errorf("%s, forged: %v", offset, err)
		}
	}
}

func TestPublicKeys(t *testing.T) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	key := publicKeyPrefix + base64.StdEncoding.EncodeToString(public)
	request := event(1).request()
	signed := append([]byte(request.Header.Get(idHeader)+".1770000000."), request.Body...)
	request.Header.Set(signatureHeader, "v1a,"+base64.StdEncoding.EncodeToString(ed25519.Sign(private, signed)))
	for _, keys := range [][]string{{key}, {testKey, key}} {
		if _, err := testVerifier(t, VerifierOptions{}, keys...).Verify(request.Header, request.Body); err != nil {
			t.Error(err)
		}
	}
	request.Body[0] = ' '
	if _, err := testVerifier(t, VerifierOptions{}, key).Verify(request.Header, request.Body); !errors.Is(err, ErrSignatureMismatch) {
		t.Error(err)
	}
}

func TestASecretMayLackItsPrefix(t *testing.T) {
	request := event(1).request()
	bare := strings.TrimPrefix(testKey, secretPrefix)
	for _, text := range []string{bare, strings.TrimRight(bare, "="), " " + bare + "\n"} {
		if _, err := testVerifier(t, VerifierOptions{}, text).Verify(request.Header, request.Body); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestInvalidSecretsAreNotInErrors(t *testing.T) {
	// Two points of small order, of libsodium's list.
	for _, order8 := range []string{"26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
		"c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"} {
		point, err := hex.DecodeString(order8)
		if err != nil || !hasSmallOrder(point) {
			t.Errorf("%s has small order", order8)
		}
	}
	zero := publicKeyPrefix + base64.StdEncoding.EncodeToString(make([]byte, 32))
	for _, text := range []string{"", "topsecret", "whsec_topsecret", "whsec_!", "whpk_topsecret", zero} {
		_, err := NewVerifier([]string{text}, VerifierOptions{})
		if err == nil || strings.Contains(err.Error(), "topsecret") {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := NewVerifier(nil, VerifierOptions{}); err == nil {
		t.Error("no secret is no error")
	}
}

func TestPrintingShowsNoSecret(t *testing.T) {
	r, _ := newTestReceiver(t, Options{Fetch: fetchFrom(t, http.NotFoundHandler(), "secrettoken")})
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		printed := fmt.Sprintf(format, r) + fmt.Sprintf(format, r.options.Fetch) + fmt.Sprintf(format, r.verifier)
		for _, text := range []string{"secrettoken", "testing only", "116 101 115 116", "0x74, 0x65, 0x73, 0x74", testKey} {
			if strings.Contains(printed, text) {
				t.Errorf("%s shows %q", format, text)
			}
		}
	}
}

func TestEnvelope(t *testing.T) {
	body := event(math.MaxInt64).with("replay_of", content{"lane": "a", "sequence": 7}).
		with("tenant", "acme").with("backfill", 3).with("lane_ends", true).with("data", nil)
	request := body.request()
	verified, err := testVerifier(t, VerifierOptions{}).Verify(request.Header, request.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := verified.Messages[0]
	if m.Sequence != math.MaxInt64 || m.PreviousSequence != math.MaxInt64-1 || *m.ReplayOf != (LanePosition{"a", 7}) ||
		*m.Tenant != "acme" || *m.Backfill != 3 || !m.LaneEnds || string(m.Data) != "null" || m.Attempt != 1 {
		t.Errorf("%+v", m)
	}
}

func TestInvalidMessages(t *testing.T) {
	for name, body := range map[string]content{
		"float":        event(2).with("previous_sequence", 1.5),
		"not before":   event(2).with("previous_sequence", int64(2)),
		"no type":      event(2).with("type", nil),
		"NUL":          event(2).with("key", "a\x00b"),
		"base64":       event(2).with("data_base64", "A\nAAA").with("content_type", "a/b"),
		"content type": event(2).with("data_base64", "AAAA"),
		"empty type":   event(2).with("data_base64", "").with("content_type", ""),
	} {
		request := body.request()
		_, err := testVerifier(t, VerifierOptions{}).Verify(request.Header, request.Body)
		var bad *MessageError
		if !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBodiesThatAreNotWhatWasSigned(t *testing.T) {
	request := event(1).request()
	for _, body := range []string{
		strings.Replace(string(request.Body), `"order-7"`, `"\ud800"`, 1),
		strings.Replace(string(request.Body), `"order-7"`, "\"\xff\"", 1),
		strings.Replace(string(request.Body), `"lane"`, `"LANE"`, 1),
		"\xef\xbb\xbf" + string(request.Body),
	} {
		sign(request.Header, []byte(body), testTime)
		_, err := testVerifier(t, VerifierOptions{}).Verify(request.Header, []byte(body))
		var bad *MessageError
		if !errors.As(err, &bad) {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestBinaryPayload(t *testing.T) {
	body := event(1).with("data_base64", "AP8=").with("content_type", "image/png")
	delete(body, "data")
	request := body.request()
	verified, err := testVerifier(t, VerifierOptions{}).Verify(request.Header, request.Body)
	if err != nil {
		t.Fatal(err)
	}
	if m := verified.Messages[0]; string(m.Binary) != "\x00\xff" || m.ContentType != "image/png" || m.Data != nil {
		t.Errorf("%+v", m)
	}
}

// rawRequest is a delivery whose metadata is in headers with a signature of their own.
func rawRequest(prefix string) Request {
	header := http.Header{}
	for name, value := range map[string]string{
		"Delivery": deliveryID(2), "Event": "order.paid", "Event-Id": "event-2", "Lane": testLane,
		"Event-Time": "2026-01-31T12:00:00.000001Z", "Event-Key": "100%25 %C3%A9", "Sequence": "2",
		"Previous-Sequence": "1", "Replay-Of": "a/b/7",
	} {
		header.Set(prefix+name, value)
	}
	header.Set(idHeader, deliveryID(2))
	header.Set("Content-Type", "application/json")
	body := []byte("12345678901234567890")
	sign(header, body, testTime)
	text := "metadata." + deliveryID(2) + ".1770000000.content-type:application/json\ndelivery:" + deliveryID(2) +
		"\nevent:order.paid\nevent-id:event-2\nevent-time:2026-01-31T12:00:00.000001Z\nevent-key:100%25 %C3%A9" +
		"\nlane:" + testLane + "\nsequence:2\nprevious-sequence:1\nreplay-of:a/b/7"
	header.Set(metadataSignatureHeader, hmacSignature(testKey, []byte(text)))
	return Request{Method: http.MethodPost, Header: header, Body: body}
}

func TestSignedMetadata(t *testing.T) {
	request := rawRequest("X-Acme-")
	v := testVerifier(t, VerifierOptions{HeaderPrefixes: []string{"X-", "X-Acme-"}, Formats: []Format{FormatRaw}})
	verified, err := v.Verify(request.Header, request.Body)
	if err != nil {
		t.Fatal(err)
	}
	m := verified.Messages[0]
	if *m.Key != "100% é" || m.Sequence != 2 || *m.ReplayOf != (LanePosition{"a/b", 7}) ||
		string(m.Data) != "12345678901234567890" || m.Format != FormatRaw {
		t.Errorf("%+v", m)
	}
	for header, value := range map[string]string{
		"X-Acme-Sequence": "3", "Content-Type": "text/plain", metadataSignatureHeader: request.Header.Get(signatureHeader),
	} {
		changed := request.Header.Clone()
		changed.Set(header, value)
		if _, err := v.Verify(changed, request.Body); !errors.Is(err, ErrSignatureMismatch) {
			t.Errorf("%s: %v", header, err)
		}
	}
	var bad *MessageError
	if _, err := testVerifier(t, VerifierOptions{Formats: []Format{FormatEnvelope}, HeaderPrefixes: []string{"X-Acme-"}}).
		Verify(request.Header, request.Body); !errors.As(err, &bad) {
		t.Errorf("another format: %v", err)
	}
	stripped := http.Header{}
	stripped.Set(idHeader, deliveryID(2))
	sign(stripped, request.Body, testTime)
	if _, err := v.Verify(stripped, request.Body); !errors.As(err, &bad) {
		t.Errorf("without its headers: %v", err)
	}
}

func TestBatches(t *testing.T) {
	v := testVerifier(t, VerifierOptions{})
	request := batch(event(1), event(2), event(3))
	verified, err := v.Verify(request.Header, request.Body)
	if err != nil || len(verified.Messages) != 3 {
		t.Fatal(verified, err)
	}
	request = batch(event(1), event(3))
	if _, err := v.Verify(request.Header, request.Body); err == nil {
		t.Error("a batch with a hole was accepted")
	}
}
