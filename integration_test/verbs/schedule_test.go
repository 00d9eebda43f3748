package verbs_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// jobQueue is a plain table used as a queue. The tokens of a job are reserved in the transaction that inserts its row, and
// settled when the job is done. Any worker may lose its connection at any time.
type jobQueue struct {
	*testing.T
	pool    *pgxpool.Pool // of the enqueuers and workers
	admin   *pgxpool.Pool // of the test
	limiter *ratelimit.Limiter
	request ratelimit.Request
	options []ratelimit.TxOption

	killed atomic.Int64 // connections, each between a consumption or a settlement and its commit
}

func newJobQueue(t *testing.T, request ratelimit.Request, options ...ratelimit.TxOption) *jobQueue {
	t.Helper()
	admin := harness.NewPool(t, 2)
	_, err := admin.Exec(t.Context(), `
		CREATE SEQUENCE settlements;
		CREATE TABLE jobs (
			id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			estimate    float8 NOT NULL,
			consumed_at timestamptz NOT NULL,
			receipt     text NOT NULL,
			run_at      timestamptz NOT NULL,
			state       text NOT NULL DEFAULT 'waiting',
			ran_at      timestamptz,
			cost        float8,
			settled     bigint -- in the order of locks on the limit's row
		)`)
	if err != nil {
		t.Fatal(err)
	}
	return &jobQueue{
		T: t, pool: harness.Connect(t, admin.Config().ConnString(), 8), admin: admin,
		limiter: &ratelimit.Limiter{}, request: request, options: append(options, ratelimit.Attempts(1000)),
	}
}

// kill ends the connection of a transaction, and returns when it has ended. The commit that follows must fail.
func (q *jobQueue) kill(tx pgx.Tx) error {
	var ended bool
	err := q.admin.QueryRow(q.Context(), "SELECT pg_terminate_backend($1, 10000)", harness.ServerPID(q.T, tx)).Scan(&ended)
	if err == nil && !ended {
		err = errors.New("the connection did not end within 10 s")
	}
	if err != nil {
		q.Error(err)
	}
	q.killed.Add(1)
	return err
}

// inTx runs a transaction. If kill is set and the transaction wrote, its connection is killed before the commit, and the
// transaction runs again on another one.
func (q *jobQueue) inTx(kill bool, fn func(ctx context.Context, tx pgx.Tx) (wrote bool, err error), options ...ratelimit.TxOption) {
	for {
		killed := false
		err := q.limiter.InTx(q.Context(), q.pool, func(ctx context.Context, tx pgx.Tx) error {
			wrote, err := fn(ctx, tx)
			if err != nil || !wrote || !kill {
				return err
			}
			killed = true
			return q.kill(tx)
		}, options...)
		switch {
		case killed && err == nil:
			q.Error("a transaction was committed on a connection that was killed before")
		case killed:
			kill = false
			continue
		case err != nil:
			q.Error(err)
		}
		return
	}
}

// enqueue reserves and enqueues in one transaction.
func (q *jobQueue) enqueue(estimate float64, kill bool) (id int64) {
	q.inTx(kill, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		reserved, err := q.limiter.Reserve(ctx, tx, q.request.Count(estimate))
		if err != nil {
			return false, err
		}
		return true, q.insert(ctx, tx, estimate, reserved).Scan(&id)
	}, q.options...)
	return id
}

// enqueueApart uses two transactions. It shows that the tests can fail.
func (q *jobQueue) enqueueApart(estimate float64, kill bool) (id int64) {
	q.inTx(kill, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		reserved, err := q.limiter.Reserve(ctx, q.admin, q.request.Count(estimate))
		if err != nil {
			return false, err
		}
		return true, q.insert(ctx, tx, estimate, reserved).Scan(&id)
	}, q.options...)
	return id
}

func (q *jobQueue) insert(ctx context.Context, tx pgx.Tx, estimate float64, reserved ratelimit.Reservation) pgx.Row {
	return tx.QueryRow(ctx, "INSERT INTO jobs (estimate, consumed_at, receipt, run_at) VALUES ($1, $2, $3, $4) RETURNING id",
		estimate, reserved.At, reserved.Receipt(), reserved.RetryAt)
}

// runDue runs one due job, if there is one that no other worker has.
func (q *jobQueue) runDue(kill bool) (ran bool) {
	q.inTx(kill, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		tag, err := tx.Exec(ctx, `
			UPDATE jobs SET state = 'done', ran_at = now()
			 WHERE id = (SELECT id FROM jobs WHERE state = 'waiting' AND run_at <= now() ORDER BY run_at LIMIT 1 FOR UPDATE SKIP LOCKED)`)
		ran = tag.RowsAffected() > 0
		return ran, err
	}, ratelimit.Isolation(pgx.ReadCommitted)) // workers do not queue for the limit
	return ran
}

// settle corrects the estimate of a job, in the transaction that marks the job as done.
func (q *jobQueue) settle(id int64, cost float64, kill bool) {
	q.inTx(kill, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		left, wrote, err := q.settleIn(ctx, tx, "UPDATE jobs SET state = 'done', cost = $2 WHERE id = $1 AND state = 'waiting' RETURNING estimate, receipt", id, cost)
		if err == nil && wrote {
			_, err = tx.Exec(ctx, "UPDATE jobs SET receipt = $2, settled = nextval('settlements') WHERE id = $1", id, left)
		}
		return wrote, err
	}, q.options...)
}

// settleAlways does not look whether the job is settled already. It shows that the tests can fail.
func (q *jobQueue) settleAlways(id int64, cost float64, kill bool) {
	q.inTx(kill, func(ctx context.Context, tx pgx.Tx) (bool, error) {
		_, wrote, err := q.settleIn(ctx, tx, "UPDATE jobs SET state = 'done', cost = $2 WHERE id = $1 RETURNING estimate, receipt", id, cost)
		return wrote, err
	}, q.options...)
}

// settleIn returns the receipt for the rest.
func (q *jobQueue) settleIn(ctx context.Context, tx pgx.Tx, update string, id int64, cost float64) (receipt ratelimit.Receipt, wrote bool, err error) {
	var estimate float64
	err = tx.QueryRow(ctx, update, id, cost).Scan(&estimate, &receipt)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return receipt, false, nil
	case err != nil:
		return receipt, false, err
	case cost > estimate:
		_, err = q.limiter.Charge(ctx, tx, q.request.Count(cost-estimate))
	case cost < estimate:
		var result ratelimit.Result
		result, err = q.limiter.Refund(ctx, tx, receipt, q.request.Count(estimate-cost))
		receipt = result.Receipt()
	}
	return receipt, true, err
}

func (q *jobQueue) balance() float64 {
	q.Helper()
	return harness.ReadBalance(q, q.limiter, q.admin, q.request)
}

// job is the part of a row that the tests read.
type job struct {
	id                       int64
	estimate                 float64
	consumedAt, runAt, ranAt time.Time
}

func (j job) late() time.Duration { return j.ranAt.Sub(j.runAt) }

func (q *jobQueue) jobs() []job {
	q.Helper()
	rows, err := q.admin.Query(q.Context(), "SELECT id, estimate, consumed_at, run_at, ran_at FROM jobs ORDER BY id")
	if err != nil {
		q.Fatal(err)
	}
	jobs, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (j job, err error) {
		return j, row.Scan(&j.id, &j.estimate, &j.consumedAt, &j.runAt, &j.ranAt)
	})
	if err != nil {
		q.Fatal(err)
	}
	return jobs
}

// burstOf returns the least b for which, over any span of time, the jobs took at most b + span * harness.PerSecond tokens.
func burstOf(jobs []job, perSecond float64, at func(job) time.Time) (most float64) {
	slices.SortFunc(jobs, func(a, b job) int { return at(a).Compare(at(b)) })
	level := 0.0
	for i, j := range jobs {
		if i > 0 {
			level = max(0, level-at(j).Sub(at(jobs[i-1])).Seconds()*perSecond)
		}
		level += j.estimate
		most = max(most, level)
	}
	return most
}

// leftBy returns the tokens of a bucket that was full before these jobs reserved, at the last reservation.
func leftBy(jobs []job, capacity, perSecond float64) (left float64) {
	slices.SortFunc(jobs, func(a, b job) int { return a.consumedAt.Compare(b.consumedAt) })
	left = capacity
	for i, j := range jobs {
		if i > 0 {
			left = min(capacity, left+j.consumedAt.Sub(jobs[i-1].consumedAt).Seconds()*perSecond)
		}
		left -= j.estimate
	}
	return left
}

// TestReservedJobsRunAtTheirInstantsAndCrashesLoseNeitherTokensNorJobs enqueues and runs jobs on many connections, and
// kills some of them before their commits.
func TestReservedJobsRunAtTheirInstantsAndCrashesLoseNeitherTokensNorJobs(t *testing.T) {
	t.Parallel()
	const perSecond, capacity, most = 1500, 60, 40 // tokens; most is the largest job
	const microsecond = perSecond * 1e-6           // instants are rounded to it; in tokens
	llmTokens := ratelimit.TokenBucket("llmTokens", perSecond, time.Second, ratelimit.Capacity(capacity))
	sharded := ratelimit.TokenBucket("llmTokens", perSecond, time.Second, ratelimit.Capacity(3*capacity), ratelimit.Shards(3))

	play := func(t *testing.T, q *jobQueue, capacity float64) []job {
		const enqueuers, each, workers = 8, 25, 6
		r := harness.NewRand(t)
		var mu sync.Mutex
		acknowledged := map[int64]bool{}
		var enqueuing, working sync.WaitGroup
		for range enqueuers {
			r := rand.New(rand.NewPCG(r.Uint64(), 0))
			enqueuing.Go(func() {
				for range each {
					id := q.enqueue(float64(1+r.IntN(most)), r.IntN(8) == 0)
					mu.Lock()
					acknowledged[id] = true
					mu.Unlock()
				}
			})
		}
		var ran atomic.Int64
		for range workers {
			r := rand.New(rand.NewPCG(r.Uint64(), 0))
			working.Go(func() {
				for ran.Load() < enqueuers*each && !t.Failed() && t.Context().Err() == nil {
					if q.runDue(r.IntN(16) == 0) {
						ran.Add(1)
					} else {
						time.Sleep(5 * time.Millisecond)
					}
				}
			})
		}
		enqueuing.Wait()
		working.Wait()

		jobs := q.jobs() // fails if a job has not run
		for _, j := range jobs {
			if !acknowledged[j.id] {
				t.Errorf("job %d is in the table, but its commit was not acknowledged", j.id)
			}
			if j.late() < 0 {
				t.Errorf("job %d ran %v before its instant", j.id, -j.late())
			}
		}
		if len(jobs) != enqueuers*each || len(acknowledged) != len(jobs) || ran.Load() != int64(len(jobs)) || q.killed.Load() < 10 {
			t.Errorf("%d jobs, %d acknowledged, %d ran, want %d; %d connections killed", len(jobs), len(acknowledged), ran.Load(), enqueuers*each, q.killed.Load())
		}

		late := slices.MaxFunc(jobs, func(a, b job) int { return cmp.Compare(a.late(), b.late()) }).late()
		most := capacity + late.Seconds()*perSecond + microsecond
		if burst := burstOf(jobs, perSecond, func(j job) time.Time { return j.ranAt }); burst > most {
			t.Errorf("over some span the rate and %v tokens ran, want at most %v, being up to %v late", burst, most, late)
		}
		t.Logf("%d jobs, %d connections killed, up to %v late", len(jobs), q.killed.Load(), late)
		return jobs
	}
	// In READ COMMITTED, a call that waits for the row is decided as of the start of the wait. So its instant may lie in
	// the past. The calls of this test wait for their turn first, or run again.
	due := func(t *testing.T, jobs []job, capacity float64) {
		if burst := burstOf(jobs, perSecond, func(j job) time.Time { return j.runAt }); burst > capacity+microsecond {
			t.Errorf("over some span the rate and %v tokens are due, the capacity is %v", burst, capacity)
		}
	}
	lost := func(q *jobQueue, jobs []job) float64 {
		var value float64
		if err := q.admin.QueryRow(q.Context(), "SELECT value FROM ratelimit.limits").Scan(&value); err != nil {
			q.Fatal(err)
		}
		return leftBy(jobs, capacity, perSecond) - value
	}

	for _, level := range harness.SomeOf(t, 1, harness.Levels...) {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			q := newJobQueue(t, llmTokens.Key("team"), ratelimit.Isolation(level), ratelimit.Hot(llmTokens.Key("team")))
			jobs := play(t, q, capacity)
			due(t, jobs, capacity)
			if lost := lost(q, jobs); math.Abs(lost) > 1e-6 {
				t.Errorf("%v tokens are gone, but no job has them", lost)
			}
		})
	}
	t.Run("without turns", func(t *testing.T) {
		t.Parallel()
		q := newJobQueue(t, llmTokens.Key("team"), ratelimit.Isolation(pgx.ReadCommitted))
		play(t, q, capacity)
	})
	t.Run("three shards", func(t *testing.T) {
		t.Parallel()
		q := newJobQueue(t, sharded.Key("team"), ratelimit.Isolation(pgx.Serializable))
		due(t, play(t, q, 3*capacity), 3*capacity)
	})
}

// TestAKilledConnectionLosesTheReservationWithItsJob counts the tokens exactly.
func TestAKilledConnectionLosesTheReservationWithItsJob(t *testing.T) {
	t.Parallel()
	for what, lost := range map[string]float64{"in one transaction": 0, "in two": 70} { // the second shows that this test can fail
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			tokens := ratelimit.TokenBucket("tokens", 1e-9, time.Hour, ratelimit.Capacity(100))
			q := newJobQueue(t, tokens.Key("team"))
			enqueue := q.enqueue
			if lost > 0 {
				enqueue = q.enqueueApart
			}
			for i := range 20 {
				enqueue(10, i%3 == 1)
			}
			var jobs int
			if err := q.admin.QueryRow(t.Context(), "SELECT count(*) FROM jobs").Scan(&jobs); err != nil {
				t.Fatal(err)
			}
			if balance := q.balance(); jobs != 20 || q.killed.Load() != 7 || !harness.Near(balance, 100-20*10-lost) {
				t.Errorf("%d jobs, a balance of %v, want 20 and %v; %d connections killed, want 7", jobs, balance, 100-20*10-lost, q.killed.Load())
			}
		})
	}
}

// TestAnEstimateIsSettledExactlyOnce delivers the results of jobs several times at once, and kills connections before their
// commits.
func TestAnEstimateIsSettledExactlyOnce(t *testing.T) {
	t.Parallel()
	play := func(t *testing.T, q *jobQueue, settle func(q *jobQueue, id int64, cost float64, kill bool)) (balance, want float64) {
		const jobs, deliveries = 30, 3
		r := harness.NewRand(t)
		var wg sync.WaitGroup
		slots := make(chan struct{}, 10)
		spent := 0.0
		for range jobs {
			r := rand.New(rand.NewPCG(r.Uint64(), 0))
			estimate := float64(1 + r.IntN(1000))
			cost := harness.OneOf(r, estimate, 0, float64(r.IntN(1000)), estimate+float64(r.IntN(1000)), estimate/3)
			spent += cost
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				id := q.enqueue(estimate, r.IntN(8) == 0)
				var delivering sync.WaitGroup
				for range deliveries {
					kill := r.IntN(4) == 0
					delivering.Go(func() { settle(q, id, cost, kill) })
				}
				delivering.Wait()
			})
		}
		wg.Wait()

		var done int
		var costs float64
		if err := q.admin.QueryRow(t.Context(), "SELECT count(*), sum(cost) FROM jobs WHERE state = 'done'").Scan(&done, &costs); err != nil {
			t.Fatal(err)
		}
		if done != jobs || !harness.Near(costs, spent) || q.killed.Load() == 0 {
			t.Errorf("%d jobs are done for %v tokens, want %d for %v; %d connections killed", done, costs, jobs, spent, q.killed.Load())
		}
		return q.balance(), 1e6 - spent
	}

	for _, level := range harness.SomeOf(t, 1, harness.Levels...) {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, %d shards", level, shards), func(t *testing.T) {
				t.Parallel()
				tokens := ratelimit.TokenBucket("tokens", 1e-9, time.Hour, ratelimit.Capacity(1e6), ratelimit.Shards(shards))
				q := newJobQueue(t, tokens.Key("team"), ratelimit.Isolation(level))
				if balance, want := play(t, q, (*jobQueue).settle); !harness.Near(balance, want) {
					t.Errorf("the balance is %v, want %v", balance, want)
				}
			})
		}
	}
	t.Run("even if it is settled", func(t *testing.T) {
		t.Parallel()
		tokens := ratelimit.TokenBucket("tokens", 1e-9, time.Hour, ratelimit.Capacity(1e6))
		q := newJobQueue(t, tokens.Key("team"))
		if balance, want := play(t, q, (*jobQueue).settleAlways); harness.Near(balance, want) {
			t.Errorf("the balance is %v: this test cannot see that a job is settled twice", balance)
		}
	})
}

// TestSettlingInAFixedWindowGivesNothingBackToALaterOne settles each job twice, at once: before, in and after the window
// that it is to run in. It compares the answers and the balance with the rule.
func TestSettlingInAFixedWindowGivesNothingBackToALaterOne(t *testing.T) {
	t.Parallel()
	const rate = 1000
	limit := ratelimit.FixedWindow("tokens", rate, time.Hour, ratelimit.Start(harness.Noon))
	q := newJobQueue(t, limit.Key("team"))
	var clock *harness.Clock
	q.limiter, clock = harness.NewLimiter()
	r := harness.NewRand(t)

	type pending struct {
		estimate, cost float64
		taken          algebra.Taken
	}
	model := harness.Numbers(limit, "team")
	var rows []algebra.Row
	var promised algebra.Micros
	jobs := map[int64]*pending{}
	var waiting []int64
	var refunded, late, behind, charged, indebted int
	complete := func() bool {
		return refunded > 0 && late > 0 && behind > 0 && charged > 0 && indebted > 0 && q.killed.Load() > 0
	}
	for step := 0; step < 60 || step < 1000 && !complete(); step++ {
		clock.Advance(time.Duration(r.Int64N(int64(50 * time.Minute))).Truncate(time.Microsecond))
		if model.Total(rows, algebra.At(clock.At)) < -3*rate { // no job would ever be late
			clock.Advance(3 * time.Hour)
		}
		now := algebra.At(clock.At)
		for range r.IntN(4) {
			estimate := float64(1 + r.IntN(rate/2))
			id := q.enqueue(estimate, r.IntN(4) == 0)
			runAt, lefts, _ := algebra.Reserve([]algebra.Demand{{Limit: model, Rows: rows, Shards: 1, Count: estimate, Lowest: math.Inf(-1)}}, now, algebra.Forever)
			rows = model.Spread(rows, 1, lefts[0], now)
			if runAt > now {
				promised = max(promised, runAt)
			}
			waiting = append(waiting, id)
			jobs[id] = &pending{estimate: estimate, taken: algebra.Taken{At: now, RunAt: runAt, Count: estimate, Held: rows[0].Value, Part: 1}}
			var told time.Time
			if err := q.admin.QueryRow(t.Context(), "SELECT run_at FROM jobs WHERE id = $1", id).Scan(&told); err != nil || !told.Equal(runAt.Time()) {
				t.Fatalf("at %v a job is to run at %v, %v, want %v", clock.At, told, err, runAt.Time())
			}
		}
		if model.Total(rows, now) < 0 {
			indebted++
		}

		r.Shuffle(len(waiting), func(i, j int) { waiting[i], waiting[j] = waiting[j], waiting[i] })
		var settling sync.WaitGroup
		n := r.IntN(len(waiting) + 1)
		for _, id := range waiting[:n] {
			j := jobs[id]
			j.cost = harness.OneOf(r, j.estimate, float64(r.IntN(int(j.estimate))), float64(r.IntN(int(j.estimate))), j.estimate+float64(r.IntN(100)))
			for range 2 {
				kill := r.IntN(8) == 0
				settling.Go(func() { q.settle(id, j.cost, kill) })
			}
		}
		settling.Wait()
		for _, id := range q.settled(waiting[:n]) {
			switch j := jobs[id]; {
			case j.cost > j.estimate:
				charged++
				rows = model.Take(rows, 1, j.cost-j.estimate, now)
			case j.cost < j.estimate:
				j.taken.Promised = promised
				back := model.Refund(rows, j.taken, j.estimate-j.cost, now)
				rows = model.Take(rows, 1, -back, now)
				switch {
				case back > 0:
					refunded++
				case model.UpTo(j.taken.RunAt) < model.UpTo(now):
					late++
				default:
					behind++
				}
			}
		}
		waiting = waiting[n:]
		if balance := q.balance(); len(rows) > 0 && balance != model.Total(rows, now) {
			t.Fatalf("at %v the balance is %v, want %v", clock.At, balance, model.Total(rows, now))
		}
	}
	t.Logf("%d refunded, %d too late, %d behind others, %d charged, %d times in debt, %d connections killed", refunded, late, behind, charged, indebted, q.killed.Load())
	if !complete() {
		t.Error("something has not come up")
	}
}

// settled wants each job to be settled once, and returns the jobs in the order of settlement.
func (q *jobQueue) settled(jobs []int64) []int64 {
	q.Helper()
	rows, err := q.admin.Query(q.Context(), "SELECT id FROM jobs WHERE id = ANY($1) AND settled IS NOT NULL ORDER BY settled", jobs)
	if err != nil {
		q.Fatal(err)
	}
	settled, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || len(settled) != len(jobs) {
		q.Fatalf("%d jobs of %d are settled, %v", len(settled), len(jobs), err)
	}
	return settled
}
