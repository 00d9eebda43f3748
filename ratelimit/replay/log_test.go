package replay_test

import (
	"cmp"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"iter"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

// read is the events as text: the time after noon, key and count, or the error.
func read(events iter.Seq2[replay.Event, error]) (lines []string) {
	for e, err := range events {
		if err != nil {
			lines = append(lines, err.Error())
		} else {
			lines = append(lines, fmt.Sprint(e.Time.Sub(noon), " ", e.Key, " ", e.Count))
		}
	}
	return lines
}

// compare compares the events with what is wanted: a line, or the beginning of an error.
func compare(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %q, want %q", what, got, want)
		return
	}
	for i := range got {
		if got[i] != want[i] && (!strings.HasPrefix(got[i], want[i]) || !strings.Contains(want[i], "invalid")) {
			t.Errorf("%s: %q, want %q", what, got[i], want[i])
		}
	}
}

const invalid = "ratelimit: invalid: "

func TestJSONLines(t *testing.T) {
	fields := replay.Fields{Time: "t", Key: "user.id", Count: "n"}
	compare(t, "lines", read(replay.JSONLines(strings.NewReader(
		`{"t":"2026-07-01T12:00:00.5Z","user":{"id":"ann <b>"},"n":2.5,"more":[1]}`+"\n\n"+
			`{"t":"2026-07-01 14:00:01+02","user":{"id":9007199254740993},"n":"3"}`+"\r\n"+
			`not JSON`+"\n"+
			`[1]`+"\n"+
			`{"t":"yesterday","user":{"id":"x"},"n":1}`+"\n"+
			`{"t":null,"user":{"id":"x"},"n":1}`+"\n"+
			`{"t":"2026-07-01T12:00:00Z","user":"x","n":1}`+"\n"+
			`{"t":"2026-07-01T12:00:00Z","user":{"id":""},"n":1}`+"\n"+
			`{"t":"2026-07-01T12:00:00Z","user":{"id":{}},"n":1}`+"\n"+
			`{"t":"2026-07-01T12:00:00Z","user":{"id":"x"},"n":"many"}`+"\n"+
			`{"t":"2026-07-01T12:00:00Z","user":{"id":"x"}}`+"\n"+
			strings.Repeat(`{"user":`, 20_000)+"\n"+
			`{"t":"2026-07-01T12:00:02Z","user":{"id":true},"n":0}`), fields)),
		"500ms ann <b> 2.5", "1s 9007199254740993 3",
		"replay: line 4: "+invalid+"not a JSON object", "replay: line 5: "+invalid+"not a JSON object",
		"replay: line 6: "+invalid+`the time "t" is neither RFC 3339`, "replay: line 7: "+invalid+`the time "t" is missing`,
		"replay: line 8: "+invalid+`the key "user.id" is missing`, "replay: line 9: "+invalid+`the key "user.id" is empty`,
		"replay: line 10: "+invalid+`the key "user.id" is an object`, "replay: line 11: "+invalid+`the count "n" is not a number: "many"`,
		"replay: line 12: "+invalid+`the count "n" is missing`, "replay: line 13: "+invalid,
		"2s true 0")
}

func TestCSV(t *testing.T) {
	fields := replay.Fields{Time: "t", Key: "k", Count: "n"}
	compare(t, "by name", read(replay.CSV(strings.NewReader(
		"\ufeffn,\"k\",t\n1,\"a\nb\",2026-07-01 12:00:00\n2,ann,2026-07-01T12:00:01Z\n3,bob\n4,x\"y,2026-07-01T12:00:01Z\n5,,2026-07-01T12:00:01Z\n6,eve,2026-07-01T12:00:02Z"), fields)),
		"0s a\nb 1", "1s ann 2", "replay: line 5: "+invalid+`the time "t" is missing`, "replay: line 6: "+invalid, "replay: line 7: "+invalid+`the key "k" is empty`, "2s eve 6")
	compare(t, "by number", read(replay.CSV(strings.NewReader("2026-07-01T12:00:00Z,x,ann\n"), replay.Fields{Time: "1", Key: "3"})), "0s ann 1")
	compare(t, "without keys", read(replay.CSV(strings.NewReader("2026-07-01T12:00:00Z\n"), replay.Fields{Time: "1"})), "0s  1")
	compare(t, "no such column", read(replay.CSV(strings.NewReader("t,n\n"), fields)), "replay: line 1: "+invalid+`there is no column "k"`)
	compare(t, "no time", read(replay.CSV(strings.NewReader("t,n\n"), replay.Fields{Key: "k"})), invalid+"Fields.Time is empty")
	compare(t, "an open quote", read(replay.CSV(strings.NewReader("t,k,n\n\"2026\n"), fields)), "replay: line 2: "+invalid)
	compare(t, "empty", read(replay.CSV(strings.NewReader(""), fields)))
}

func TestCombined(t *testing.T) {
	log := `2001:db8::1 - ann smith [01/Jul/2026:14:00:00 +0200] "GET /a?b=c HTTP/1.1" 200 512 "-" "agent \"x\" \\"` + "\n" +
		`192.0.2.1 - - [01/Jul/2026:12:00:01 +0000] "-" 408 -` + "\n" +
		`192.0.2.1 - - [01/Jul/2026:12:00:01 +0000] "GET / HTTP/1.1` + "\n" +
		`192.0.2.1 - - [yesterday] "GET / HTTP/1.1" 200 1` + "\n" +
		"\x00\xff\n"
	for _, row := range []struct {
		fields replay.Fields
		first  string
		second string
	}{
		{replay.Fields{Key: "host"}, "0s 2001:db8::1 1", "1s 192.0.2.1 1"},
		{replay.Fields{Key: "user", Count: "bytes"}, "0s ann smith 512", "1s - 0"},
		{replay.Fields{Key: "path"}, "0s /a 1", "replay: line 2: " + invalid + `the key "path" is empty`},
		{replay.Fields{Key: "agent", Count: "status"}, `0s agent "x" \ 200`, "replay: line 2: " + invalid + `the key "agent" is empty`},
		{replay.Fields{Key: "method"}, "0s GET 1", "1s - 1"},
		{replay.Fields{}, "0s  1", "1s  1"},
	} {
		compare(t, fmt.Sprint(row.fields), read(replay.Combined(strings.NewReader(log), row.fields)), row.first, row.second,
			"replay: line 3: "+invalid+"not in the common", "replay: line 4: "+invalid+"the time", "replay: line 5: "+invalid+"not in the common")
	}
	compare(t, "no such field", read(replay.Combined(strings.NewReader(log), replay.Fields{Key: "cookie"})), invalid+`the combined format has no field "cookie"`)
	compare(t, "a time", read(replay.Combined(strings.NewReader(log), replay.Fields{Time: "t"})), invalid+"the combined format has one time")
}

func TestTimes(t *testing.T) {
	for _, row := range []struct{ layout, text, want string }{
		{"", "2026-07-01T12:00:00.000001Z", "1µs k 1"},
		{"", "2026-07-01 17:30:00+05:30", "0s k 1"},
		{"", "2026-07-01 12:00:00.25", "250ms k 1"},
		{"", "1782907200", "replay: line 1: " + invalid + `the time "1" is neither RFC 3339`},
		{"s", "1782907200.25", "250ms k 1"},
		{"ms", "1782907200250", "250ms k 1"},
		{"us", "1782907200000001", "1µs k 1"},
		{"ns", "1782907200000001000", "1µs k 1"},
		{"s", "1e300", "replay: line 1: " + invalid + `the time "1" is not a Unix time`},
		{"s", "NaN", "replay: line 1: " + invalid + `the time "1" is not a Unix time`},
		{"s", "noon", "replay: line 1: " + invalid + `the time "1" is not a Unix time`},
		{time.RFC1123, "12:00", "replay: line 1: " + invalid + `the time "1" is not of the layout`},
		{time.ANSIC, "Wed Jul  1 12:00:01 2026", "1s k 1"},
	} {
		compare(t, row.layout+" "+row.text, read(replay.CSV(strings.NewReader(row.text+",k\n"), replay.Fields{Time: "1", Key: "2", Layout: row.layout})), row.want)
	}
}

// A line of any length costs 1 MiB, and the lines after it are read.
func TestHugeLinesAreErrors(t *testing.T) {
	huge := io.LimitReader(endless('x'), 50<<20)
	fields := replay.Fields{Time: "t", Key: "k"}
	good := `{"t":"2026-07-01T12:00:00Z","k":"ann"}` + "\n"
	compare(t, "JSON", read(replay.JSONLines(io.MultiReader(strings.NewReader(good), huge, strings.NewReader("\n"+good)), fields)),
		"0s ann 1", "replay: line 2: "+invalid+"longer than 1048576 bytes", "0s ann 1")
	quoted := io.MultiReader(strings.NewReader("t,k\n2026-07-01T12:00:00Z,ann\n\""), endless('x')) // which would never end
	compare(t, "CSV", read(replay.CSV(quoted, fields)), "0s ann 1", "replay: line 3: "+invalid+"the record that begins there is longer than 1048576 bytes")
}

type endless byte

func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}

func TestAReadersErrorEndsTheSequence(t *testing.T) {
	broken := errors.New("broken")
	for name, events := range map[string]iter.Seq2[replay.Event, error]{
		"JSON":     replay.JSONLines(iotest.ErrReader(broken), replay.Fields{Time: "t"}),
		"CSV":      replay.CSV(iotest.ErrReader(broken), replay.Fields{Time: "t"}),
		"combined": replay.Combined(iotest.ErrReader(broken), replay.Fields{}),
	} {
		n := 0
		for _, err := range events {
			if n++; !errors.Is(err, broken) || errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if n != 1 {
			t.Errorf("%s: %d errors", name, n)
		}
	}
}

// A sequence may be left at any event.
func TestASequenceCanBeLeft(t *testing.T) {
	line := "bad\n"
	for _, events := range []iter.Seq2[replay.Event, error]{
		replay.JSONLines(strings.NewReader(line+line), replay.Fields{Time: "t"}),
		replay.CSV(strings.NewReader(line+line), replay.Fields{Time: "1"}),
		replay.Combined(strings.NewReader(line+line), replay.Fields{}),
	} {
		for _, err := range events {
			if err == nil {
				t.Error("no error")
			}
			break
		}
	}
}

// Names and keys are anybody's. The picture is well-formed, and has no element but those that it draws.
func TestThePictureEscapesNamesAndKeys(t *testing.T) {
	hostile := "</text><script>alert(1)</script>&\"'\x1b[2J\u202e\uffff"
	report := run(t, at(hostile, 0, time.Second, time.Hour), ratelimit.TokenBucket(hostile, 1, 24*time.Hour), ratelimit.Unlimited("a"))
	picture := report.SVG()
	decoder := xml.NewDecoder(strings.NewReader(picture))
	known := map[string]bool{"svg": true, "title": true, "style": true, "rect": true, "text": true, "g": true, "path": true}
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in %s", err, picture)
		}
		if start, ok := token.(xml.StartElement); ok {
			if !known[start.Name.Local] {
				t.Errorf("an element %s", start.Name.Local)
			}
			for _, a := range start.Attr {
				if strings.HasPrefix(a.Name.Local, "on") || a.Name.Local == "href" {
					t.Errorf("an attribute %s", a.Name.Local)
				}
			}
		}
	}
	if strings.Count(picture, "http") != 1 || strings.Contains(picture, "url(") {
		t.Error("the picture loads something")
	}
	for _, text := range []string{picture, report.String()} {
		for _, control := range []string{"\x1b", "\u202e"} {
			if strings.Contains(text, control) {
				t.Errorf("%q is in %q", control, text)
			}
		}
	}
}

func TestAReportWithoutEvents(t *testing.T) {
	report := run(t, nil, ratelimit.TokenBucket("a", 1, time.Hour))
	if text := report.String(); text != "no events\n" {
		t.Error(text)
	}
	if err := xml.Unmarshal([]byte(report.SVG()), new(struct{})); err != nil {
		t.Error(err)
	}
}

// What makes a line no event is a mistake of it, and is left out. What says something of more lines, or of all, ends the sequence: if it were left out, a
// replay would report on a part of its log as on the whole.
func TestOnlyALineIsAMistake(t *testing.T) {
	t.Parallel()
	line := func(key string) string { return "2026-07-01T12:00:00Z," + key + "\n" }
	before := "t,k\n" + strings.Repeat(line("ann"), 100)
	csv := func(text string) iter.Seq2[replay.Event, error] {
		return replay.CSV(strings.NewReader(text), replay.Fields{Time: "t", Key: "k"})
	}
	for name, row := range map[string]struct {
		events          iter.Seq2[replay.Event, error]
		valid, mistakes int
		ends            string // how the error begins that ends the sequence; "": none does
	}{
		"a quote in a field":                {events: csv(before + line(`x"y`) + line("bob")), valid: 101, mistakes: 1},
		"a quote in a field after lines":    {events: csv(before + line("\"a\nb\"") + line(`x"y`) + line("bob")), valid: 102, mistakes: 1},
		"a quote after a quoted field":      {events: csv(before + line(`"x"y`) + line("bob")), valid: 101, mistakes: 1},
		"a last line that is cut":           {events: csv(before + `2026-07-01T12:00:00Z,"bo`), valid: 100, mistakes: 1},
		"an open quote":                     {events: csv(before + line(`"bob`) + strings.Repeat(line("ann"), 900)), valid: 100, ends: "replay: line 102: " + invalid + "a quote in the record that begins there is not closed where it should be: the record goes on to line 1002 ("},
		"an open quote, then a quoted key":  {events: csv(before + line(`"bob`) + line(`"eve"`) + line("ann")), valid: 100, ends: "replay: line 102: " + invalid + "a quote in the record that begins there is not closed where it should be: the record goes on to line 103 ("},
		"an open quote, then a comma":       {events: csv(before + line(`"bob`) + "\"," + line(`x"y`) + line("ann")), valid: 100, ends: "replay: line 102: " + invalid + "a quote in the record"},
		"an open quote before 2 MiB":        {events: csv(before + "\n" + line(`"bob`) + strings.Repeat(line("ann"), 2<<20/25)), valid: 100, ends: "replay: line 103: " + invalid + "the record that begins there is longer than 1048576 bytes (is a quote not closed?)"},
		"a first column that is never over": {events: csv("t,k\n\n\"" + strings.Repeat(line("ann"), 2<<20/25)), ends: "replay: line 3: " + invalid + "the record that begins there is longer"},
		"a line of 2 MiB":                   {events: csv(before + line(strings.Repeat("x", 2<<20)) + line("ann")), valid: 100, ends: "replay: line 102: " + invalid + "the record that begins there is longer"},
		"2 MiB of empty lines":              {events: csv(before + strings.Repeat("\n", 2<<20) + line("ann")), valid: 100, ends: "replay: CSV after byte 2504: " + invalid},
		"a malformed header":                {events: csv(`t,"k"x` + "\n" + line("ann")), ends: "replay: line 1: " + invalid},
		"an open quote in the header":       {events: csv(`t,"k` + "\n" + line("ann")), ends: "replay: line 1: " + invalid + "a quote in the record"},
		"no such column":                    {events: csv("t,n\n" + line("ann")), ends: "replay: line 1: " + invalid + `there is no column "k"`},
		"no time in CSV":                    {events: replay.CSV(strings.NewReader(before), replay.Fields{Key: "k"}), ends: invalid + "Fields.Time is empty"},
		"no time in JSON":                   {events: replay.JSONLines(strings.NewReader("{}\n"), replay.Fields{Key: "k"}), ends: invalid + "Fields.Time is empty"},
		"no such field":                     {events: replay.Combined(strings.NewReader("\n"), replay.Fields{Key: "nosuch"}), ends: invalid + "the combined format has no field"},
		"a layout":                          {events: replay.Combined(strings.NewReader("\n"), replay.Fields{Layout: "s"}), ends: invalid + "the combined format has one time"},
		"lines that are no objects":         {events: replay.JSONLines(strings.NewReader("x\n[1]\n"+strings.Repeat("x", 2<<20)+"\n"), replay.Fields{Time: "t"}), mistakes: 3},
		"lines that are not combined":       {events: replay.Combined(strings.NewReader("x\n"+strings.Repeat("x", 2<<20)+"\n"), replay.Fields{}), mistakes: 2},
	} {
		valid, mistakes, ends := 0, 0, ""
		for _, err := range row.events {
			if ends != "" {
				t.Errorf("%s: the sequence goes on after %s", name, ends)
			}
			switch mistake, ok := errors.AsType[*replay.MistakeError](err); {
			case err == nil:
				valid++
			case !errors.Is(err, ratelimit.ErrInvalid):
				t.Errorf("%s: %v", name, err)
			case ok:
				if mistakes++; mistake.Unit != "line" || mistake.Number < 1 || !errors.Is(err, mistake.Err) {
					t.Errorf("%s: %+v", name, mistake)
				}
			default:
				ends = err.Error()
			}
		}
		if valid != row.valid || mistakes != row.mistakes || !strings.HasPrefix(ends, row.ends) || (ends == "") != (row.ends == "") {
			t.Errorf("%s: %d events, %d mistakes, and it ends with %q", name, valid, mistakes, ends)
		}
	}
}

// Whatever a log has in it, the sequence ends, and an event has the time and the key that it must have.
func FuzzLogs(f *testing.F) {
	f.Add("t,k,n\n2026-07-01T12:00:00Z,ann,1\n\"\n")
	f.Add(`{"t":"2026-07-01T12:00:00Z","k":"ann","n":1}`)
	f.Add(`192.0.2.1 - k [01/Jul/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 1 "" "\`)
	f.Fuzz(func(t *testing.T, log string) {
		fields := replay.Fields{Time: "t", Key: "k", Count: "n"}
		for name, events := range map[string]iter.Seq2[replay.Event, error]{
			"JSON":     replay.JSONLines(strings.NewReader(log), fields),
			"CSV":      replay.CSV(strings.NewReader(log), fields),
			"numbers":  replay.CSV(strings.NewReader(log), replay.Fields{Time: "1", Key: "2", Layout: "s"}),
			"combined": replay.Combined(strings.NewReader(log), replay.Fields{Key: "user", Count: "bytes"}),
		} {
			n := 0
			for event, err := range events {
				if n++; err == nil && event.Key == "" {
					t.Errorf("%s: an event without a key: %+v", name, event)
				}
			}
			if n > strings.Count(log, "\n")+strings.Count(log, "\r")+1 {
				t.Errorf("%s: %d events and errors", name, n)
			}
		}
	})
}

// What no call can have is a mistake of its line: it does not end a replay whose mistakes are left out.
func TestOneLineIsOneMistake(t *testing.T) {
	t.Parallel()
	at := func(key, count, time string) string {
		return fmt.Sprintf("%s,%s,%s\n", cmp.Or(time, "2026-07-01T12:00:00Z"), key, count)
	}
	text := at("ann", "1", "") + at(strings.Repeat("/long", 400), "1", "") + at("a\x00b", "1", "") + at("a\xffb", "1", "") + at("ann", "-1", "") + at("ann", "NaN", "") + at("ann", "1e16", "") + at("ann", "Inf", "") +
		at("ann", "1e-300", "") + at("ann", "0", "") + at("ann", "1", "2026-12-31T23:59:60Z") + at("ann", "1", "2026-12-31T12:60:59Z") + at("ann", "1", "2026-12-31T23:59:61Z") + at("ann", "1", "2027-01-01T00:00:00Z") +
		at("ann", "1", "2026-12-31 24:00:00") + at("ann", "1", "2026-12-31T24:00:00.000Z") + at("ann", "1", "2026-12-31T24:00:01Z") + at("ann", "1", "2026-12-31T24:00:00.5Z") + at("ann", "1", "2026-12-31T25:00:00Z") +
		at("ann", "1", "0001-01-01T00:00:00Z") + at("ann", "1", "0999-12-31T23:59:59Z") + at("ann", "1", "1000-01-01T00:30:00+01:00") + at("ann", "1", "9999-12-31T23:30:00-01:00")
	mistakes := 0
	events := func(yield func(replay.Event, error) bool) {
		for event, err := range replay.CSV(strings.NewReader(text), replay.Fields{Time: "1", Key: "2", Count: "3"}) {
			if _, ok := errors.AsType[*replay.MistakeError](err); ok {
				mistakes++
			} else if !yield(event, err) {
				return
			}
		}
	}
	report, err := replay.Run(events, ratelimit.TokenBucket("x", 100, time.Hour))
	if err != nil || report.Events != 6 || mistakes != 17 {
		t.Fatalf("%d mistakes, %+v, %v", mistakes, report, err)
	}
	if want := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC); !report.To.Equal(want) {
		t.Errorf("the last at %s", report.To)
	}
	if day := read(replay.Combined(strings.NewReader(`10.0.0.1 - - [31/Dec/2026:24:00:00 +0000] "GET / HTTP/1.1" 200 5`+"\n"), replay.Fields{Key: "host"})); len(day) != 1 || strings.Contains(day[0], "invalid") {
		t.Errorf("24:00:00 in a web server's log: %q", day)
	}
	leap := read(replay.Combined(strings.NewReader(`10.0.0.1 - - [31/Dec/2026:23:59:60 +0000] "GET / HTTP/1.1" 200 5`+"\n"), replay.Fields{Key: "host"}))
	if len(leap) != 1 || strings.Contains(leap[0], "invalid") {
		t.Errorf("a leap second in a web server's log: %q", leap)
	}
}

// Events that wait for their turn keep no lines. Not parallel: it looks at the heap.
func TestReorderKeepsKeysOnly(t *testing.T) {
	const lines, length = 2000, 30_000
	text := func(yield func(string) bool) {
		for i := range lines {
			if !yield(fmt.Sprintf(`10.0.0.%d - - [01/Jul/2026:12:00:00 +0000] "GET /%s HTTP/1.1" 200 5`, i%200, strings.Repeat("x", length)) + "\n") {
				return
			}
		}
	}
	next, stop := iter.Pull(text)
	defer stop()
	var rest string
	reader := readerFunc(func(p []byte) (int, error) {
		if rest == "" {
			var ok bool
			if rest, ok = next(); !ok {
				// All lines have been read, and no event has been passed on.
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				if m.HeapAlloc > lines*length/2 {
					t.Errorf("%d MB for %d waiting events", m.HeapAlloc>>20, lines)
				}
				return 0, io.EOF
			}
		}
		n := copy(p, rest)
		rest = rest[n:]
		return n, nil
	})
	n := 0
	for _, err := range replay.Reorder(replay.Combined(reader, replay.Fields{Key: "host"}), time.Minute) {
		if n++; err != nil {
			t.Fatal(err)
		}
	}
	if n != lines {
		t.Errorf("%d events", n)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
