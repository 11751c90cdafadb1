package receiver

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"math/big"
	"strings"
)

const (
	secretPrefix    = "whsec_"
	publicKeyPrefix = "whpk_"
	secretBytesMin  = 24
	secretBytesMax  = 64
)

// verificationKey is a shared secret (HMAC) or a public key (Ed25519).
type verificationKey struct {
	// secret is a function, because printing a receiver must not show it.
	secret func() []byte
	public ed25519.PublicKey
}

func (k *verificationKey) version() string {
	if k.public != nil {
		return versionEd25519
	}
	return versionHMAC
}

// parseKey decodes `whsec_…`, the base64 of a secret alone, or `whpk_…`.  Its errors never contain the
// text.
func parseKey(text string) (*verificationKey, error) {
	if strings.Count(text, secretPrefix)+strings.Count(text, publicKeyPrefix) > 1 {
		return nil, errors.New("receiver: secret: one text has several; give each its own, such as " +
			`strings.Split(text, ",")`)
	}
	text = strings.TrimSpace(text)
	if strings.HasPrefix(text, publicKeyPrefix) {
		public, err := parsePublicKey(text)
		if err != nil {
			return nil, err
		}
		return &verificationKey{public: public}, nil
	}
	secret, err := decodeUnpadded(strings.TrimPrefix(text, secretPrefix))
	if err != nil {
		return nil, fmt.Errorf(
			"receiver: secret: must be %d to %d bytes in base64, with or without %q before it, or %q and a public key",
			secretBytesMin, secretBytesMax, secretPrefix, publicKeyPrefix)
	}
	if len(secret) < secretBytesMin || len(secret) > secretBytesMax {
		return nil, fmt.Errorf("receiver: secret: must hold %d to %d bytes, not %d",
			secretBytesMin, secretBytesMax, len(secret))
	}
	return &verificationKey{secret: func() []byte { return secret }}, nil
}

func parsePublicKey(text string) (ed25519.PublicKey, error) {
	key, err := decodeUnpadded(strings.TrimPrefix(text, publicKeyPrefix))
	if err != nil || len(key) != ed25519.PublicKeySize {
		return nil, fmt.Errorf("receiver: key: must be %q, followed by %d bytes in base64",
			publicKeyPrefix, ed25519.PublicKeySize)
	}
	if hasSmallOrder(key) {
		return nil, errors.New("receiver: key: this public key has small order, so signatures can be forged without a private key")
	}
	return key, nil
}

// smallOrderY has the points of small order by their y coordinate, in all encodings, canonical or
// not; the sign bit is ignored.  RFC 8032, section 5.1.7, leaves this check to applications, and
// crypto/ed25519 does not make it.
var smallOrderY = func() []*big.Int {
	prime := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))
	order8 := new(big.Int)
	for _, word := range []uint64{0x7a03ac9277fdc74e, 0xc6cc392cfa53202a, 0x0f67100d760b3cba, 0x4fd84d3d706a17c7} {
		order8.Or(order8.Lsh(order8, 64), new(big.Int).SetUint64(word))
	}
	one := big.NewInt(1)
	return []*big.Int{
		new(big.Int), one, new(big.Int).Sub(prime, one), prime, new(big.Int).Add(prime, one),
		order8, new(big.Int).Sub(prime, order8),
	}
}()

func hasSmallOrder(key []byte) bool {
	bigEndian := make([]byte, len(key))
	for i, b := range key {
		bigEndian[len(key)-1-i] = b
	}
	bigEndian[0] &= 0x7f
	y := new(big.Int).SetBytes(bigEndian)
	for _, each := range smallOrderY {
		if y.Cmp(each) == 0 {
			return true
		}
	}
	return false
}

// decodeUnpadded decodes base64 with or without padding: tools print secrets in both forms.
func decodeUnpadded(text string) ([]byte, error) {
	return decodeBase64(text + strings.Repeat("=", (4-len(text)%4)%4))
}

func decodeBase64(text string) ([]byte, error) {
	// The decoder of the standard library ignores line breaks.
	if strings.ContainsAny(text, "\r\n") {
		return nil, errors.New("line break in base64")
	}
	return base64.StdEncoding.DecodeString(text)
}
