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

// figure is a measured number with a bound that the library must reach.
type figure struct {
	name, what string
	bound      float64
	atMost     bool // the bound is an upper bound
	run        func(ctx context.Context, e *env) (outcome, error)
}

// outcome is the result of a figure.
type outcome struct {
	value float64
	note  string // the absolute numbers behind it
}

// figures are all figures, in the order in which they run.
var figures = []figure{
	{"tx_own_keys", "transactions/s: consume + insert, READ COMMITTED, own keys, 16 goroutines / with a minimal function that decides", 0.9, false, txOwnKeys},
	{"pool_own_keys", "calls/s on a pool, own keys, 64 goroutines: Consume / a bare UPDATE", 0.86, false, poolOwnKeys},
	{"tx_serializable_small_table", "the same in SERIALIZABLE, on a table of 100 rows, rewritten and analyzed before each slice", 4, false, txSerializableSmallTable},
	{"hot_queue_vs_mutex", "commits/s, SERIALIZABLE, one hot key, 64 goroutines: InTx with the queue / no more than a mutex after BEGIN", 0.9, false, hotQueueVsMutex},
	{"hot_queue_vs_update", "the same, queue / READ COMMITTED with a bare UPDATE instead of the limiter", 1.0, false, hotQueueVsUpdate},
	{"hot_queue_p99", "p99 latency, queue / without", 0.25, true, hotQueueP99},
	{"hot_queue_wasted", "transactions wasted per commit, queue, one process", 0.05, true, hotQueueWasted},
	{"hot_queue_wasted_4_processes", "the same, 4 processes on the key", 0.3, true, hotQueueWasted4Processes},
	{"shards_vs_one_row", "SERIALIZABLE, queue, 64 goroutines: 10 shards / 1 shard", 2.2, false, shardsVsOneRow},
	{"shard_utilization", "share of a 10-shard limit's capacity that 16 goroutines get, 1 at a time, before the first denial", 0.97, false, shardUtilization},
	{"coalesced_hot_64", "one hot key, 64 goroutines: coalesced / Redis EVALSHA by go-redis", 1.5, false, coalescedVsRedis(64, hotKey, 0)},
	{"coalesced_hot_256", "the same, 256 goroutines", 4, false, coalescedVsRedis(256, hotKey, 0)},
	{"coalesced_own_64", "a key of its own for each of 64 goroutines: coalesced / with a minimal function that decides several keys", 0.9, false, coalescedVsFloor(64, ownKey)},
	{"coalesced_own_256", "the same, 256 goroutines", 0.9, false, coalescedVsFloor(256, ownKey)},
	{"coalesced_100k_256", "100,000 keys at random, 256 goroutines: coalesced / Redis EVALSHA", 1.3, false, coalescedVsRedis(256, anyKey(100_000), 100_000)},
	{"coalesced_calendar", "calls/s, own keys, 64 goroutines, coalesced: a month and a minute in one call / a fixed window of 30 days and a minute", 0.9, false, coalescedCalendar},
	{"ahead_hot_64", "one hot key, 64 goroutines: coalesced with Ahead / Redis EVALSHA by go-redis", 15, false, aheadVsRedis(64, hotKey)},
	{"ahead_own_64", "the same, a key of its own for each", 12, false, aheadVsRedis(64, ownKey)},
	{"ahead_two_limits", "calls/s, own keys, 64 goroutines, a month and a minute in one call: coalesced with Ahead / without", 3, false, aheadTwoLimits},
	{"ahead_open_statements", "statements a call, 5,000 calls/s for 500 customers, coalesced: with Ahead of a second / without", 0.1, true, aheadOpen("statements")},
	{"ahead_open_wal", "the same, bytes of the write-ahead log", 0.1, true, aheadOpen("WAL bytes")},
	{"ahead_flood_p99", "p99 latency of calls for other keys, coalesced with Ahead: while one key is flooded and denied / before", 2, true, aheadFlood},
	{"coalesced_idle", "one goroutine: coalesced / direct call", 0.95, false, coalescedIdle},
	{"denials_vs_for_update", "denials/s on a hot key, direct / SELECT FOR UPDATE", 8, false, denialsVsForUpdate},
	{"pipelined_tx", "whole transactions, limiter in both, 16 goroutines: in one batch / statement by statement", 1.5, false, pipelinedTx},
	{"multi_3", "three limits in one call, in a READ COMMITTED transaction, 16 goroutines / with a minimal function that decides three", 0.9, false, multi3},
	{"each_100", "100 keys of one token bucket in a READ COMMITTED transaction, one worker: in one call of ConsumeEach / in one of a minimal function that decides several keys", 0.9, false, each100},
	{"hold_vs_two_consumes", "processor time of a Hold and its Settle, of server and client, on a pool, one goroutine / of two Consumes", 1.6, true, holdVsTwoConsumes},
	{"hold_denied_10000", "milliseconds of a denied Hold, on a pool, one goroutine, 10,000 live holds of the key", 10, true, holdDenied},
	{"holds_renewed_10000", "milliseconds to extend 10,000 holds, one statement", 1000, true, holdsRenewed},
	{"holds_in_bulk_10000", "seconds to take 10,000 slots of one key by SQL in one statement, and to release them in one", 60, true, holdsInBulk},
	{"holds_old_snapshot", "time of a Hold and its Release of one key, one goroutine: after 5,000 of them beside an old snapshot / without", 2, true, holdsBesideAnOldSnapshot},
	{"calendar_vs_window", "calls/s, own keys, 16 goroutines: a month in a time zone / a fixed window of 30 days", 0.9, false, calendarVsWindow},
	{"ten_million_rows", "10,000,000 rows, random keys, 16 goroutines: consume/s / a minimal function that decides", 0.9, false, tenMillionRows},
	{"sweep_p99", "p99 latency of consume, 16 goroutines: while 5,000,000 idle keys are swept / without", 1.5, true, sweepP99(5_000_000)},
	{"flood_p99", "p99 latency of another query of the process: during a flood, with the documented settings / before", 2, true, floodP99},
	{"over_grant", "grants beyond the bound, summed over all ways to call this library", 0, true, overGrant},
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

// Most figures run their sides this often and this long. A first slice of each side warms up.
const (
	pairs = 8
	slice = 700 * time.Millisecond
)

// Some figures need short slices, since conditions change within seconds by more than the sides differ. The conditions are mostly the
// same for both slices of such a pair, and the median has more pairs.
const (
	manyPairs  = 60
	shortSlice = 140 * time.Millisecond
)

// keys returns "0", "1", ...
func keys(n int) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = strconv.Itoa(i)
	}
	return s
}

// ownKeys picks at random from n keys, of which each of txGoroutines has its own share.
func ownKeys(n int) (pick func(worker int) string) {
	all, share := keys(n), n/txGoroutines
	return func(worker int) string { return all[worker*share+rand.IntN(share)] }
}

// anyKey picks at random from n keys. It does not keep the keys: the garbage collector would scan ten million strings again and again.
func anyKey(n int) (pick func(worker int) string) {
	return func(int) string { return strconv.Itoa(rand.IntN(n)) }
}

// ownKey picks one key for each goroutine.
func ownKey(worker int) string { return ownOnes[worker] }

// ownOnes are the keys of ownKey, for the largest number of goroutines.
var ownOnes = keys(256)

// hotKey picks the same key for all goroutines.
func hotKey(int) string { return "hot" }

// fill inserts n full rows of a limit into ratelimit.limits or counters, and updates the planner's statistics.
func fill(ctx context.Context, pool *pgxpool.Pool, table, limit string, n int) error {
	_, err := pool.Exec(ctx, `INSERT INTO `+table+` (name, key, shard, shards, value, ts)
		SELECT $1, i::text, 0, 1, 1e9, now() FROM generate_series(0, $2::integer - 1) AS i`, limit, n)
	if err != nil {
		return err
	}
	_, err = pool.Exec(ctx, `VACUUM ANALYZE `+table)
	return err
}
