package ratelimit

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/keytext"
)

// keyParts is what ratelimit.key_parts does in SQL: the only two or more parts that are stored so, or else the key.
func keyParts(key string) []string {
	parts := []string{""}
	for i := 0; i < len(key); i++ {
		last := &parts[len(parts)-1]
		switch key[i] {
		case '|':
			parts = append(parts, "")
		case '\\':
			if i++; i == len(key) {
				return []string{key}
			}
			fallthrough
		default:
			*last += key[i : i+1]
		}
	}
	if len(parts) < 2 || slices.Contains(parts, "") || keytext.Join(parts...) != key {
		return []string{key}
	}
	return parts
}

func TestKeysOfSeveralParts(t *testing.T) {
	limit := TokenBucket("l", 1, time.Minute)
	for _, row := range []struct {
		parts []string
		want  string
	}{
		{[]string{"ann"}, "ann"}, {[]string{"eu", "ann"}, "eu|ann"}, {[]string{`eu\`, "ann"}, `eu\\|ann`},
		{[]string{"a", "b", "c"}, "a|b|c"}, {[]string{"é", "|"}, `é|\|`}, {[]string{"eu|ann", "bob"}, `eu\|ann|bob`}, {[]string{"eu", `C:\bob|`}, `eu|C:\\bob\|`},
		// One part is stored as it is.
		{[]string{"auth0|ann"}, "auth0|ann"}, {[]string{`CORP\ann`}, `CORP\ann`}, {[]string{`\|`}, `\|`}, {[]string{"|"}, "|"}, {[]string{`a\`}, `a\`},
	} {
		if r := limit.Key(row.parts...); r.key != row.want || r.err != nil || keytext.Join(row.parts...) != row.want {
			t.Errorf("%q: %q, %v, want %q", row.parts, r.key, r.err, row.want)
		}
	}
	for _, parts := range [][]string{nil, {""}, {"a", ""}, {"", "a"}, {"a", "", "b"}} {
		if err := limit.Key(parts...).err; !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "Global") {
			t.Errorf("%q: %v", parts, err)
		}
	}
}

// A key may be personal data, and errors are logged.
func TestTheErrorForAKeyDoesNotQuoteIt(t *testing.T) {
	limit := TokenBucket("l", 1, time.Minute)
	for _, key := range []string{"ann@example.org\xff", "ann@example.org\x00", strings.Repeat("ann@example.org", 100)} {
		if err := limit.Key("eu", key).err; !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), "example") || !strings.Contains(err.Error(), `limit "l"`) {
			t.Errorf("%q: %v", key, err)
		}
	}
}

// FuzzKey: a part alone is stored as it is. Several parts have one text, and no other parts have it.
func FuzzKey(f *testing.F) {
	for _, s := range []string{"a", "a,b", "a|b", `a\,b`, `a\|,b`, `\`, "|", "|,|", `\\,|\`, "auth0|ann", `CORP\ann,x`, "é,日本,🚦", `a\,\,|`} {
		f.Add(s, s+"|"+s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if keytext.Join(a) != a {
			t.Fatalf("%q is stored as %q", a, keytext.Join(a))
		}
		of := map[string][]string{}
		for _, s := range []string{a, b} {
			parts := strings.Split(s, ",")
			if len(parts) < 2 {
				continue
			}
			stored := keytext.Join(parts...)
			if other, there := of[stored]; there && !slices.Equal(parts, other) {
				t.Fatalf("%q and %q are both stored as %q", parts, other, stored)
			}
			of[stored] = parts
			if back := keyParts(stored); !slices.Contains(parts, "") && !slices.Equal(back, parts) {
				t.Fatalf("%q became %q, which is %q", parts, stored, back)
			}
		}
		for _, s := range []string{a, b} { // any text: its parts are stored so
			if parts := keyParts(s); keytext.Join(parts...) != s {
				t.Fatalf("%q has the parts %q, which are stored as %q", s, parts, keytext.Join(parts...))
			}
		}
	})
}

func FuzzRequest(f *testing.F) {
	f.Add("ann", "", 1.0)
	f.Add("a\x00", "\xff", math.NaN())
	f.Add(strings.Repeat("|", 600), "b", 1e15)
	f.Add("\xe2\x82", "\xac", math.Copysign(0, -1))
	f.Fuzz(func(t *testing.T, a, b string, count float64) {
		limit := TokenBucket("l", 10, time.Minute, MaxReserved(5))
		parts := []string{a}
		if b != "" {
			parts = append(parts, b)
		}
		request := limit.Key(parts...).Count(count)
		for v, does := range verbs {
			ds, _, err := demands(does, []Request{request}, pgtype.Timestamptz{})
			if err != nil {
				if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrExceedsCapacity) {
					t.Fatal(err)
				}
				continue
			}
			d := ds[0]
			if !acceptable(d.key, maxKeyLen) || !(d.count >= 0 && d.count <= algebra.MaxTokens) || !(d.floor <= 0) {
				t.Fatalf("%s: accepted %+v", v, d)
			}
			if does.deniable && 10-d.count < d.lowest() {
				t.Fatalf("%s: accepted what can never be granted: %+v", v, d)
			}
		}
	})
}

func TestRequestsForOneKeyAreGrantedAsOneAfterAnother(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	eighths := func(n int) float64 { return float64(r.IntN(n)) / 8 } // their sums are exact
	granted, denied, never := 0, 0, 0
	for n := range 20_000 {
		maxReserved := math.Inf(1)
		limit := TokenBucket("l", 10, time.Minute)
		if r.IntN(4) > 0 {
			maxReserved = eighths(64)
			limit = TokenBucket("l", 10, time.Minute, MaxReserved(maxReserved))
		}
		var requests []Request
		for range 1 + r.IntN(5) {
			requests = append(requests, limit.Key("ann").Count(eighths(32)))
		}
		does, floor := verbs[verbConsume], 0.0
		if r.IntN(2) == 0 {
			does, floor = verbs[verbReserve], -maxReserved
		}
		inTurn := func(balance float64) bool {
			for _, request := range requests {
				if balance -= request.tokens; balance < floor {
					return false
				}
			}
			return true
		}
		ds, _, err := demands(does, requests, pgtype.Timestamptz{})
		if errors.Is(err, ErrExceedsCapacity) == inTurn(10) || err != nil && !errors.Is(err, ErrExceedsCapacity) {
			t.Fatalf("seed %d, case %d: %+v: %v, but granted in turn from full: %v", seed, n, requests, err, inTurn(10))
		}
		if err != nil {
			never++
			continue
		}
		balance := 10 - eighths(160)
		if together := balance-ds[0].count >= ds[0].floor; together != inTurn(balance) {
			t.Fatalf("seed %d, case %d: %+v at %v: together %v, in turn %v", seed, n, requests, balance, together, inTurn(balance))
		} else if together {
			granted++
		} else {
			denied++
		}
	}
	if min(granted, denied, never) < 500 {
		t.Errorf("seed %d: %d granted, %d denied, %d never: this tested too little", seed, granted, denied, never)
	}
}

func TestDemandsAreInTheOrderOfLocks(t *testing.T) {
	var requests []Request
	for _, name := range []string{"b", "a", "é", "B", "ab"} {
		for _, key := range []string{"z", "Z", "é", "a|", "a"} {
			requests = append(requests, TokenBucket(name, 10, time.Minute).Key(key))
		}
	}
	ds, _, err := demands(verbs[verbConsume], requests, pgtype.Timestamptz{})
	if err != nil || len(ds) != len(requests) {
		t.Fatal(len(ds), err)
	}
	for i := range ds[1:] {
		a, b := ds[i], ds[i+1]
		if a.limit.name > b.limit.name || a.limit.name == b.limit.name && a.key >= b.key {
			t.Errorf("%q %q comes before %q %q", a.limit.name, a.key, b.limit.name, b.key)
		}
	}
}

func TestRequestsAreValues(t *testing.T) {
	one := TokenBucket("l", 10, time.Minute).Key("ann")
	_ = one.Count(5)
	if one.tokens != 1 {
		t.Errorf("%+v was changed", one)
	}
	if zero := one.Count(0); zero.tokens != 0 {
		t.Errorf("a count of 0 is %v", zero.tokens)
	}
}

func TestMergedRequestsAreNotRefusedForARoundingError(t *testing.T) {
	for i := range 100 {
		count := float64(i) / 10
		limit := TokenBucket("limit", 1, time.Hour, MaxReserved(count))
		ds, _, err := demands(verbs[verbReserve], []Request{limit.Global(), limit.Global().Count(count)}, pgtype.Timestamptz{})
		if err != nil {
			t.Errorf("1 and %v reserved: %v", count, err)
		} else if limit.Capacity()-ds[0].count < ds[0].lowest() {
			t.Errorf("1 and %v reserved: the database would refuse a floor of %v", count, ds[0].lowest())
		}
	}
}

// TestACountAboveTheCapacityIsRefused: only what rounding may have added is forgiven.
func TestACountAboveTheCapacityIsRefused(t *testing.T) {
	for _, capacity := range []float64{1e-9, 0.1, 1, 10, 1e6, 1e9, 1e15 - 1} {
		limit := TokenBucket("limit", capacity, time.Hour)
		for _, v := range []verb{verbConsume, verbCheck, verbWait} {
			if _, _, err := demands(verbs[v], []Request{limit.Global().Count(capacity), limit.Global().Count(min(capacity*1e-16, 1e-4))}, pgtype.Timestamptz{}); err != nil {
				t.Errorf("%s of %v, as rounding makes it: %v", v, capacity, err)
			}
			if _, _, err := demands(verbs[v], []Request{limit.Global().Count(capacity + min(capacity*2e-9, 0.2))}, pgtype.Timestamptz{}); !errors.Is(err, ErrExceedsCapacity) {
				t.Errorf("%s of more than %v: %v", v, capacity, err)
			}
		}
	}
}

func TestADenialForCenturiesDoesNotOverflowItsText(t *testing.T) {
	err := &DeniedError{RetryAfter: neverAfter, Requests: []Status{{Limit: TokenBucket("limit", 1, time.Hour), Count: 1}}}
	if text := err.Error(); strings.Contains(text, "-") {
		t.Error(text)
	}
}
