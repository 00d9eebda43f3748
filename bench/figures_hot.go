package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// Transactions on one hot key run one after another, so these figures need longer slices, and fewer.
const (
	hotGoroutines = 64
	hotPairs      = 6
	hotSlice      = 1500 * time.Millisecond
	// The connections of an ordinary pool, for the queue. Without the queue, each goroutine has a connection.
	queueConns = 16
)

// hot is InTx on one key: consume and insert, in SERIALIZABLE.
type hot struct {
	pool              *pgxpool.Pool
	limit             ratelimit.Limit
	options           []ratelimit.TxOption
	before            string // a statement that comes before the limit
	attempts, commits atomic.Int64
}

func newHot(pool *pgxpool.Pool, limit ratelimit.Limit, queue bool) *hot {
	h := &hot{pool: pool, limit: limit, options: []ratelimit.TxOption{ratelimit.Attempts(often)}}
	if queue {
		h.options = append(h.options, ratelimit.Hot(limit.Key(hotKey(0))))
	}
	return h
}

func (h *hot) call(ctx context.Context, worker int) error {
	key := hotKey(worker)
	err := limits.InTx(ctx, h.pool, func(ctx context.Context, tx pgx.Tx) error {
		h.attempts.Add(1)
		if h.before != "" {
			if _, err := tx.Exec(ctx, h.before); err != nil {
				return err
			}
		}
		if _, err := limits.Consume(ctx, tx, h.limit.Key(key)); err != nil {
			return err
		}
		return insertOrder(ctx, tx, key)
	}, h.options...)
	if err == nil {
		h.commits.Add(1)
	}
	return err
}

// wasted is the number of attempts that were rolled back, per commit.
func (h *hot) wasted() float64 {
	return float64(h.attempts.Load())/float64(h.commits.Load()) - 1
}

func openHot(ctx context.Context, e *env, name string, conns int, queue bool, shards int) (*side, *hot, error) {
	pool, err := e.newPool(ctx, conns, nil)
	if err != nil {
		return nil, nil, err
	}
	h := newHot(pool, plenty(hotGoroutines).limit(shards), queue)
	return &side{name: name, goroutines: hotGoroutines, call: h.call}, h, nil
}

// queueAndRetry compares InTx with and without the queue.
func queueAndRetry(ctx context.Context, e *env, beside ...*side) (*comparison, *hot, string, error) {
	a, queue, err := openHot(ctx, e, "with the queue", queueConns, true, 1)
	if err != nil {
		return nil, nil, "", err
	}
	b, without, err := openHot(ctx, e, "without", hotGoroutines, false, 1)
	if err != nil {
		return nil, nil, "", err
	}
	c, err := e.compare(ctx, hotPairs, hotSlice, a, b, beside...)
	if err != nil {
		return nil, nil, "", err
	}
	note := fmt.Sprintf("wasted per commit %.4f : %.2f", queue.wasted(), without.wasted())
	fmt.Fprintln(e.out, " ", note)
	return c, queue, note, nil
}

// hotQueueVsMutex compares with a minimal queue, a mutex in the process after BEGIN. It also shows a single goroutine, since transactions
// on one row run one after another.
func hotQueueVsMutex(ctx context.Context, e *env) (outcome, error) {
	alone, _, err := openHot(ctx, e, "one goroutine alone", 1, false, 1)
	if err != nil {
		return outcome{}, err
	}
	alone.goroutines = 1
	pool, err := e.newPool(ctx, queueConns, nil)
	if err != nil {
		return outcome{}, err
	}
	limit := plenty(hotGoroutines).limit(1)
	var mu sync.Mutex
	least := &side{name: "a mutex after BEGIN", goroutines: hotGoroutines, call: func(ctx context.Context, worker int) error {
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		_, err = limits.Consume(ctx, tx, limit.Key(hotKey(worker)))
		if err == nil {
			err = insertOrder(ctx, tx, hotKey(worker))
		}
		if err == nil {
			err = tx.Commit(ctx)
		}
		return errors.Join(err, ended(tx.Rollback(ctx)))
	}}
	c, _, note, err := queueAndRetry(ctx, e, alone, least)
	if err != nil {
		return outcome{}, err
	}
	result := c.share(3)
	result.note += fmt.Sprintf("; %s; relative to 64 goroutines without the queue: with it %.3g, one goroutine alone %.3g, 64 with only a mutex after BEGIN %.3g",
		note, c.ratio(0, 1), c.ratio(2, 1), c.ratio(3, 1))
	return result, nil
}

// ended returns the error of a rollback, unless it is that the transaction has ended by COMMIT.
func ended(err error) error {
	if errors.Is(err, pgx.ErrTxClosed) {
		return nil
	}
	return err
}

func hotQueueP99(ctx context.Context, e *env) (outcome, error) {
	c, _, _, err := queueAndRetry(ctx, e)
	if err != nil {
		return outcome{}, err
	}
	a, b := c.totals[0].latencies.quantile(0.99), c.totals[1].latencies.quantile(0.99)
	return outcome{value: a.Seconds() / b.Seconds(), note: short(a) + " : " + short(b)}, nil
}

func hotQueueWasted(ctx context.Context, e *env) (outcome, error) {
	_, queue, note, err := queueAndRetry(ctx, e)
	if err != nil {
		return outcome{}, err
	}
	return outcome{value: queue.wasted(), note: note}, nil
}

// hotQueueVsUpdate also shows the cost of the queue if transactions do other work before they consume. A turn lasts for the whole
// transaction; a row is locked only from Consume on.
func hotQueueVsUpdate(ctx context.Context, e *env) (outcome, error) {
	a, _, err := openHot(ctx, e, "SERIALIZABLE, queue", queueConns, true, 1)
	if err != nil {
		return outcome{}, err
	}
	pool, err := e.newPool(ctx, hotGoroutines, nil)
	if err != nil {
		return outcome{}, err
	}
	if _, err := pool.Exec(ctx, `INSERT INTO counters VALUES ('limit', $1, 0, 1, 1e9, now())`, hotKey(0)); err != nil {
		return outcome{}, err
	}
	b := &side{name: "READ COMMITTED, bare UPDATE", goroutines: hotGoroutines, call: func(ctx context.Context, worker int) error {
		return order(ctx, pool, pgx.ReadCommitted, hotKey(worker), updateOne)
	}}
	slow, slowQueued, err := openHot(ctx, e, "queue, 10 ms of work first", queueConns, true, 1)
	if err != nil {
		return outcome{}, err
	}
	waiting, slowWaiting, err := openHot(ctx, e, "the same in READ COMMITTED without the queue", hotGoroutines, false, 1)
	if err != nil {
		return outcome{}, err
	}
	slowWaiting.options = append(slowWaiting.options, ratelimit.Isolation(pgx.ReadCommitted))
	slowQueued.before, slowWaiting.before = "SELECT pg_sleep(0.01)", "SELECT pg_sleep(0.01)"
	c, err := e.compare(ctx, hotPairs, hotSlice, a, b, slow, waiting)
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; with 10 ms of other work before the limit: queue %s/s : READ COMMITTED without the queue %s/s",
		thousands(c.totals[2].perSecond()), thousands(c.totals[3].perSecond()))
	return result, nil
}

func shardsVsOneRow(ctx context.Context, e *env) (outcome, error) {
	a, sharded, err := openHot(ctx, e, "10 shards", queueConns, true, 10)
	if err != nil {
		return outcome{}, err
	}
	b, one, err := openHot(ctx, e, "one row", queueConns, true, 1)
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, hotPairs, hotSlice, a, b)
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	note := fmt.Sprintf("wasted per commit %.4f : %.4f", sharded.wasted(), one.wasted())
	fmt.Fprintln(e.out, " ", note)
	result.note += "; " + note
	return result, nil
}
