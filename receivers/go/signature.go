package receiver

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Signatures of Standard Webhooks 1.0,
// https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
//
// The signed text is `{webhook-id}.{webhook-timestamp}.{body}`; the header webhook-signature has
// one or more signatures, separated by spaces, each with its version.

const (
	idHeader                = "webhook-id"
	timestampHeader         = "webhook-timestamp"
	signatureHeader         = "webhook-signature"
	metadataSignatureHeader = "webhook-metadata-signature"

	versionHMAC    = "v1"
	versionEd25519 = "v1a"

	signaturesMax = 32
	// Every Ed25519 check costs a pass over the body, and unauthenticated senders can cause it.
	ed25519SignaturesMax = 4

	// SignatureTolerance is the default of the maximum difference between the signed time and the
	// clock.
	SignatureTolerance = 300 * time.Second
)

var timestampText = regexp.MustCompile(`\A[0-9]{1,15}\z`)

// signedRequest has the signed values of a verified request, besides the body.
type signedRequest struct {
	id        string
	timestamp int64
}

// verifyBody verifies that one of the keys signed the body within the tolerance.
//
// Signatures of versions without a key are ignored, as the specification requires.
func verifyBody(headers map[string]string, body []byte, keys []*verificationKey, now time.Time,
	tolerance time.Duration) (signedRequest, error) {
	for _, name := range []string{idHeader, timestampHeader, signatureHeader} {
		if headers[name] == "" {
			return signedRequest{}, headerError(ErrMissingHeader, name, "is missing")
		}
	}
	id, text := headers[idHeader], headers[timestampHeader]
	if strings.Contains(id, ".") {
		// Otherwise the same signed bytes could be another id, time stamp and body.
		return signedRequest{}, headerError(ErrMalformedHeader, idHeader,
			`contains a ".", which separates the signed parts`)
	}
	if !timestampText.MatchString(text) {
		return signedRequest{}, headerError(ErrMalformedHeader, timestampHeader,
			"is not a number of epoch seconds")
	}
	candidates, err := parseSignatures(signatureHeader, headers[signatureHeader], keys)
	if err != nil {
		return signedRequest{}, err
	}
	timestamp, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return signedRequest{}, headerError(ErrMalformedHeader, timestampHeader,
			"is not a number of epoch seconds")
	}
	signed := append([]byte(id+"."+text+"."), body...)
	if err := requireMatch(signed, candidates, keys); err != nil {
		return signedRequest{}, err
	}
	// Last, so that the error of a time shows that the request has a valid signature.
	if err := checkAge(time.Unix(timestamp, 0), now, tolerance); err != nil {
		return signedRequest{}, err
	}
	return signedRequest{id: id, timestamp: timestamp}, nil
}

func checkAge(signedAt, now time.Time, tolerance time.Duration) error {
	if signedAt.Before(now.Add(-tolerance)) {
		return &SignatureError{Cause: ErrTimestampTooOld, text: fmt.Sprintf(
			"signed %d s ago; %g s are tolerated", now.Unix()-signedAt.Unix(), tolerance.Seconds())}
	}
	if signedAt.After(now.Add(tolerance)) {
		return &SignatureError{Cause: ErrTimestampTooNew, text: fmt.Sprintf(
			"signed %d s in the future; %g s are tolerated", signedAt.Unix()-now.Unix(),
			tolerance.Seconds())}
	}
	return nil
}

// verifyText verifies that one of the keys signed a text besides the body.
func verifyText(header, signatures string, signed []byte, keys []*verificationKey) error {
	candidates, err := parseSignatures(header, signatures, keys)
	if err != nil {
		return err
	}
	return requireMatch(signed, candidates, keys)
}

// parseSignatures returns the signatures by version, for versions with a key.
func parseSignatures(header, text string, keys []*verificationKey) (map[string][]string, error) {
	signatures := strings.Split(text, " ")
	if len(signatures) > signaturesMax {
		return nil, headerError(ErrMalformedHeader, header,
			fmt.Sprintf("has more than %d signatures", signaturesMax))
	}
	var versions []string
	for _, version := range []string{versionHMAC, versionEd25519} {
		for _, key := range keys {
			if key.version() == version {
				versions = append(versions, version)
				break
			}
		}
	}
	byVersion := map[string][]string{}
	for _, signature := range signatures {
		version, encoded, found := strings.Cut(signature, ",")
		for _, known := range versions {
			if found && version == known {
				byVersion[version] = append(byVersion[version], encoded)
			}
		}
	}
	if len(byVersion[versionEd25519]) > ed25519SignaturesMax {
		return nil, headerError(ErrMalformedHeader, header, fmt.Sprintf(
			"has more than %d signatures of version %s", ed25519SignaturesMax, versionEd25519))
	}
	if len(byVersion) == 0 {
		return nil, headerError(ErrMalformedHeader, header,
			"has no signature of version "+strings.Join(versions, " or "))
	}
	return byVersion, nil
}

func requireMatch(signed []byte, candidates map[string][]string, keys []*verificationKey) error {
	matches := 0
	for _, key := range keys {
		// No early exit: the duration must not reveal which secret matched.
		if key.public != nil {
			for _, candidate := range candidates[versionEd25519] {
				signature, err := decodeBase64(candidate)
				if err == nil && ed25519.Verify(key.public, signed, signature) {
					matches++
				}
			}
			continue
		}
		mac := hmac.New(sha256.New, key.secret())
		mac.Write(signed)
		expected := []byte(base64.StdEncoding.EncodeToString(mac.Sum(nil)))
		for _, candidate := range candidates[versionHMAC] {
			matches += subtle.ConstantTimeCompare(expected, []byte(candidate))
		}
	}
	if matches == 0 {
		return &SignatureError{Cause: ErrSignatureMismatch,
			text: "no signature matches: the secret differs, or the request was changed in transit"}
	}
	return nil
}
