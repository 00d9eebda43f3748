package replay

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// Fields says where a log has the parts of an event.
type Fields struct {
	Time  string // required, but for [Combined], which has one time
	Key   string // "": all events have the same, empty key, for a limit without keys
	Count string // "": every event asks for one token

	// Layout is how times are written: a layout of package time, or "s", "ms", "us" or "ns" for a number since the Unix
	// epoch. The default is RFC 3339 or the form of Postgres ("2026-07-01 12:00:00.5+00"). A time without a zone is UTC.
	Layout string
}

// maxLine bounds the bytes of a line, or of a record of CSV.
const maxLine = 1 << 20

// JSONLines reads events from a log with a JSON object on each line. The fields are names of members. "user.id" is the member
// id of the member user. A key is a string, or a number or a boolean, which is taken as it is written.
//
// A line that has no event is a [*MistakeError]. The sequence then goes on with the next line, unless it is left. Any other error ends it.
// The same holds for the other logs. A line is at most 1 MiB long. Empty lines are left out. A sequence can be read once.
func JSONLines(r io.Reader, fields Fields) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := fields.check(fields.Time); err != nil {
			yield(Event{}, err)
			return
		}
		paths := map[string][]string{}
		for _, name := range []string{fields.Time, fields.Key, fields.Count} {
			paths[name] = strings.Split(name, ".")
		}
		eachLine(r, yield, func(line []byte) (Event, error) {
			var object map[string]json.RawMessage
			if err := json.Unmarshal(line, &object); err != nil {
				return Event{}, fmt.Errorf("not a JSON object: %w", err)
			}
			return fields.event(func(name string) (string, error) { return member(object, paths[name]) })
		})
	}
}

// member is the text of a member of an object.
func member(object map[string]json.RawMessage, path []string) (text string, err error) {
	for ; len(path) > 1; path = path[1:] {
		var inner map[string]json.RawMessage
		if err := json.Unmarshal(object[path[0]], &inner); err != nil {
			return "", errMissing
		}
		object = inner
	}
	raw := object[path[0]]
	switch {
	case len(raw) == 0 || raw[0] == 'n':
		return "", errMissing
	case raw[0] == '"':
		err = json.Unmarshal(raw, &text)
		return text, err
	case raw[0] == '{' || raw[0] == '[':
		return "", errors.New("is an object or an array")
	}
	return string(raw), nil
}

// CSV reads events from a log of comma-separated values. The fields are names of columns, as the first record has them. If all
// of them are numbers, they count the columns from 1, and there is no such record. See [JSONLines] for lines with mistakes. A record longer
// than 1 MiB, and a malformed one of several lines, end the sequence: a quote may not be closed, and nobody knows which of the lines are
// events. So does a mistake in the first record.
func CSV(r io.Reader, fields Fields) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := fields.check(fields.Time); err != nil {
			yield(Event{}, err)
			return
		}
		budget := &budget{r: r}
		reader := csv.NewReader(budget)
		reader.ReuseRecord, reader.FieldsPerRecord = true, -1
		columns, numbered := fields.numbers()
		for first := !numbered; ; first = false {
			budget.left, budget.spent = maxLine, false
			begin := reader.InputOffset()
			record, err := reader.Read()
			line := 0
			if len(record) > 0 {
				line, _ = reader.FieldPos(0)
			}
			wrong, malformed := errors.AsType[*csv.ParseError](err)
			if malformed {
				line = wrong.StartLine
			}
			switch {
			case budget.spent && line > 0:
				yield(Event{}, fmt.Errorf("replay: line %d: %w: the record that begins there is longer than %d bytes (is a quote not closed?)", line, ratelimit.ErrInvalid, maxLine))
				return
			case budget.spent:
				yield(Event{}, fmt.Errorf("replay: CSV after byte %d: %w: more than %d bytes are empty lines", begin, ratelimit.ErrInvalid, maxLine))
				return
			case errors.Is(err, io.EOF):
				return
			case malformed && wrong.Line > line:
				yield(Event{}, fmt.Errorf("replay: line %d: %w: a quote in the record that begins there is not closed where it should be: the record goes on to line %d (%w)",
					line, ratelimit.ErrInvalid, wrong.Line, wrong.Err))
				return
			case malformed && first:
				yield(Event{}, fmt.Errorf("replay: line %d: %w: %w", line, ratelimit.ErrInvalid, wrong.Err))
				return
			case malformed:
				if !yield(Event{}, mistake("line", line, wrong.Err)) {
					return
				}
				continue
			case err != nil:
				yield(Event{}, fmt.Errorf("replay: CSV after byte %d: %w", begin, err))
				return
			case first:
				if columns, err = fields.header(record); err != nil {
					yield(Event{}, fmt.Errorf("replay: line %d: %w: %w", line, ratelimit.ErrInvalid, err))
					return
				}
				continue
			}
			event, err := fields.event(func(name string) (string, error) {
				if i := columns[name]; i < len(record) {
					return record[i], nil
				}
				return "", errMissing
			})
			if event.unit, event.number = "line", line; err != nil {
				event, err = Event{}, mistake("line", line, err)
			}
			if !yield(event, err) {
				return
			}
		}
	}
}

// numbers is the columns if all fields are numbers.
func (f Fields) numbers() (columns map[string]int, all bool) {
	columns = map[string]int{}
	for _, name := range []string{f.Time, f.Key, f.Count} {
		n, err := strconv.Atoi(name)
		if name != "" && (err != nil || n < 1) {
			return nil, false
		}
		columns[name] = n - 1
	}
	return columns, true
}

// header is the columns by the first record.
func (f Fields) header(record []string) (map[string]int, error) {
	record[0] = strings.TrimPrefix(record[0], "\ufeff") // a byte order mark
	columns := map[string]int{}
	for _, name := range []string{f.Time, f.Key, f.Count} {
		if columns[name] = slices.Index(record, name); name != "" && columns[name] < 0 {
			return nil, fmt.Errorf("there is no column %q", name)
		}
	}
	return columns, nil
}

// budget bounds what is read for one record. When it is spent, the log ends: so the reader of CSV still says where the record began.
type budget struct {
	r     io.Reader
	left  int
	spent bool
}

func (b *budget) Read(p []byte) (int, error) {
	if b.left <= 0 {
		b.spent = true
		return 0, io.EOF
	}
	n, err := b.r.Read(p)
	b.left -= n
	return n, err
}

// Combined reads events from a log in the common or combined format of web servers. Fields are named host, ident, user,
// request, method, path, status, bytes, referer and agent. The time is that of the line, and Time and Layout stay empty. The
// path has no query. See [JSONLines] for lines with mistakes.
func Combined(r io.Reader, fields Fields) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		err := fields.check("time")
		for _, name := range []string{fields.Key, fields.Count} {
			if name != "" && !slices.Contains(combined, name) && err == nil {
				err = fmt.Errorf("%w: the combined format has no field %q: it has %s", ratelimit.ErrInvalid, name, strings.Join(combined, ", "))
			}
		}
		if fields.Time != "" || fields.Layout != "" {
			err = fmt.Errorf("%w: the combined format has one time: leave Time and Layout empty", ratelimit.ErrInvalid)
		}
		if err != nil {
			yield(Event{}, err)
			return
		}
		fields.Time, fields.Layout = "time", "02/Jan/2006:15:04:05 -0700"
		eachLine(r, yield, func(line []byte) (Event, error) {
			values, ok := splitCombined(string(line))
			if !ok {
				return Event{}, errors.New("not in the common or combined format")
			}
			return fields.event(func(name string) (string, error) {
				value := values[slices.Index(combined, name)]
				if name == "bytes" && value == "-" {
					return "0", nil
				}
				return value, nil
			})
		})
	}
}

// combined is the fields of the combined format, in the order of splitCombined.
var combined = []string{"host", "ident", "user", "time", "request", "status", "bytes", "referer", "agent", "method", "path"}

// splitCombined splits a line such as
//
//	host ident user [time] "request" status bytes "referer" "agent"
//
// The last two, and what comes after them, may be missing. A user may have blanks.
func splitCombined(line string) (values [11]string, ok bool) {
	host, rest, _ := strings.Cut(line, " ")
	ident, rest, _ := strings.Cut(rest, " ")
	user, rest, _ := strings.Cut(rest, " [")
	at, rest, ok := strings.Cut(rest, "] ")
	request, rest, quoted := cutQuoted(rest)
	status, rest, more := strings.Cut(strings.TrimPrefix(rest, " "), " ")
	size, rest, _ := strings.Cut(rest, " ")
	referer, rest, _ := cutQuoted(rest)
	agent, _, _ := cutQuoted(strings.TrimPrefix(rest, " "))
	method, path, _ := strings.Cut(request, " ")
	path, _, _ = strings.Cut(path, " ")
	path, _, _ = strings.Cut(path, "?")
	return [11]string{host, ident, user, at, request, status, size, referer, agent, method, path}, ok && quoted && more
}

// cutQuoted cuts a text in quotes off the front of s. In it, a backslash makes a quote or a backslash part of the text.
func cutQuoted(s string) (text, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		return "", s, false
	}
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return unescape.Replace(s[1:i]), s[i+1:], true
		}
	}
	return "", s, false
}

var unescape = strings.NewReplacer(`\"`, `"`, `\\`, `\`)

// eachLine yields an event for each line.
func eachLine(r io.Reader, yield func(Event, error) bool, parse func(line []byte) (Event, error)) {
	reader := bufio.NewReaderSize(r, maxLine)
	for n := 1; ; n++ {
		line, err := reader.ReadSlice('\n')
		var event Event
		var wrong error
		if errors.Is(err, bufio.ErrBufferFull) {
			wrong = fmt.Errorf("longer than %d bytes", maxLine)
			for errors.Is(err, bufio.ErrBufferFull) {
				_, err = reader.ReadSlice('\n')
			}
		} else if line = bytes.TrimSpace(line); len(line) > 0 && (err == nil || errors.Is(err, io.EOF)) {
			event, wrong = parse(line)
		} else if err == nil {
			continue
		}
		switch {
		case wrong != nil:
			if !yield(Event{}, mistake("line", n, wrong)) {
				return
			}
		case len(line) > 0 && (err == nil || errors.Is(err, io.EOF)):
			event.unit, event.number = "line", n
			if !yield(event, nil) {
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				yield(Event{}, fmt.Errorf("replay: line %d: %w", n, err))
			}
			return
		}
	}
}

// A MistakeError is the error of a line of a log, or of a row of a query, that has no event. The sequence goes on with the next one, so
// it can be left out. It matches [ratelimit.ErrInvalid]. Errors that end the sequence may match that, too, such as an unknown field.
type MistakeError struct {
	Unit   string // "line" or "row"
	Number int    // from 1
	Err    error  // what is wrong
}

func (e *MistakeError) Error() string {
	return fmt.Sprintf("replay: %s %d: %v: %v", e.Unit, e.Number, ratelimit.ErrInvalid, e.Err)
}

func (e *MistakeError) Unwrap() []error { return []error{ratelimit.ErrInvalid, e.Err} }

func mistake(unit string, number int, err error) error {
	return &MistakeError{Unit: unit, Number: number, Err: err}
}

var errMissing = errors.New("is missing")

// check refuses fields that no log can have. at is the field of the time.
func (f Fields) check(at string) error {
	if at == "" {
		return fmt.Errorf("%w: Fields.Time is empty: a replay needs the time of each event", ratelimit.ErrInvalid)
	}
	return nil
}

// event makes an event of the values of its fields.
func (f Fields) event(value func(name string) (string, error)) (e Event, err error) {
	at, err := value(f.Time)
	if err == nil {
		e.Time, err = f.time(at)
	}
	if err != nil {
		return e, fmt.Errorf("the time %q %w", f.Time, err)
	}
	if f.Key != "" {
		if e.Key, err = value(f.Key); err == nil && e.Key == "" {
			err = errors.New("is empty")
		}
		if err != nil {
			return e, fmt.Errorf("the key %q %w", f.Key, err)
		}
	}
	e.Count = 1
	if f.Count != "" {
		count, err := value(f.Count)
		if err == nil {
			if e.Count, err = strconv.ParseFloat(count, 64); err != nil {
				err = fmt.Errorf("is not a number: %.40q", count)
			}
		}
		if err != nil {
			return e, fmt.Errorf("the count %q %w", f.Count, err)
		}
	}
	if err := e.check(); err != nil {
		return e, err
	}
	e.Key = strings.Clone(e.Key) // it is part of a whole line, which is kept no longer
	return e, nil
}

// epochs are how many of a Unix number's units a second has.
var epochs = map[string]float64{"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}

// layouts are the layouts without one.
var layouts = []string{time.RFC3339, "2006-01-02 15:04:05Z07:00", "2006-01-02 15:04:05Z07", "2006-01-02 15:04:05", "2006-01-02T15:04:05"}

// time reads a time.
func (f Fields) time(text string) (time.Time, error) {
	if perSecond, ok := epochs[f.Layout]; ok {
		n, err := strconv.ParseFloat(text, 64)
		if micros := math.Round(n / perSecond * 1e6); err == nil && math.Abs(micros) < 1e18 {
			return time.UnixMicro(int64(micros)), nil
		}
		return time.Time{}, fmt.Errorf("is not a Unix time in %s: %.40q", f.Layout, text)
	}
	if f.Layout != "" {
		if t, err := parseTime(f.Layout, text); err == nil {
			return t, nil
		}
		return time.Time{}, fmt.Errorf("is not of the layout %q: %.40q", f.Layout, text)
	}
	for _, layout := range layouts {
		if t, err := parseTime(layout, text); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("is neither RFC 3339 nor a timestamp of Postgres (set Fields.Layout): %.40q", text)
}

// parseTime is time.Parse, but takes the second 60, a leap second, for the instant at which it ends, and 24:00:00 for the midnight after it.
func parseTime(layout, text string) (time.Time, error) {
	t, err := time.Parse(layout, text)
	if wrong, ok := errors.AsType[*time.ParseError](err); ok && wrong.Message == ": second out of range" {
		if i := strings.LastIndex(text, ":60"); i >= 0 {
			t, err = time.Parse(layout, text[:i]+":59"+text[i+len(":60"):])
			return t.Truncate(time.Second).Add(time.Second), err
		}
	} else if ok && wrong.Message == ": hour out of range" {
		if before, after, there := strings.Cut(text, "24:00:00"); there {
			if midnight, second := time.Parse(layout, before+"00:00:00"+after); second == nil && midnight.Nanosecond() == 0 {
				return midnight.AddDate(0, 0, 1), nil
			}
		}
	}
	return t, err
}
