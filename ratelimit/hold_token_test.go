package ratelimit

import (
	"strings"
	"testing"
)

// A token is bounded as a receipt is.
func TestLongTokens(t *testing.T) {
	t.Parallel()
	token := holdToken(strings.Repeat("a", 32), "x", []Status{{Limit: Slots("l", 2), Key: "k", Count: 1}})
	read, err := readToken(token)
	if err != nil || read.id != "x" || len(read.list) != 1 {
		t.Fatalf("%q is read as %+v, %v", token, read, err)
	}
	token += strings.Repeat(" ", maxReceiptLen-len(token))
	if _, err := readToken(token); err != nil {
		t.Errorf("%d bytes: %v", len(token), err)
	}
	if _, err := readToken(token + " "); err == nil || !strings.Contains(err.Error(), "cannot be read") {
		t.Errorf("%d bytes: %v", len(token)+1, err)
	}
}
