package console

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/visible"
)

// refusal is an error that is the reader's to understand. Nothing in text is markup.
type refusal struct {
	status      int
	title, text string
	partly      bool // something was changed nevertheless
}

func (r *refusal) Error() string { return r.title + ": " + r.text }

// explain says in words what went wrong, with nothing in it that would not be seen, such as in the names that the database lists. What the
// database says reaches the reader only where it was written for people.
func explain(err error) *refusal {
	shown := *inWords(err)
	shown.text = visible.Escape(shown.text)
	return &shown
}

func inWords(err error) *refusal {
	if refused, ok := errors.AsType[*refusal](err); ok {
		return refused
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case "22023", "55000": // invalid_parameter_value, object_not_in_prerequisite_state: raised by the engine, which says what is wrong
			return &refusal{status: http.StatusBadRequest, title: "That is not possible", text: sentence(pgErr.Message) + " " + pgErr.Hint}
		case "42501":
			return &refusal{status: http.StatusForbidden, title: "The database refuses this", text: sentence(pgErr.Message) + " SELECT ratelimit.grant(role, 'operate') gives the rights, and 'look' those to read."}
		case "42P01", "42883", "42703", "3F000":
			return &refusal{status: http.StatusInternalServerError, title: "The limiter's tables are not there", text: "Migrate the schema to this version of txlimit. If its name is not ratelimit, set Handler.Schema. If the schema was renamed, docs/operations.md says what to do."}
		case "25006":
			return isReplica()
		case "57014", "55P03":
			return &refusal{status: http.StatusServiceUnavailable, title: "The database took too long", text: "Another transaction may hold the rows. Try again in a moment."}
		}
		return &refusal{status: http.StatusInternalServerError, title: "The database failed", text: "It answered with SQLSTATE " + pgErr.Code + ". The log of this program has the message."}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &refusal{status: http.StatusServiceUnavailable, title: "The database took too long", text: "Try again in a moment."}
	}
	return &refusal{status: http.StatusServiceUnavailable, title: "The database cannot be reached", text: "The log of this program has the message. Limits that deny keep denying."}
}

func isReplica() *refusal {
	return &refusal{status: http.StatusServiceUnavailable, title: "This server is a replica", text: "It can be looked at, but nothing can be changed on it."}
}

func sentence(s string) string {
	s = strings.TrimRight(s, ".")
	if s != "" {
		s = strings.ToUpper(s[:1]) + s[1:] + "."
	}
	return s
}

// asked is what an address asks for.
type asked struct {
	name, key, search, span, page, done string
	given                               givenNumbers
}

func (a asked) validate() error {
	for _, text := range []struct {
		what, s string
		max     int
	}{{"name", a.name, 255}, {"key", a.key, 1024}, {"search", a.search, 1024},
		{"rate", a.given.Rate, 100}, {"capacity", a.given.Capacity, 100}, {"zone", a.given.Zone, 100}, {"anchor", a.given.Anchor, 100}} {
		if !valid(text.s) {
			return &refusal{status: http.StatusBadRequest, title: "This address cannot be right", text: "The " + text.what + " in it is not valid UTF-8."}
		}
		if len(text.s) > text.max {
			return &refusal{status: http.StatusBadRequest, title: "This address cannot be right", text: "The " + text.what + " in it is longer than any can be."}
		}
	}
	return nil
}

func valid(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
