package faults_test

import (
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// TestOpenOnAStandby switches off what a standby refuses, one part after another. The errors say which. Then balances are read there.
func TestOpenOnAStandby(t *testing.T) {
	t.Parallel()
	standby := newServer(t, postgres.BreakableConfig{Standby: true})
	pool := connect(t, standby.URL(), 4)
	limit := ratelimit.TokenBucket("l", 10, time.Hour)
	o := ratelimit.Options{Program: "shop", Limits: []ratelimit.Limit{limit}, Usage: &usage.Recorder{DB: pool}}
	for _, part := range []struct {
		text, off string
		set       func()
	}{
		{"ratelimit: sweep: ", "set Options.NoSweep here", func() { o.NoSweep = true }},
		{"ratelimit: usage: flush: ", "leave Options.Usage nil here", func() { o.Usage = nil }},
		{"ratelimit: publish: ", "set Options.NoPublish here", func() { o.NoPublish = true }},
	} {
		_, err := ratelimit.Open(t.Context(), pool, o)
		if err == nil || !strings.Contains(err.Error(), part.text) || !strings.Contains(err.Error(), "(SQLSTATE 25006)") || !strings.Contains(err.Error(), part.off) {
			t.Errorf("%v\nwant %q and %q", err, part.text, part.off)
		}
		part.set()
	}
	limits, err := ratelimit.Open(t.Context(), pool, o)
	if err != nil {
		t.Fatal(err)
	}
	balances, err := limits.Balance(t.Context(), pool, limit.Key("ann"))
	if err != nil || balances[0].Remaining != 10 {
		t.Errorf("%v, %v", balances, err)
	}
	if err := limits.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
