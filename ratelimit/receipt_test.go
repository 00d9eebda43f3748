package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

var (
	receiptNoon  = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	receiptLimit = TokenBucket("bucket", 10, time.Hour, Shards(2))
)

// receiptText is a receipt for 8 of ann's 10 tokens, taken from one of two shards.
const receiptText = `{"v":1,"at":"2026-07-01T12:00:00Z","runAt":"2026-07-01T12:05:00Z","taken":[{"limit":"bucket","key":"ann","count":8,"refunded":3,"held":2,"rows":1,"shards":2}]}`

func TestReceiptsThatCannotBeAreRefused(t *testing.T) {
	r, err := Receipt(receiptText).read()
	if err != nil || r.text() != receiptText {
		t.Fatalf("%v, and %v became %v", err, receiptText, r)
	}
	for _, change := range [][2]string{
		{receiptText, ""}, {receiptText, "{}"}, {receiptText, "null"}, {receiptText, "[]"}, {"}]}", "}]"}, {"}]}", "}]}{}"}, {"}]}", "}]} 1"},
		{`"v":1`, `"v":2`}, {`"v":1`, `"v":1,"more":1`}, {`"at":"2026`, `"at":"0026`}, {`"runAt":"2026`, `"runAt":"0999`},
		{`{"limit"`, `{"limit":"bucket","key":"ann","count":1,"held":2,"rows":1,"shards":2},{"limit"`},
		{`"count":8`, `"count":-8`}, {`"count":8`, `"count":1e16`}, {`"count":8`, `"count":1e-16`}, {`"count":8`, `"count":1e999`},
		{`"refunded":3`, `"refunded":-1`}, {`"refunded":3`, `"refunded":8.1`}, {`"held":2`, `"held":1e301`}, {`"held":2`, `"held":-1e301`},
		{`"rows":1`, `"rows":0`}, {`"rows":1`, `"rows":3`}, {`"rows":1,"shards":2`, `"rows":1,"shards":0`}, {`"rows":1,"shards":2`, `"rows":0,"shards":0`},
		{`"shards":2`, `"shards":101`},
	} {
		if !strings.Contains(receiptText, change[0]) {
			t.Fatalf("there is no %s", change[0])
		}
		altered := Receipt(strings.Replace(receiptText, change[0], change[1], 1))
		_, err := new(Limiter).newCall(verbRefund, about{receipt: altered}, []Request{receiptLimit.Key("ann")}, nil)
		if _, unread := altered.read(); unread == nil || !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), `limit "bucket": the receipt`) {
			t.Errorf("%s: %v", altered, err)
		}
	}
}

// A receipt that is too long is not parsed. One of the greatest length is read in a time that grows with its length, not with the square
// of the number of its keys: 14,000 keys are a hundred million comparisons otherwise.
func TestLongReceipts(t *testing.T) {
	entry := func(i int) string {
		return fmt.Sprintf(`{"limit":"b","key":"%d","count":1,"held":0,"rows":1,"shards":1}`, i)
	}
	text := strings.Builder{}
	text.WriteString(`{"v":1,"at":"2026-07-01T12:00:00Z","runAt":"2026-07-01T12:00:00Z","taken":[` + entry(0))
	for i := 1; text.Len() < maxReceiptLen-100; i++ {
		text.WriteString("," + entry(i))
	}
	text.WriteString("]}")
	r, err := Receipt(text.String()).read()
	if err != nil || len(r.Taken) < 14000 {
		t.Fatal(err)
	}
	if r.find("b", "13000") != &r.Taken[13000] || r.find("b", "x") != nil {
		t.Error("an entry is not found")
	}
	text.Reset()
	fmt.Fprintf(&text, `{"v":1,"at":"2026-07-01T12:00:00Z","runAt":"2026-07-01T12:00:00Z","taken":[%s,%s]}`, entry(1), entry(1))
	if _, err := Receipt(text.String()).read(); err == nil {
		t.Error("a key twice")
	}
	long := Receipt(strings.Repeat(" ", maxReceiptLen) + receiptText) // which would be read
	if _, err := new(Limiter).newCall(verbRefund, about{receipt: long}, []Request{receiptLimit.Key("ann")}, nil); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("a longer one: %v", err)
	}
}

// A newer version's fields that may be ignored are kept, also after a partial refund.
func TestAReceiptKeepsOptionalFields(t *testing.T) {
	newer := strings.NewReplacer(`"taken"`, `"x-by":{"v":2},"taken"`, `"held":2`, `"x-a":[1],"held":2,"x-b":null`).Replace(receiptText)
	r, err := Receipt(newer).read()
	if err != nil {
		t.Fatal(err)
	}
	r.refund([]demand{{limit: receiptLimit, key: "ann", numbers: receiptLimit.numbers, count: 1}}, nil, &answer{at: algebra.At(receiptNoon), rows: [][]algebra.Row{nil}})
	want := strings.NewReplacer(`"refunded":3,"held":2`, `"refunded":4,"held":3`, `"shards":2`, `"shards":2,"x-a":[1],"x-b":null`, `]}`, `],"x-by":{"v":2}}`).Replace(receiptText)
	if got := string(r.text()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for _, refused := range []string{`"X-by":1`, `"x_by":1`, `"xby":1`, `"more":1`} {
		for _, place := range []string{`"taken"`, `"held"`} {
			altered := Receipt(strings.Replace(receiptText, place, refused+","+place, 1))
			if _, err := altered.read(); err == nil || !strings.Contains(err.Error(), "unknown field") {
				t.Errorf("%s: %v", altered, err)
			}
		}
	}
}

func TestARefundWithoutRequestsIsOfAllThatIsLeft(t *testing.T) {
	varying := TokenBucket("varying", 10, time.Hour, Varies(24*time.Hour))
	entry := `{"limit":"bucket","key":"ann","count":8,"refunded":3,"held":2,"rows":1,"shards":2}`
	with := func(entries ...string) Receipt {
		return Receipt(strings.Replace(receiptText, entry, strings.Join(entries, ","), 1))
	}
	for name, row := range map[string]struct {
		receipt Receipt
		wrong   string
	}{
		"of one key":              {with(entry), ""},
		"of two":                  {with(entry, strings.Replace(entry, "ann", "bob", 1)), ""},
		"of an unknown limit":     {with(entry, strings.Replace(entry, "bucket", "other", 1)), `limit "other": this Limiter does not know its numbers`},
		"of a limit that varies":  {with(strings.Replace(entry, "bucket", "varying", 1)), `limit "varying": its keys`},
		"of a key that cannot be": {with(strings.Replace(entry, "ann", `\u0000`, 1)), "NUL"},
		"of too little":           {with(strings.Replace(strings.Replace(entry, `"count":8`, `"count":1e-15`, 1), `"refunded":3`, `"refunded":5e-16`, 1)), "nothing left"},
		"empty":                   {"", "or it was lost: the JSON of a Result has none, so store Result.Receipt()"},
		"of nothing":              {with(strings.Replace(strings.Replace(entry, `"count":8`, `"count":0`, 1), `"refunded":3`, `"refunded":0`, 1)), ""},
	} {
		var l Limiter
		for _, known := range []Limit{receiptLimit, varying} {
			if err := l.definitions.check([]Request{known.Key("any")}); err != nil {
				t.Fatal(err)
			}
		}
		c, err := l.newCall(verbRefund, about{receipt: row.receipt}, nil, nil)
		if row.wrong != "" {
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), row.wrong) {
				t.Errorf("%s: %v, want %s", name, err, row.wrong)
			}
			continue
		}
		read, _ := row.receipt.read()
		if err != nil || len(c.requests) != len(read.Taken) || len(c.demands) != len(read.Taken) {
			t.Errorf("%s: %v, %v", name, c.requests, err)
			continue
		}
		for i, taken := range read.Taken {
			if r := c.requests[i]; r.limit != receiptLimit || r.key != taken.Key || r.tokens != taken.Count-taken.Refunded {
				t.Errorf("%s: %+v", name, r)
			}
		}
	}
}

func TestAReceiptIsForWhatItNames(t *testing.T) {
	for _, row := range []struct {
		name     string
		requests []Request
		refused  bool
	}{
		{"what is left", []Request{receiptLimit.Key("ann").Count(5)}, false},
		{"in two parts", []Request{receiptLimit.Key("ann").Count(2), receiptLimit.Key("ann").Count(3)}, false},
		{"more than is left", []Request{receiptLimit.Key("ann").Count(5.01)}, true},
		{"more in two parts", []Request{receiptLimit.Key("ann").Count(3), receiptLimit.Key("ann").Count(3)}, true},
		{"all of it", []Request{receiptLimit.Key("ann")}, false},
		{"all of it twice", []Request{receiptLimit.Key("ann"), receiptLimit.Key("ann")}, false},
		{"a part, and the rest", []Request{receiptLimit.Key("ann"), receiptLimit.Key("ann").Count(3)}, false},
		{"but for rounding", []Request{receiptLimit.Key("ann").Count(5 + 4e-12)}, false},
		{"another key", []Request{receiptLimit.Key("bob")}, true},
		{"another limit", []Request{TokenBucket("other", 10, time.Hour).Key("ann")}, true},
		{"one of two", []Request{receiptLimit.Key("ann"), receiptLimit.Key("bob")}, true},
	} {
		c, err := new(Limiter).newCall(verbRefund, about{receipt: receiptText}, row.requests, nil)
		if refused := errors.Is(err, ErrInvalid); refused != row.refused {
			t.Errorf("%s: %v", row.name, err)
		} else if !refused && c.demands[0].count != 5 {
			t.Errorf("%s: %v are given back", row.name, c.demands[0].count)
		}
	}
}

// The rest of a receipt has everything that the next refund needs.
func TestAReceiptSaysWhatIsLeft(t *testing.T) {
	at := algebra.At(receiptNoon)
	for _, row := range []struct {
		name      string
		count     float64
		rows      []algebra.Row // as they are then
		held      held
		left      taken // for limit and key
		remaining float64
	}{
		{"a part", 2, []algebra.Row{{Value: 2, TS: at}, {Value: 2, TS: at}}, held{moved: []float64{2}}, taken{Count: 8, Refunded: 5, Held: 4, Rows: 1, Shards: 2}, 4},
		{"no rows", 2, nil, held{moved: []float64{0}}, taken{Count: 8, Refunded: 5, Held: 4, Rows: 1, Shards: 2}, 10},
		{"a debt of a charge is paid", 2, []algebra.Row{{Value: 0.75, TS: at}, {Value: 0.75, TS: at}}, held{moved: []float64{2}}, taken{Count: 8, Refunded: 5, Held: 4, Rows: 1, Shards: 2}, 1.5},
		{"a debt to waiting work is paid", 2, []algebra.Row{{Value: 0.75, TS: at}, {Value: 0.75, TS: at}}, held{moved: []float64{2}, lost: []int{1}}, taken{Count: 8, Refunded: 5, Held: 4.5, Rows: 1, Shards: 2}, 1.5},
		{"all", 5, []algebra.Row{{Value: 2.5, TS: at}, {Value: 2.5, TS: at}}, held{moved: []float64{3}}, taken{}, 5},
		{"all but for rounding", 5 - 4e-12, []algebra.Row{{Value: 2.5, TS: at}, {Value: 2.5, TS: at}}, held{moved: []float64{3}}, taken{}, 5},
	} {
		c, err := new(Limiter).newCall(verbRefund, about{receipt: receiptText}, []Request{receiptLimit.Key("ann").Count(row.count)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		result, a := unanswered(c.verb, c.requests), &answer{granted: true, at: at, rows: [][]algebra.Row{row.rows}, held: row.held}
		c.fill(&result, a)
		if remaining := result.Requests[0].Remaining; math.Abs(remaining-row.remaining) > 1e-9 {
			t.Errorf("%s: %v remain, want %v", row.name, remaining, row.remaining)
		}
		if reflect.DeepEqual(row.left, taken{}) {
			if left := result.Receipt(); left != "" {
				t.Errorf("%s: nothing is left, but the receipt is %s", row.name, left)
			}
			continue
		}
		row.left.Limit, row.left.Key = "bucket", "ann"
		left, err := result.Receipt().read()
		if err != nil || !left.At.Equal(receiptNoon) || !left.RunAt.Equal(receiptNoon.Add(5*time.Minute)) || len(left.Taken) != 1 || !reflect.DeepEqual(left.Taken[0], row.left) {
			t.Errorf("%s: left is %+v, %v, want %+v", row.name, left, err, row.left)
		}
	}
}

func TestAReceiptSaysWhatWasTaken(t *testing.T) {
	bob := FixedWindow("window", 10, time.Hour).Key("bob")
	result := Result{OK: true, At: receiptNoon, runAt: algebra.At(receiptNoon.Add(time.Minute)), Requests: []Status{
		{Limit: receiptLimit, Key: "ann", Count: 9, Taken: 2, took: took{held: 1, rows: 1}},
		{Limit: bob.limit, Key: "bob", Count: 9, Taken: 4, took: took{held: -3, rows: 1}},
		{Limit: receiptLimit, Key: "ann", Count: 9, Taken: 0.5, took: took{held: 1, rows: 1}},
		{Limit: bob.limit, Key: "cid", Count: 9, Taken: 0, took: took{held: 10, rows: 1}},
		{Limit: bob.limit, Key: "dan", Count: 3},
	}}
	want := Receipt(`{"v":1,"at":"2026-07-01T12:00:00Z","runAt":"2026-07-01T12:01:00Z","taken":[` +
		`{"limit":"bucket","key":"ann","count":2.5,"held":1,"rows":1,"shards":2},{"limit":"window","key":"bob","count":4,"held":-3,"rows":1,"shards":1},` +
		`{"limit":"window","key":"cid","count":0,"held":10,"rows":1,"shards":1}]}`) // 0 tokens taken, so 0 can be refunded
	if got := result.Receipt(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	late := receiptNoon.AddDate(1000, 0, 0) // a Duration ends after 292 years
	result.runAt = algebra.At(late)
	if made, err := result.Receipt().read(); err != nil || !made.RunAt.Equal(late) {
		t.Errorf("%+v, %v; want work that runs at %v", made, err, late)
	}
	result.Requests = result.Requests[4:]
	if got := result.Receipt(); got != "" {
		t.Errorf("nothing was taken, but the receipt is %s", got)
	}
	one, all := (&receipt{}).algebra(&taken{Rows: 1, Shards: 4}), (&receipt{}).algebra(&taken{Rows: 4, Shards: 4})
	if one.Part != 0.25 || all.Part != 1 {
		t.Errorf("one of four shards is %v, all of them %v", one.Part, all.Part)
	}
}
