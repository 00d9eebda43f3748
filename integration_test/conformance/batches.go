package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// batchCases are calls that are queued on a batch of the caller's.
func batchCases() []testCase {
	var sendTx, send []way
	for _, level := range levels {
		sendTx = append(sendTx, way{name: "SendTx " + string(level), level: level, on: onPool, call: func(ctx context.Context, t *trial, _ ...ratelimit.Request) error {
			return t.limiter.SendTx(ctx, t.s.pool, t.batch, ratelimit.Isolation(level))
		}})
		send = append(send, way{name: "SendBatch on a transaction, " + string(level), level: level, on: onPool, call: func(ctx context.Context, t *trial, _ ...ratelimit.Request) error {
			return pgx.BeginTxFunc(ctx, t.s.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return tx.SendBatch(ctx, t.batch).Close() })
		}})
	}
	for _, mode := range []pgx.QueryExecMode{0, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		w := way{name: "SendBatch on a pool", on: onPool, call: func(ctx context.Context, t *trial, _ ...ratelimit.Request) error {
			pool, err := t.s.inMode(ctx, mode)
			if err != nil {
				return err
			}
			defer pool.Close()
			return pool.SendBatch(ctx, t.batch).Close()
		}}
		if mode != 0 {
			w.name += " in mode " + mode.String()
			w.unprepared, w.simple = true, mode == pgx.QueryExecModeSimpleProtocol
		}
		send = append(send, w)
	}
	ways := append(sendTx, send...)
	return []testCase{
		{name: "Batch: grants and a business row commit together", ways: ways, script: batchGrant},
		{name: "Batch: a denial rolls everything back", ways: ways, script: batchDenial},
		{name: "Batch: several limits in one call", ways: ways, spread: true, script: batchSeveral},
		{name: "Batch: calls for several keys", ways: ways, spread: true, script: batchKeys},
	}
}

// queue queues calls on the trial's batch.
func (t *trial) queue(calls ...[]ratelimit.Request) (results []*ratelimit.Result) {
	t.unmodelled = true
	if t.batch == nil {
		t.batch = new(pgx.Batch)
	}
	for _, requests := range calls {
		r, err := t.limiter.QueueConsume(t.ctx, t.batch, requests...)
		t.must("QueueConsume", err)
		results = append(results, r)
	}
	return results
}

func (t *trial) queueRow(id string) {
	if t.s.businessError != nil {
		t.condition = noTable(t.s.businessError)
		return
	}
	t.batch.Queue("INSERT INTO "+t.s.business+" (id) VALUES ($1)", id)
}

// send sends the batch in the trial's way.
func (t *trial) send() error {
	t.step = "the batch"
	err := t.way.call(t.ctx, t)
	t.batch = nil
	return err
}

func batchGrant(t *trial) {
	id := t.name("row")
	ann, shards := t.of(t.still("bucket", 10), t.key(0)), t.of(t.still("shards", 12, ratelimit.Shards(3)), t.key(0))
	for i := range 2 {
		results := t.queue([]ratelimit.Request{ann.Count(2)}, []ratelimit.Request{shards.Count(5)})
		if i == 1 {
			t.queueRow(id)
		}
		t.must("the batch", t.send())
		t.want(results[0].OK && results[0].Remaining == float64(8-2*i), "a grant that leaves %d, came %s", 8-2*i, show(*results[0]))
		t.want(results[1].OK, "a grant, came %s", show(*results[1]))
	}
	t.rowThere(t.ctx, id, true)
	t.holds(ann, 6)
	t.holds(shards, 2)
}

func batchDenial(t *trial) {
	id := t.name("row")
	ann, bob := t.of(t.still("bucket", 10), t.key(0)), t.of(t.still("bucket", 10), t.key(0)+"'")
	t.queue([]ratelimit.Request{ann.Count(10)})
	t.must("the first batch", t.send())
	t.queue([]ratelimit.Request{bob.Count(3)})
	t.queueRow(id)
	denied := t.queue([]ratelimit.Request{ann})
	err := t.send()
	switch {
	case err == nil:
		t.wrong("want a denial, came none")
	case !errors.Is(err, ratelimit.ErrDenied):
		t.failed(err)
	}
	t.want(!denied[0].OK && denied[0].RetryAfter > 0, "a denial with RetryAt, came %s", show(*denied[0]))
	t.rowThere(t.ctx, id, false)
	t.holds(ann, 0)
	t.holds(bob, 10)
}

func batchSeveral(t *trial) {
	var requests []ratelimit.Request
	for i := range 8 {
		requests = append(requests, t.of(t.still(fmt.Sprint("limit", i), 10), t.key(i)))
	}
	for i := range 2 {
		results := t.queue(counts(requests, 4))
		t.must("the batch", t.send())
		t.want(results[0].OK && results[0].Remaining == float64(6-4*i), "a grant that leaves %d, came %s", 6-4*i, show(*results[0]))
	}
	for _, r := range requests {
		t.holds(r, 2)
	}
}

func batchKeys(t *trial) {
	var calls [][]ratelimit.Request
	for i := range 8 {
		calls = append(calls, []ratelimit.Request{t.of(t.still(fmt.Sprint("limit", i), 10), t.key(i)).Count(3)})
	}
	for range 2 {
		t.queue(calls...)
		t.must("the batch", t.send())
	}
	for _, call := range calls {
		t.holds(call[0].Count(1), 4)
	}
}
