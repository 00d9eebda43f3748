package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// order runs a caller's whole transaction: take from the limit, insert a row, commit.
func order(ctx context.Context, pool *pgxpool.Pool, level pgx.TxIsoLevel, key string, take func(ctx context.Context, tx pgx.Tx, key string) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		if err := take(ctx, tx, key); err != nil {
			return err
		}
		return insertOrder(ctx, tx, key)
	})
}

const insertOrderSQL = `INSERT INTO orders (customer) VALUES ($1)`

func insertOrder(ctx context.Context, tx pgx.Tx, key string) error {
	_, err := tx.Exec(ctx, insertOrderSQL, key)
	return err
}

// consumeOne takes from a limit with this library.
func consumeOne(limit ratelimit.Limit) func(ctx context.Context, tx pgx.Tx, key string) error {
	return func(ctx context.Context, tx pgx.Tx, key string) error {
		_, err := limits.Consume(ctx, tx, limit.Key(key))
		return err
	}
}

// updateOne does a bare UPDATE instead of a limiter.
var updateOne = inTx(bareUpdate)

func inTx(take func(ctx context.Context, db oneRow, key string) error) func(ctx context.Context, tx pgx.Tx, key string) error {
	return func(ctx context.Context, tx pgx.Tx, key string) error { return take(ctx, tx, key) }
}

// txSide is a side whose transactions are retried at once after a serialization failure.
type txSide struct {
	side
	pool    *pgxpool.Pool
	retries atomic.Int64
}

// perCommit is the number of retries per commit. It includes the few retries of the warm-up.
func (s *txSide) perCommit(t *tally) float64 {
	return float64(s.retries.Load()) / float64(t.latencies.n)
}

// The kinds of sides in a comparison of transactions.
var (
	byConsume        = txKind{"txlimit", "ratelimit.limits", consumeOne(plenty(0).limit(1))}
	byUpdate         = txKind{"bare UPDATE", "counters", updateOne}
	byLeast          = txKind{"a function that only decides", "counters", inTx(decideInFunction)}
	byHand           = txKind{"txlimit's function by hand", "ratelimit.limits", inTx(consumeByHand)}
	byDecidingUpdate = txKind{"its UPDATE, without the function", "counters", inTx(decideByUpdate)}
)

type txKind struct {
	name, table string
	take        func(ctx context.Context, tx pgx.Tx, key string) error
}

// txGoroutines have a connection each.
const txGoroutines = 16

// openOrders opens orders on a table of n rows.
func openOrders(ctx context.Context, e *env, kind txKind, level pgx.TxIsoLevel, n int, pick func(worker int) string) (*txSide, error) {
	pool, err := e.newPool(ctx, txGoroutines, nil)
	if err != nil {
		return nil, err
	}
	if err := fill(ctx, pool, kind.table, "limit", n); err != nil {
		return nil, err
	}
	s := &txSide{side: side{name: kind.name, goroutines: txGoroutines}, pool: pool}
	s.call = func(ctx context.Context, worker int) error {
		retries, err := retry(func() error { return order(ctx, pool, level, pick(worker), kind.take) })
		if retries > 0 {
			s.retries.Add(int64(retries))
		}
		return err
	}
	return s, nil
}

// txOwnKeys also shows the cost of a decision, in a function and without one, and the savings of InTx.
func txOwnKeys(ctx context.Context, e *env) (outcome, error) {
	n := e.few(100_000)
	pick := ownKeys(n)
	var sides []*side
	for _, kind := range []txKind{byConsume, byUpdate, byLeast, byHand, byDecidingUpdate} {
		s, err := openOrders(ctx, e, kind, pgx.ReadCommitted, n, pick)
		if err != nil {
			return outcome{}, err
		}
		sides = append(sides, &s.side)
	}
	inTx, err := openOrders(ctx, e, byConsume, pgx.ReadCommitted, n, pick)
	if err != nil {
		return outcome{}, err
	}
	inTx.name = "txlimit, in InTx"
	inTx.call = func(ctx context.Context, worker int) error {
		key := pick(worker)
		return limits.InTx(ctx, inTx.pool, func(ctx context.Context, tx pgx.Tx) error {
			if err := byConsume.take(ctx, tx, key); err != nil {
				return err
			}
			return insertOrder(ctx, tx, key)
		}, ratelimit.Isolation(pgx.ReadCommitted))
	}
	sides = append(sides, &inTx.side)
	c, err := e.compare(ctx, manyPairs, shortSlice, sides[0], sides[1], sides[2:]...)
	if err != nil {
		return outcome{}, err
	}
	result := c.share(2)
	result.note += fmt.Sprintf("; of a bare UPDATE: the library %.3g, the minimal function %.3g, the library's function called by hand %.3g, the UPDATE of the minimal function as a plain statement %.3g, the library in InTx, which sends BEGIN with the first statement, %.3g",
		c.ratio(0, 1), c.ratio(2, 1), c.ratio(3, 1), c.ratio(4, 1), c.ratio(5, 1))
	return result, nil
}

// txSerializableSmallTable rewrites and analyzes the tables before each slice, so that they stay small. A bare UPDATE of a table that has
// grown by dead rows uses the index, and whether a table grows is chance. The figure is about small tables.
func txSerializableSmallTable(ctx context.Context, e *env) (outcome, error) {
	const n = 100
	open := func(kind txKind) (*txSide, error) {
		s, err := openOrders(ctx, e, kind, pgx.Serializable, n, ownKey)
		if err != nil {
			return nil, err
		}
		s.before = func(ctx context.Context) error {
			_, err := s.pool.Exec(ctx, "VACUUM (FULL, ANALYZE) "+kind.table)
			return err
		}
		return s, nil
	}
	a, err := open(byConsume)
	if err != nil {
		return outcome{}, err
	}
	b, err := open(byUpdate)
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, pairs, slice, &a.side, &b.side)
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	again := fmt.Sprintf("%.3f : %.2f retries per commit", a.perCommit(&c.totals[0]), b.perCommit(&c.totals[1]))
	fmt.Fprintln(e.out, " ", again)
	result.note += "; " + again
	return result, nil
}

// pipelinedTx compares a whole transaction in one batch with the same transaction, statement by statement. It also prints the ratio with
// another limiter on both sides: a bare UPDATE, and a minimal function that decides.
func pipelinedTx(ctx context.Context, e *env) (outcome, error) {
	n := e.few(100_000)
	pick := ownKeys(n)
	batched := func(kind txKind, call func(ctx context.Context, pool *pgxpool.Pool, key string) error) (*side, error) {
		pool, err := e.newPool(ctx, txGoroutines, nil)
		if err != nil {
			return nil, err
		}
		if err := fill(ctx, pool, kind.table, "limit", n); err != nil {
			return nil, err
		}
		return &side{name: kind.name + ", in one batch", goroutines: txGoroutines, call: func(ctx context.Context, worker int) error {
			return call(ctx, pool, pick(worker))
		}}, nil
	}
	limit := plenty(txGoroutines).limit(1)
	library, err := batched(byConsume, func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		var batch pgx.Batch
		if _, err := limits.QueueConsume(ctx, &batch, limit.Key(key)); err != nil {
			return err
		}
		batch.Queue(insertOrderSQL, key)
		return limits.SendTx(ctx, pool, &batch, ratelimit.Isolation(pgx.ReadCommitted))
	})
	if err != nil {
		return outcome{}, err
	}
	byHand := func(kind txKind, take func(batch *pgx.Batch, key string)) (*side, error) {
		return batched(kind, func(ctx context.Context, pool *pgxpool.Pool, key string) error {
			var batch pgx.Batch
			batch.Queue("begin isolation level read committed")
			take(&batch, key)
			batch.Queue(insertOrderSQL, key)
			batch.Queue("commit")
			return pool.SendBatch(ctx, &batch).Close()
		})
	}
	update, err := byHand(byUpdate, func(batch *pgx.Batch, key string) { batch.Queue(bareUpdateSQL, "limit", key) })
	if err != nil {
		return outcome{}, err
	}
	least, err := byHand(byLeast, func(batch *pgx.Batch, key string) {
		batch.Queue(decideInFunctionSQL, decideArgs(key)...).QueryRow(errUnlessGranted)
	})
	if err != nil {
		return outcome{}, err
	}
	var byStatement []*side
	for _, kind := range []txKind{byConsume, byUpdate, byLeast} {
		s, err := openOrders(ctx, e, kind, pgx.ReadCommitted, n, pick)
		if err != nil {
			return outcome{}, err
		}
		byStatement = append(byStatement, &s.side)
	}
	c, err := e.compare(ctx, 2*pairs, slice, library, byStatement[0], update, byStatement[1], least, byStatement[2])
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; with another limiter on both sides: a bare UPDATE %.3g, a minimal function that decides %.3g; library / minimal: %.3g in one batch, %.3g statement by statement",
		c.ratio(2, 3), c.ratio(4, 5), c.ratio(0, 4), c.ratio(1, 5))
	return result, nil
}

// multi3 compares in a transaction, where both sides pay for BEGIN and COMMIT. It also prints one call on the pool, which is a
// transaction by itself.
func multi3(ctx context.Context, e *env) (outcome, error) {
	n := e.few(33_333)
	o := plenty(txGoroutines)
	three := make([]ratelimit.Limit, 3)
	for i := range three {
		three[i] = ratelimit.TokenBucket(fmt.Sprintf("limit%d", i), 1e9, time.Second)
	}
	pick := ownKeys(n)
	open := func(name string, work func(ctx context.Context, pool *pgxpool.Pool, key string) error) (*side, error) {
		pool, err := e.newPool(ctx, o.conns, nil)
		if err != nil {
			return nil, err
		}
		for i := range three {
			if err := fill(ctx, pool, "ratelimit.limits", fmt.Sprintf("limit%d", i), n); err != nil {
				return nil, err
			}
		}
		return &side{name: name, goroutines: txGoroutines, call: func(ctx context.Context, worker int) error {
			return work(ctx, pool, pick(worker))
		}}, nil
	}
	readCommitted := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	one, err := open("one call", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		return pgx.BeginTxFunc(ctx, pool, readCommitted, func(tx pgx.Tx) error {
			_, err := limits.Consume(ctx, tx, three[0].Key(key), three[1].Key(key), three[2].Key(key))
			return err
		})
	})
	if err != nil {
		return outcome{}, err
	}
	alone, err := open("one call on the pool", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		_, err := limits.Consume(ctx, pool, three[0].Key(key), three[1].Key(key), three[2].Key(key))
		return err
	})
	if err != nil {
		return outcome{}, err
	}
	calls, err := open("three calls", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		return pgx.BeginTxFunc(ctx, pool, readCommitted, func(tx pgx.Tx) error {
			for _, limit := range three {
				if _, err := limits.Consume(ctx, tx, limit.Key(key)); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		return outcome{}, err
	}
	together, err := open("three calls in one statement", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		return pgx.BeginTxFunc(ctx, pool, readCommitted, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT FROM
				ratelimit._consume('limit0', $1, 1e9, '1 s', 1e9, NULL, 1, 0) AS a,
				ratelimit._consume('limit1', $1, 1e9, '1 s', 1e9, NULL, 1, 0) AS b,
				ratelimit._consume('limit2', $1, 1e9, '1 s', 1e9, NULL, 1, 0) AS c`, key)
			return err
		})
	})
	if err != nil {
		return outcome{}, err
	}
	least := func(looks bool) func(ctx context.Context, pool *pgxpool.Pool, key string) error {
		return func(ctx context.Context, pool *pgxpool.Pool, key string) error {
			return pgx.BeginTxFunc(ctx, pool, readCommitted, func(tx pgx.Tx) error {
				return decideSeveralInFunction(ctx, tx, []string{"limit0", "limit1", "limit2"}, key, looks)
			})
		}
	}
	looking, err := open("a minimal function that decides three", least(true))
	if err != nil {
		return outcome{}, err
	}
	writing, err := open("... if a denial may write", least(false))
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, manyPairs, shortSlice, one, calls, together, looking, writing, alone)
	if err != nil {
		return outcome{}, err
	}
	result := c.share(3)
	result.note += fmt.Sprintf("; of three calls: one call %.3g, the minimal function %.3g, the same if a denial may write %.3g, three calls in one statement, but not all or nothing, %.3g, one call on the pool, without BEGIN and COMMIT, %.3g",
		c.ratio(0, 1), c.ratio(3, 1), c.ratio(4, 1), c.ratio(2, 1), c.ratio(5, 1))
	return result, nil
}

// each100 compares in a transaction of one worker, as one that fetches jobs of many customers has it: 100 keys of one token bucket in one call
// of ConsumeEach, in one call of a minimal function, in 100 calls, and in one UPDATE that decides nothing.
func each100(ctx context.Context, e *env) (outcome, error) {
	n := e.few(10_000)
	all, limit := keys(n), plenty(0).limit(1)
	on := func(name string, pool *pgxpool.Pool, work func(ctx context.Context, tx pgx.Tx, some []string) error) *side {
		return &side{name: name, goroutines: 1, call: func(ctx context.Context, _ int) error {
			some := make([]string, 100)
			first := rand.IntN(n)
			for i := range some {
				some[i] = all[(first+i*7919)%n] // scattered, and each once
			}
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return work(ctx, tx, some) })
		}}
	}
	open := func(table string) (*pgxpool.Pool, error) {
		pool, err := e.newPool(ctx, 2, nil)
		if err != nil {
			return nil, err
		}
		return pool, fill(ctx, pool, table, limit.Name(), n)
	}
	var pools [3]*pgxpool.Pool
	for i, table := range []string{"ratelimit.limits", "ratelimit.limits", "counters"} {
		var err error
		if pools[i], err = open(table); err != nil {
			return outcome{}, err
		}
	}
	minimal, err := severalKeysFloor(ctx, e, 2, nil, n)
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, 2*pairs, slice,
		on("one call of ConsumeEach", pools[0], func(ctx context.Context, tx pgx.Tx, some []string) error {
			requests := make([]ratelimit.Request, len(some))
			for i, key := range some {
				requests[i] = limit.Key(key)
			}
			decided, err := limits.ConsumeEach(ctx, tx, requests...)
			for _, denial := range decided.Denied() {
				err = fmt.Errorf("denied: %+v", denial)
			}
			return err
		}),
		on("one call of a minimal function", minimal, func(ctx context.Context, tx pgx.Tx, some []string) error {
			slices.Sort(some)
			var places []int32
			var values []float64
			err := tx.QueryRow(ctx, `SELECT ord, value FROM ratelimit._consume_keys($1, $2, $3, '1 second', $4, $5)`,
				limit.Name(), some, 1e9, 1e9, slices.Repeat([]float64{1}, len(some))).Scan(&places, &values)
			if err == nil && len(places) < len(some) {
				return errors.New("denied")
			}
			return err
		}),
		on("100 calls of Consume", pools[1], func(ctx context.Context, tx pgx.Tx, some []string) error {
			for _, key := range some {
				if _, err := limits.Consume(ctx, tx, limit.Key(key)); err != nil {
					return err
				}
			}
			return nil
		}),
		on("one bare UPDATE of 100 rows", pools[2], func(ctx context.Context, tx pgx.Tx, some []string) error {
			var values []float64
			return tx.QueryRow(ctx, `WITH u AS (UPDATE counters AS c SET value = c.value - 1 FROM unnest($2::text[]) AS k (key)
				WHERE c.name = $1 AND c.key = k.key AND c.shard = 0 RETURNING c.value)
				SELECT array_agg(u.value) FROM u`, limit.Name(), some).Scan(&values)
		}))
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; of 100 calls of Consume: ConsumeEach %.3g, the minimal function %.3g, one bare UPDATE of the rows %.3g",
		c.ratio(0, 2), c.ratio(1, 2), c.ratio(3, 2))
	return result, nil
}
