package faults_test

import (
	"fmt"
	"maps"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
)

// TestTheServerIsKilled ends all processes of the server with SIGKILL, again and again, and restarts it.
func TestTheServerIsKilled(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	s := newServer(t, postgres.BreakableConfig{})
	l := newLoad(t, s.URL(), loadConfig{})
	rounds := 2
	if *long {
		rounds = 20
	}
	for range rounds {
		l.flows(5)
		time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
		s.Kill()
		time.Sleep(time.Duration(r.IntN(100)) * time.Millisecond)
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	l.flows(5)
	sum := l.settle()
	t.Logf("the server was killed %d times", rounds)
	if sum.unknown == 0 || sum.nothing == 0 {
		t.Error("no call was under way when the server was killed")
	}
}

// TestFailover cuts the replication to a standby, kills the primary, and promotes the standby under load. With asynchronous
// replication, calls that the standby has not received are lost: exactly as many may be granted again. With synchronous
// replication, no acknowledged call is lost.
func TestFailover(t *testing.T) {
	for _, mode := range []string{"asynchronous", "synchronous"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			failover(t, mode == "synchronous")
		})
	}
}

func failover(t *testing.T, synchronous bool) {
	primary := newServer(t, postgres.BreakableConfig{})
	link := newProxy(t, hostOf(t, primary.URL()))
	standby := newServer(t, postgres.BreakableConfig{
		Standby:  true, // a copy of the primary's files from before its start: a base backup
		Settings: []string{fmt.Sprintf("primary_conninfo=host=127.0.0.1 port=%d user=postgres", link.listener.Addr().(*net.TCPAddr).Port)},
	})
	admin := connect(t, primary.URL(), 1)
	if synchronous {
		for _, sql := range []string{"ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"} {
			if _, err := admin.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
	}
	follow := func() {
		t.Helper()
		var lsn string
		if err := admin.QueryRow(t.Context(), "SELECT pg_current_wal_flush_lsn()::text").Scan(&lsn); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the standby has what is on the primary's disk", func() (has bool) {
			err := admin.QueryRow(t.Context(), "SELECT coalesce((SELECT bool_or(flush_lsn >= $1::text::pg_lsn) FROM pg_stat_replication), false)", lsn).Scan(&has)
			if err != nil {
				t.Fatal(err)
			}
			return has
		})
	}
	follow()

	// The clients connect to the primary and, after the failover, to the standby.
	front := newProxy(t, hostOf(t, primary.URL()))
	l := newLoad(t, standby.URL(), loadConfig{configure: []func(*pgx.ConnConfig){front.dial}})
	l.flows(5)
	safe := l.acknowledged() // they are flushed, too
	follow()
	link.gate.Lock()
	if !synchronous {
		l.flows(5)
	}
	time.Sleep(lasting(300*time.Millisecond, 3*time.Second))
	primary.Kill()

	replica := connect(t, standby.URL(), 2)
	if _, err := replica.Exec(t.Context(), "SELECT pg_promote()"); err != nil {
		t.Fatal(err)
	}
	link.gate.Unlock() // messages on their way arrive too late
	// Some calls committed before the cut, but were not replicated yet.
	lost := l.forgive(replica, safe)
	atRisk := len(l.acknowledged()) + lost - len(safe)
	front.lead(hostOf(t, standby.URL()))
	l.flows(5)
	l.settle()
	t.Logf("%d calls were acknowledged after the standby last had everything; %d of them are lost, and as many were granted again", atRisk, lost)
	switch {
	case synchronous && lost > 0:
		t.Error("synchronous replication has lost something")
	case !synchronous && (lost == 0 || lost > atRisk):
		t.Error("want some lost, and no more than were acknowledged after the standby last had everything")
	}
}

// acknowledged returns the calls granted so far.
func (l *load) acknowledged() map[string]bool {
	all := map[string]bool{}
	for _, h := range l.handles {
		h.mu.Lock()
		maps.Copy(all, h.granted)
		h.mu.Unlock()
	}
	return all
}

// forgive removes the grants that the standby has not received, so that the rest can be counted as usual. It returns their
// number. No safe grant may be among them. No call may be granted meanwhile.
func (l *load) forgive(replica *pgxpool.Pool, safe map[string]bool) (lost int) {
	l.Helper()
	for _, h := range l.handles {
		gone := h.gone(l.Context(), l, replica)
		h.mu.Lock()
		missing := maps.Clone(h.granted)
		if h.ordering {
			for _, id := range h.orders(l.Context(), l, replica) {
				delete(missing, id)
			}
		} else {
			for id := range h.granted { // it does not show which of them are gone
				if n := len(h.granted) - gone; len(missing) > max(n, 0) {
					delete(missing, id)
				}
			}
		}
		for id := range missing {
			if h.ordering && safe[id] {
				l.Errorf("order %s was acknowledged, the standby had received it, but it is lost", id)
			}
			delete(h.granted, id)
		}
		h.mu.Unlock()
		lost += len(missing)
	}
	return lost
}
