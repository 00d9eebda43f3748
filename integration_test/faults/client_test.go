package faults_test

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// clientOf is an environment variable of a client process. It has the database's URL.
const clientOf = "TXLIMIT_FAULTS_CLIENT_OF"

// clientLimits are the limits that the clients consume: one with a queue, and one whose row they wait for.
var clientLimits = []ratelimit.Limit{
	ratelimit.TokenBucket("client Hot", 1e-9, time.Hour, ratelimit.Capacity(capacity)),
	ratelimit.TokenBucket("client", 1e-9, time.Hour, ratelimit.Capacity(capacity)),
}

const clientGoroutines = 4 // for each of the limits

// client consumes and stores orders until it is killed, and prints those that have been acknowledged.
func client(url string) int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var limiter ratelimit.Limiter
	var wg sync.WaitGroup
	for i, limit := range clientLimits {
		options := []ratelimit.TxOption{ratelimit.Isolation(pgx.ReadCommitted)}
		if i == 0 {
			options = append(options, ratelimit.Hot(limit.Global()))
		}
		for g := range clientGoroutines {
			wg.Go(func() {
				for n := 0; ; n++ {
					id := fmt.Sprintf("%d %s %d %d", os.Getpid(), limit.Name(), g, n)
					err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
						if _, err := limiter.Consume(ctx, tx, limit.Global()); err != nil {
							return err
						}
						time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond) // time in which it may be killed
						_, err := tx.Exec(ctx, insertOrder, id, limit.Name())
						return err
					}, options...)
					if err != nil {
						fmt.Fprintln(os.Stderr, err)
						return
					}
					fmt.Println(id) // one write for each line
				}
			})
		}
	}
	wg.Wait()
	return 1
}

// TestAClientIsKilled kills clients in the middle of their transactions, again and again, while other clients run.
func TestAClientIsKilled(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	url := newDatabase(t)
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	kills, rounds := 0, 3
	if *long {
		rounds = 30
	}
	var longest time.Duration
	admin := connect(t, url, 2)
	var limiter ratelimit.Limiter
	var later int
	for range rounds {
		var wg sync.WaitGroup
		for range 2 {
			pause := time.Duration(r.IntN(500)) * time.Millisecond
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), clientOf+"="+url)
			cmd.Stderr = os.Stderr
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			kill := sync.OnceFunc(func() {
				time.AfterFunc(pause, func() {
					if err := cmd.Process.Kill(); err != nil {
						t.Error(err)
					}
				})
			})
			kills++
			wg.Go(func() {
				lines := bufio.NewScanner(stdout)
				for n := 0; lines.Scan(); n++ {
					if n == 10 {
						kill()
					}
					mu.Lock()
					acknowledged[lines.Text()] = true
					mu.Unlock()
				}
				_ = cmd.Wait() // it was killed
			})
		}
		wg.Wait()
		// Everything that the killed clients had is free at once: a call goes through.
		for _, limit := range clientLimits {
			began := time.Now()
			err := limiter.InTx(t.Context(), admin, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := limiter.Consume(ctx, tx, limit.Global()); err != nil {
					return err
				}
				later++
				_, err := tx.Exec(ctx, insertOrder, fmt.Sprintf("later %d", later), limit.Name())
				return err
			}, ratelimit.Hot(limit.Global()), ratelimit.Isolation(pgx.ReadCommitted))
			if err != nil {
				t.Fatal(err)
			}
			longest = max(longest, time.Since(began))
		}
	}
	if longest > 10*time.Second {
		t.Errorf("a call after the kill took %v", longest)
	}
	var orders, unheard int
	for _, limit := range clientLimits {
		rows, err := admin.Query(t.Context(), "SELECT id FROM orders WHERE handle = $1", limit.Name())
		if err != nil {
			t.Fatal(err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		balances, err := limiter.Balance(t.Context(), admin, limit.Global())
		if err != nil {
			t.Fatal(err)
		}
		if gone := int(balances[0].Used + 0.5); gone != len(ids) {
			t.Errorf("%s: %d tokens are gone, there are %d orders", limit.Name(), gone, len(ids))
		}
		for _, id := range ids {
			if !acknowledged[id] {
				unheard++
			}
			delete(acknowledged, id)
		}
		orders += len(ids)
	}
	unheard -= later
	for id := range acknowledged {
		t.Errorf("order %q was acknowledged, but it is missing", id)
	}
	t.Logf("%d processes killed; %d orders, for as many tokens; %d were committed after their client was killed; the first call afterwards took %v at most",
		kills, orders, unheard, longest.Round(time.Millisecond))
	if orders < 10*kills || unheard > kills*clientGoroutines*len(clientLimits) {
		t.Error("there was no load, or more was committed than can have been under way")
	}
}

// TestAClientVanishes without a message to the server, as after a power failure. Its transaction holds the row until
// idle_in_transaction_session_timeout ends it.
func TestAClientVanishes(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	p := newProxy(t, hostOf(t, url))
	const timeout = time.Second
	vanishing := connect(t, url, 1, p.dial, setting("idle_in_transaction_session_timeout", fmt.Sprint(timeout.Milliseconds())))
	pool := connect(t, url, 8)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("vanishes", 1e-9, time.Hour, ratelimit.Capacity(100))
	hot := ratelimit.Hot(limit.Global())
	consumed, vanished := make(chan time.Time), make(chan struct{})
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		_ = new(ratelimit.Limiter).InTx(ctx, vanishing, func(ctx context.Context, tx pgx.Tx) error { // another process has another Limiter
			if _, err := limiter.Consume(ctx, tx, limit.Global().Count(10)); err != nil {
				t.Error(err)
			}
			p.gate.Lock()
			consumed <- time.Now()
			<-vanished
			return context.Canceled
		}, hot)
	}()
	since := <-consumed
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			options := []ratelimit.TxOption{hot}
			if i%2 == 0 {
				options = []ratelimit.TxOption{ratelimit.Isolation(pgx.ReadCommitted)} // waits for the row itself
			}
			err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := limiter.Consume(ctx, tx, limit.Global())
				return err
			}, options...)
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	waited := time.Since(since)
	p.gate.Unlock()
	close(vanished)
	balances, err := limiter.Balance(t.Context(), pool, limit.Global())
	if err != nil || math.Round(balances[0].Remaining) != 92 || waited < timeout/2 {
		t.Errorf("%+v, want 92 left: the tokens of the vanished client come back; %v; the others waited %v", balances, err, waited)
	}
	t.Logf("8 others went on %v after the client vanished; idle_in_transaction_session_timeout is %v", waited.Round(time.Millisecond), timeout)
}
