package faults_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestABlockAfterAFailoverIsFollowed: another server takes over, which had fewer transactions, and has more by the next poll. A block that
// is made there is followed as always, though its transaction has a number that the old server had given before.
func TestABlockAfterAFailoverIsFollowed(t *testing.T) {
	t.Parallel()
	before, after := newServer(t, postgres.BreakableConfig{}), newServer(t, postgres.BreakableConfig{})
	transactions := func(pool *pgxpool.Pool, until uint64) (newest uint64) {
		t.Helper()
		for newest <= until {
			if err := pool.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text::bigint").Scan(&newest); err != nil {
				t.Fatal(err)
			}
		}
		return newest
	}
	old, other := connect(t, before.URL(), 1), connect(t, after.URL(), 1)
	first := transactions(old, transactions(other, 0)+100)

	front := newProxy(t, hostOf(t, before.URL()))
	pool := connect(t, before.URL(), 2, front.dial)
	limits := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool, OnError: func(error) {}})
	if err := follow.Load(t.Context(), limits); err != nil {
		t.Fatal(err)
	}
	go follow.Run(t.Context(), limits)
	request := ratelimit.TokenBucket("api", 1e6, time.Second).Key("ann")
	if _, err := limits.Consume(t.Context(), pool, request); err != nil {
		t.Fatal(err)
	}

	before.Kill()
	if _, err := other.Exec(t.Context(), "SELECT ratelimit.block('api', 'ann', forever => true)"); err != nil {
		t.Fatal(err)
	}
	transactions(other, first+100)
	front.lead(hostOf(t, after.URL()))
	began := time.Now()
	eventually(t, "the block is followed", func() bool {
		_, err := limits.Check(t.Context(), pool, request)
		return errors.Is(err, ratelimit.ErrDenied)
	})
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("it took %v", took)
	}
}
