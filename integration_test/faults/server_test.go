package faults_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/postgres"
)

// TestTheServerIsKilled has all processes of the server end by SIGKILL, again and again, and starts it again.
func TestTheServerIsKilled(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	s := newServer(t, postgres.BreakableConfig{})
	l := newLoad(t, s.URL(), loadConfig{})
	rounds := 3
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
