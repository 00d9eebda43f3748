package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// transactionCases are about the caller's own transaction: what joins it, and what others see of it.
func transactionCases() []testCase {
	pgxTx := only(txWays(), func(w way) bool { return w.name == "pgx.Tx "+string(w.level) })
	return []testCase{
		{name: "Transaction: tokens and a business row commit together", ways: txWays(), script: commitTogether},
		{name: "Transaction: tokens and a business row roll back together", ways: txWays(), script: rollBackTogether},
		{name: "Transaction: a savepoint that is rolled back gives the tokens back", ways: pgxTx, script: savepoint},
		{name: "Transaction: it goes on after a denial", ways: txWays(), script: goOn},
		{name: "Transaction: calls for several keys, one after another", ways: txWays(), spread: true, script: oneAfterAnother},
		{name: "Transaction: others wait for its commit", ways: pgxTx, script: waitForCommit},
		{name: "Transaction: others get what it rolls back", ways: pgxTx, script: waitForRollback},
		{name: "Transaction: a snapshot that is too old grants nothing twice", ways: only(pgxTx, func(w way) bool { return w.level != pgx.ReadCommitted }), script: oldSnapshot},
		{name: "InTx: runs the transaction again after a conflict", ways: inTxWays(), script: runAgain},
		{name: "InTx with Hot", ways: inTxWays(), clear: absent, script: hot},
	}
}

// absent are the SQLSTATEs for functions and views that were left out of a server, where a case may do without.
var absent = []string{"42883", "42P01"}

// inTxWays are pools, at the levels at which the scripts call InTx themselves.
func inTxWays() (ways []way) {
	for _, level := range levels {
		// call keeps the model from a transaction: the script begins its own.
		ways = append(ways, way{name: "InTx " + string(level), level: level, on: onPool, call: func(context.Context, *trial, ...ratelimit.Request) error { return nil }})
	}
	return ways
}

// business inserts a business row on any handle.
func (t *trial) business(id string) {
	t.must("INSERT of a business row", t.db.QueryRow(t.ctx, "INSERT INTO "+t.s.business+" (id) VALUES ($1) RETURNING id", id).Scan(&id))
}

// withRow inserts a business row in the trial's transaction, if there is a table.
func (t *trial) withRow(id string) {
	if t.s.businessError != nil {
		t.condition = noTable(t.s.businessError)
		return
	}
	t.business(id)
}

// noTable is the condition of a case that was tried without a business row.
func noTable(err error) string {
	return "tried without a business row: name a table with -table, since CREATE TABLE failed: " + errorText(err)
}

// rowThere wants a business row to be there, or not, and deletes it.
func (t *trial) rowThere(ctx context.Context, id string, want bool) {
	if t.s.businessError != nil {
		return
	}
	tag, err := t.s.pool.Exec(ctx, "DELETE FROM "+t.s.business+" WHERE id = $1", id)
	t.must("the business row afterwards", err)
	t.want((tag.RowsAffected() == 1) == want, "business row: %v, came %v", want, !want)
}

func commitTogether(t *trial) {
	id := t.name("row")
	ann := t.of(t.bucket("bucket"), t.key(0))
	t.grant("a use", ann.Count(4))
	t.withRow(id)
	t.afterwards = func(ctx context.Context) { t.rowThere(ctx, id, true) }
}

func rollBackTogether(t *trial) {
	id := t.name("row")
	ann, bob := t.of(t.bucket("bucket"), t.key(0)), t.of(t.bucket("shards", ratelimit.Shards(3)), t.key(0))
	t.grant("a use", ann.Count(4))
	t.grant("a use of a sharded limit", bob.Count(9))
	t.withRow(id)
	t.rollback = true
	t.afterwards = func(ctx context.Context) { t.rowThere(ctx, id, false) }
}

func savepoint(t *trial) {
	ann := t.of(t.bucket("bucket"), t.key(0))
	t.grant("a use", ann.Count(4))
	outer, outerModel := t.db, t.model
	nested, err := outer.(pgx.Tx).Begin(t.ctx)
	t.must("SAVEPOINT", err)
	model, err := outerModel.(pgx.Tx).Begin(t.ctx)
	if err != nil {
		panic(err)
	}
	t.db, t.model = nested, model
	t.grant("a use after the savepoint", ann.Count(3))
	t.must("ROLLBACK TO SAVEPOINT", nested.Rollback(t.ctx))
	_ = model.Rollback(t.ctx)
	t.db, t.model = outer, outerModel
	r := t.grant("a use after ROLLBACK TO SAVEPOINT", ann)
	t.want(r.Remaining == 5, "5 tokens, came %v", r.Remaining)
}

func goOn(t *trial) {
	ann, bob := t.of(t.bucket("bucket"), t.key(0)), t.of(t.bucket("bucket"), t.key(0)+"'")
	t.grant("a use", ann.Count(10))
	t.deny("a denial", ann)
	t.grant("a use of another key", bob)
	var one int
	t.must("a statement of the caller's", t.db.QueryRow(t.ctx, "SELECT 1").Scan(&one))
}

func oneAfterAnother(t *trial) {
	for i := range 8 {
		r := t.of(t.bucket(fmt.Sprint("limit", i)), t.key(i))
		t.grant(fmt.Sprintf("the first use of limit %d", i+1), r.Count(3))
		t.grant(fmt.Sprintf("the second use of limit %d", i+1), r.Count(3))
	}
}

// patience is how long a call is watched that should wait for another transaction.
const patience = 300 * time.Millisecond

// other makes a call on the pool while the trial's transaction is open, and wants it to wait. It returns what the call
// comes to in the end.
func (t *trial) other(request ratelimit.Request) func() error {
	done := make(chan error, 1)
	began := t.ctx
	go func() {
		_, err := t.limiter.Consume(began, t.s.pool, request)
		done <- err
	}()
	t.step = "a call on the pool while the transaction is open"
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
			t.failed(err)
		}
		t.wrong("want a call that waits for the transaction's end, came an answer at once: granted %v", err == nil)
	case <-time.After(patience):
	}
	return func() error { return <-done }
}

func waitForCommit(t *trial) {
	ann := t.of(t.still("bucket", 10), t.key(0))
	t.grant("a use", ann.Count(10))
	answer := t.other(ann)
	t.afterwards = func(ctx context.Context) {
		t.ctx, t.step = ctx, "the call that waited"
		if err := answer(); !errors.Is(err, ratelimit.ErrDenied) {
			if err == nil {
				t.wrong("want a denial, since the transaction has committed; came a grant")
			}
			t.failed(err)
		}
	}
}

func waitForRollback(t *trial) {
	ann := t.of(t.still("bucket", 10), t.key(0))
	t.grant("a use", ann.Count(10))
	answer := t.other(ann.Count(4))
	t.rollback = true
	t.afterwards = func(ctx context.Context) {
		t.ctx, t.step = ctx, "the call that waited"
		if err := answer(); err != nil {
			if errors.Is(err, ratelimit.ErrDenied) {
				t.wrong("want a grant, since the transaction has rolled back; came a denial")
			}
			t.failed(err)
		}
		_, _ = new(ratelimit.Limiter).Consume(ctx, t.memory, ann.Count(4))
	}
}

// oldSnapshot consumes all on the pool after the transaction's snapshot.
func oldSnapshot(t *trial) {
	t.unmodelled = true
	ann := t.of(t.still("bucket", 10), t.key(0))
	_, err := t.limiter.Consume(t.ctx, t.s.pool, ann.Count(5))
	t.must("a use on the pool", err)
	var one int
	t.must("the transaction's snapshot", t.db.QueryRow(t.ctx, "SELECT 1 FROM pg_class LIMIT 1").Scan(&one))
	_, err = t.limiter.Consume(t.ctx, t.s.pool, ann.Count(5))
	t.must("another use on the pool", err)
	_, err = t.limiter.Consume(t.ctx, t.db, ann.Count(5))
	t.step = "a use in the transaction"
	switch {
	case err == nil:
		t.wrong("want a denial or SQLSTATE 40001, came a grant: 15 of 10 tokens")
	case errors.Is(err, ratelimit.ErrDenied):
	case !isConflict(err):
		t.failed(err)
	}
	t.rollback = true
}

func runAgain(t *trial) {
	t.unmodelled = true
	ann := t.of(t.still("bucket", 10), t.key(0))
	_, err := t.limiter.Consume(t.ctx, t.s.pool, ann.Count(2))
	t.must("a use on the pool", err)
	attempts := 0
	err = t.limiter.InTx(t.ctx, t.s.pool, func(ctx context.Context, tx pgx.Tx) error {
		var one int
		if err := tx.QueryRow(ctx, "SELECT 1 FROM pg_class LIMIT 1").Scan(&one); err != nil {
			return err
		}
		if attempts++; attempts == 1 {
			if _, err := t.limiter.Consume(ratelimit.OutsideTx(ctx), t.s.pool, ann.Count(2)); err != nil {
				return fmt.Errorf("beside the transaction: %w", err)
			}
		}
		_, err := t.limiter.Consume(ctx, tx, ann.Count(2))
		return err
	}, ratelimit.Isolation(t.way.level))
	t.must("InTx", err)
	t.holds(ann, 4)
	t.note = fmt.Sprintf("%d attempts", attempts)
}

// holds wants a balance.
func (t *trial) holds(request ratelimit.Request, want float64) {
	i := slices.IndexFunc(t.used, func(u use) bool { return u.request.Count(1) == request.Count(1) })
	t.step = "the balance afterwards"
	got, err := t.balance(t.ctx, t.used[i])
	if err != nil {
		t.unread(err)
		return
	}
	t.want(near(got, want), "a balance of %v, came %v", want, got)
}

// unread notes that a balance cannot be read here, or ends the trial.
func (t *trial) unread(err error) {
	if fromError(t.ctx, t.step, err).Verdict != refused {
		t.failed(err)
	}
	t.note = join(t.note, "the balance afterwards could not be read: "+errorText(err))
}

func hot(t *trial) {
	t.unmodelled = true
	for _, shards := range []int{1, 4} {
		limit := t.still(fmt.Sprint("hot", shards), 8, ratelimit.Shards(shards))
		ann := t.of(limit, t.key(0))
		for i := range 9 {
			err := t.limiter.InTx(t.ctx, t.s.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := t.limiter.Consume(ctx, tx, ann)
				return err
			}, ratelimit.Isolation(t.way.level), ratelimit.Hot(ann))
			t.step = fmt.Sprintf("use %d of 8, with %d shards", i+1, shards)
			switch {
			case i == 8 && errors.Is(err, ratelimit.ErrDenied):
			case i == 8 && err == nil:
				t.wrong("want a denial, came a grant")
			case err != nil && errors.Is(err, ratelimit.ErrDenied):
				t.wrong("want a grant, came a denial")
			case err != nil:
				t.failed(err)
			}
		}
	}
}
