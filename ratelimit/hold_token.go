package ratelimit

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// The token of a hold with an end is "~", 32 hexadecimal digits of chance, the length of the id in bytes, ":", the id, and a
// list of what is held. Without an end, the token is the id.

// heldTokens is an entry of that list.
type heldTokens struct {
	limit, key string
	count      float64
}

// MarshalJSON keeps the text short.
func (t heldTokens) MarshalJSON() ([]byte, error) {
	return json.Marshal([]any{t.limit, t.key, t.count})
}

// UnmarshalJSON reads it again.
func (t *heldTokens) UnmarshalJSON(text []byte) error {
	fields := []any{&t.limit, &t.key, &t.count}
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	if len(fields) != 3 {
		return errors.New("an entry has three fields")
	}
	return nil
}

// tokenRead is a token in its parts.
type tokenRead struct {
	uuid, id string
	list     []heldTokens
}

var tokenBegin = regexp.MustCompile(`^~([0-9a-f]{32})([1-9][0-9]{0,2}):`)

// newUUID is a random number of 128 bits, 122 of them random, in 32 hexadecimal digits.
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // which never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return hex.EncodeToString(b[:])
}

// checkID refuses an id that cannot be stored, or could be taken for a token.
func checkID(id string) error {
	if err := checkText("id", id, maxIDLen); err != nil {
		return err
	}
	if strings.HasPrefix(id, "~") {
		return errors.New("the id begins with ~, as a Token: to extend a hold, pass no requests")
	}
	if strings.ContainsFunc(id, unicode.IsControl) {
		return errors.New("the id has a control character")
	}
	return nil
}

// holdToken is the token of a hold.
func holdToken(uuid, id string, held []Status) string {
	var list []heldTokens
	for i := range held {
		s := &held[i]
		place := -1
		for j := range list {
			if list[j].limit == s.Limit.name && list[j].key == s.Key {
				place = j
			}
		}
		if place < 0 {
			list = append(list, heldTokens{s.Limit.name, s.Key, s.Count})
		} else {
			list[place].count += s.Count
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		panic(err) // never: counts are finite
	}
	return "~" + uuid + strconv.Itoa(len(id)) + ":" + id + string(text)
}

// readToken reads a token that may have been altered.
func readToken(token string) (t tokenRead, err error) {
	if strings.HasPrefix(token, `{"v":`) {
		return t, errors.New("the token is a receipt: Refund it")
	}
	if !strings.HasPrefix(token, "~") {
		if err := checkID(token); err != nil {
			return t, fmt.Errorf("the token is none: as the id of a hold without an end, %w", err)
		}
		return tokenRead{id: token}, nil
	}
	unreadable := errors.New("the token cannot be read: it was altered, or is of another version")
	match := tokenBegin.FindStringSubmatch(token[:min(len(token), 64)]) // the id comes after that
	if match == nil || len(token) > maxReceiptLen {
		return t, unreadable
	}
	n, _ := strconv.Atoi(match[2])
	rest := token[len(match[0]):]
	if n > len(rest) || checkID(rest[:n]) != nil {
		return t, unreadable
	}
	if t.uuid, t.id, rest = match[1], rest[:n], rest[n:]; rest == "" { // without its list, it ends what is named
		return t, nil
	}
	if json.Unmarshal([]byte(rest), &t.list) != nil || len(t.list) > maxInHold {
		return t, unreadable
	}
	for _, held := range t.list {
		if checkText("name", held.limit, maxNameLen) != nil || held.key != "" && checkText("key", held.key, maxKeyLen) != nil || !countable(held.count) {
			return t, unreadable
		}
	}
	return t, nil
}
