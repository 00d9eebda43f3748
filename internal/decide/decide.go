// Package decide is the seam between package ratelimit and a database in memory: what a call asks and what is answered, as
// values. Postgres is asked the same by SQL.
package decide

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Asker is the first argument of each statement of package ratelimit. A database in memory asks it, and reads no SQL.
type Asker interface {
	// Question is a Question, or the parameters of a query of package dbsqlc.
	Question() any
	// Answered takes an Answer (for Each, a list of them, one a demand) or the row of the query; nil if that failed.
	Answered(answer any)
}

// The operations.
const (
	Consume = "consume"
	Take    = "take"
	Check   = "check"
	Each    = "each"
	Refund  = "refund"
	Move    = "move"
	Pause   = "pause"
	Resume  = "resume"
	Reset   = "reset"
)

// ID is the key of a limit's rows.
type ID struct{ Name, Key string }

// Demand is a call's demand for one limit and key.
type Demand struct {
	ID
	Limit  algebra.Limit
	Shards int
	Count  float64
	Lowest float64  // the balance that may be left: see algebra.Limit.Lowest
	Pick   [2]int32 // the shards to look at first
}

// Question is what a call asks. The demands are in the order of the locks; a Move has from first.
type Question struct {
	Op      string
	Demands []Demand
	Taken   []algebra.Taken    // for a Refund
	Most    float64            // for a Take
	Reserve bool               // the work may have to wait
	Within  algebra.Micros     // but no longer than that
	Lasts   time.Duration      // of a Pause
	Now     pgtype.Timestamptz // NULL: the database's clock
	OrRaise bool               // a denial is an error
}

// Answer is the decision. Rows has the rows of each demand: after a grant the new ones, or the one shard that the tokens
// were taken from; otherwise those that led to the decision.
type Answer struct {
	Granted bool
	At      algebra.Micros
	Rows    [][]algebra.Row
	Taken   float64 // by a Take, from each demand

	Moved   []float64 // of a Refund: what came back to each demand
	Waiting []int     // and the demands, from 1, of which work waits that is promised what they owe

	Until algebra.Micros // of a Pause
}
