package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// figure is a number that the library is held to.
type figure struct {
	name, what string
	bound      float64
	atMost     bool // the bound is an upper one
	run        func(ctx context.Context, e *env) (outcome, error)
}

// outcome is what a figure came to.
type outcome struct {
	value float64
	note  string // the absolute numbers behind it
}

// figures are all of them, in the order in which they are run.
var figures = []figure{
	{"tx_own_keys", "transactions/s: consume + insert, READ COMMITTED, own keys, 16 goroutines / with a bare UPDATE for the limiter", 0.93, false, txOwnKeys},
	{"tx_serializable_small_table", "the same in SERIALIZABLE, on an analyzed table of 100 rows", 4, false, txSerializableSmallTable},
	{"shard_utilization", "share of a 10-shard limit's capacity that 16 goroutines get, 1 at a time, before the first denial", 0.97, false, shardUtilization},
	{"denials_vs_for_update", "denials/s on a hot key, direct / SELECT FOR UPDATE", 8, false, denialsVsForUpdate},
	{"multi_3", "three limits in one call / in three calls, in a READ COMMITTED transaction, 16 goroutines", 1.4, false, multi3},
	{"ten_million_rows", "10,000,000 rows, random keys, 16 goroutines: consume/s / a bare UPDATE", 0.85, false, tenMillionRows},
	{"over_grant", "grants beyond the bound, all of this library's ways, summed", 0, true, overGrant},
}

func figureNamed(name string) (figure, bool) {
	i := slices.IndexFunc(figures, func(f figure) bool { return f.name == name })
	if i < 0 {
		return figure{}, false
	}
	return figures[i], true
}

func (f figure) bounds() string {
	if f.atMost {
		return fmt.Sprintf("at most %v", f.bound)
	}
	return fmt.Sprintf("at least %v", f.bound)
}

func (f figure) passes(value float64) bool {
	if f.atMost {
		return value <= f.bound
	}
	return value >= f.bound
}

// How the sides of most figures are run: for a few seconds each.
const (
	pairs = 8
	slice = 700 * time.Millisecond
)

// keys are "0", "1", ...
func keys(n int) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = strconv.Itoa(i)
	}
	return s
}

// ownKeys picks at random from the share of n keys that each goroutine has for itself.
func ownKeys(n, goroutines int) (pick func(worker int) string) {
	all, share := keys(n), n/goroutines
	return func(worker int) string { return all[worker*share+rand.IntN(share)] }
}

// anyKey picks at random from n keys.
func anyKey(n int) (pick func(worker int) string) {
	all := keys(n)
	return func(int) string { return all[rand.IntN(n)] }
}

// hotKey picks the same key for everybody.
func hotKey(int) string { return "hot" }

// fill makes n rows, full ones of a limit, in rate_limits or in counters, and has the planner know it.
func fill(ctx context.Context, pool *pgxpool.Pool, table, limit string, n int) error {
	_, err := pool.Exec(ctx, `INSERT INTO `+table+` (name, key, shard, shards, value, ts)
		SELECT $1, i::text, 0, 1, 1e9, now() FROM generate_series(0, $2::integer - 1) AS i`, limit, n)
	if err != nil {
		return err
	}
	_, err = pool.Exec(ctx, `VACUUM ANALYZE `+table)
	return err
}
