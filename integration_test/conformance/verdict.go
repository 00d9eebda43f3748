package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/ratelimit"
)

// verdict is what a case or a trial comes to.
type verdict string

const (
	works       verdict = "works"
	conditional verdict = "works with a condition"
	refused     verdict = "refused with a clear error"
	wrong       verdict = "wrong"
)

// outcome is what came of one trial.
type outcome struct {
	Verdict   verdict `json:"verdict"`
	Step      string  `json:"step,omitempty"`      // what was being done when it ended
	Detail    string  `json:"detail,omitempty"`    // what was expected and what came, or the error with everything the server said
	SQLState  string  `json:"sqlstate,omitempty"`  // of the error
	Condition string  `json:"condition,omitempty"` // under which it worked
	Note      string  `json:"note,omitempty"`      // for the reader: measured numbers

	conflict bool // it was refused by a serialization failure or a deadlock
}

// stop ends a trial's script.
type stop struct {
	outcome
	err error
}

func (s *stop) Error() string { return s.Step + ": " + s.Detail }
func (s *stop) Unwrap() error { return s.err }

// fromError is the outcome of a step that failed with an error. more are SQLSTATEs, or their classes, that are clear errors in
// this case.
func fromError(ctx context.Context, step string, err error, more ...string) outcome {
	o := outcome{Verdict: wrong, Step: step, Detail: errorText(err), SQLState: sqlState(err)}
	switch {
	case ctx.Err() != nil:
		o.Detail = "no answer in time: " + o.Detail
	case errors.Is(err, ratelimit.ErrUnknownOutcome):
		o.Detail = "unclear whether it was granted: " + o.Detail
	case isClear(err, more...):
		o.Verdict = refused
	case isConflict(err):
		o.conflict = !errors.Is(err, ratelimit.ErrAttemptsExhausted) // which was tried often enough
	default:
		o.Detail = "not a clear error: " + o.Detail
	}
	return o
}

// isClear reports whether an error tells a user that this does not work here: SQLSTATE class 0A, which is "feature not
// supported", a code of this library's, or an error of the library's own.
func isClear(err error, more ...string) bool {
	if state := sqlState(err); state != "" {
		return strings.HasPrefix(state, "0A") || strings.HasPrefix(state, "RL") ||
			slices.ContainsFunc(more, func(prefix string) bool { return strings.HasPrefix(state, prefix) })
	}
	return errors.Is(err, ratelimit.ErrInvalid)
}

// isConflict reports whether the caller should run the whole transaction again.
func isConflict(err error) bool {
	state := sqlState(err)
	return state == "40001" || state == "40P01" || errors.Is(err, ratelimit.ErrAttemptsExhausted)
}

func sqlState(err error) string {
	if e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return e.SQLState()
	}
	return ""
}

// errorText is an error with all that the server said.
func errorText(err error) string {
	text := err.Error()
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return text
	}
	for _, part := range []struct{ what, text string }{{"DETAIL", e.Detail}, {"HINT", e.Hint}, {"QUERY", e.InternalQuery}, {"CONTEXT", e.Where}} {
		if part.text != "" {
			text += fmt.Sprintf("; %s: %s", part.what, strings.Join(strings.Fields(part.text), " "))
		}
	}
	return text
}

// result is what a case comes to.
type result struct {
	Name      string  `json:"name"`
	Verdict   verdict `json:"verdict"`
	Condition string  `json:"condition,omitempty"`
	Trials    []tried `json:"trials"`
}

// tried is a trial and its outcome.
type tried struct {
	Way  string `json:"way"`
	Keys string `json:"keys,omitempty"`
	outcome

	way way
}

func (t tried) String() string {
	if t.Keys == "" {
		return t.Way
	}
	return t.Way + ", " + t.Keys
}

// conclude works out a case's verdict from its trials.
func (r *result) conclude() {
	byVerdict := map[verdict][]tried{}
	for _, t := range r.Trials {
		byVerdict[t.Verdict] = append(byVerdict[t.Verdict], t)
	}
	bad, no, yes := byVerdict[wrong], byVerdict[refused], slices.Concat(byVerdict[works], byVerdict[conditional])
	switch {
	case len(bad) > 0:
		r.Verdict = wrong
		r.Condition = fmt.Sprintf("in %s: %s", names(bad), bad[0].text())
		if n := len(texts(bad)); n > 1 {
			r.Condition += fmt.Sprintf(" (and %d others, see below)", n-1)
		}
	case len(yes) == 0:
		r.Verdict, r.Condition = refused, no[0].text()
	case len(no) > 0:
		r.Verdict = conditional
		r.Condition = fmt.Sprintf("%s; otherwise refused: %s", separate(yes, no), no[0].text())
	case len(byVerdict[conditional]) > 0:
		r.Verdict = conditional
	default:
		r.Verdict = works
	}
	if r.Verdict == conditional || r.Verdict == works {
		for _, condition := range distinct(byVerdict[conditional], func(t tried) string { return t.Condition }) {
			under := slices.DeleteFunc(slices.Clone(yes), func(t tried) bool { return t.Condition != condition })
			r.Condition = join(r.Condition, fmt.Sprintf("in %s: %s", names(under), condition))
		}
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

// text is what happened, for the table.
func (o outcome) text() string { return o.Step + ": " + o.Detail }

func texts(ts []tried) []string { return distinct(ts, func(t tried) string { return t.text() }) }

// distinct are the values of some trials, each once, in order.
func distinct(ts []tried, of func(t tried) string) (values []string) {
	for _, t := range ts {
		if v := of(t); v != "" && !slices.Contains(values, v) {
			values = append(values, v)
		}
	}
	return values
}

// names lists trials by their ways.
func names(ts []tried) string {
	return strings.Join(distinct(ts, tried.String), "; ")
}

// choice is something that a user can choose.
type choice struct {
	words string
	is    func(t tried) bool
}

var choices = []choice{
	{"only if all requests of a call have the same key", func(t tried) bool { return t.Keys == oneKey }},
	{"only outside transactions", func(t tried) bool { return !t.way.inTx() }},
	{"only in transactions", func(t tried) bool { return t.way.inTx() }},
	{"not above READ COMMITTED", func(t tried) bool { return t.way.level == "" || t.way.level == "read committed" }},
	{"not in SERIALIZABLE", func(t tried) bool { return t.way.level != "serializable" }},
	{"not in REPEATABLE READ", func(t tried) bool { return t.way.level != "repeatable read" }},
	{"only in REPEATABLE READ and SERIALIZABLE", func(t tried) bool { return t.way.level != "" && t.way.level != "read committed" }},
	{"only in query modes that prepare no statement (exec, simple_protocol)", func(t tried) bool { return t.way.unprepared }},
	{"not in the simple protocol", func(t tried) bool { return !t.way.simple }},
	{"only on pgx, not on database/sql", func(t tried) bool { return !t.way.sql }},
	{"only on database/sql", func(t tried) bool { return t.way.sql }},
	{"not on a Coalescer", func(t tried) bool { return !t.way.coalesced }},
	{"only on a Coalescer", func(t tried) bool { return t.way.coalesced }},
}

// separate says in words how the trials that worked differ from those that were refused: by one choice, by two, or by a
// list.
func separate(yes, no []tried) string {
	splits := func(is func(t tried) bool) bool {
		return !slices.ContainsFunc(yes, func(t tried) bool { return !is(t) }) && !slices.ContainsFunc(no, is)
	}
	for _, a := range choices {
		if splits(a.is) {
			return a.words
		}
	}
	for i, a := range choices {
		for _, b := range choices[i+1:] {
			if splits(func(t tried) bool { return a.is(t) && b.is(t) }) {
				return a.words + ", and " + b.words
			}
		}
	}
	return "only in " + names(yes)
}

// short bounds a text, for a table's line.
func short(text string, runes int) string {
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > runes {
		return string(r[:runes]) + " …"
	}
	return text
}
