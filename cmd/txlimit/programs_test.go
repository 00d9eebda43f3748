package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// A program does what the tool decides, and the tool shows what the program counted.
func TestAProgramFollows(t *testing.T) {
	limit := ratelimit.TokenBucket("sendMessage", 1, 100000*time.Hour, ratelimit.Capacity(2))
	w := newPublished(t, limit)
	pool, err := pgxpool.New(t.Context(), w.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{
		NoPublish: true, NoSweep: true, Usage: &usage.Recorder{DB: pool, Every: 50 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = limits.Close(context.WithoutCancel(t.Context())) })

	consume := func() error {
		_, err := limits.Consume(t.Context(), pool, limit.Key("user-17"))
		return err
	}
	// until waits until the program's calls end like this. A call that is granted takes a token.
	until := func(what string, ok func(err error) bool) error {
		t.Helper()
		for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
			err := consume()
			if ok(err) {
				return err
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	denied := func(err error) bool { return errors.Is(err, ratelimit.ErrDenied) }
	granted := func(err error) bool { return err == nil }

	_ = until("used up", denied)
	w.run("keys", "sendMessage").wants(t, exitOK, "user-17 +0 ")
	w.run("show", "sendMessage", "user-17").wants(t, exitOK, "balance +0 of 2", "denied +yes, until .*: less than one token is left")

	w.run("reset", "sendMessage", "user-17", "--yes").wants(t, exitOK)
	if err := consume(); err != nil {
		t.Errorf("after reset: %v", err)
	}

	w.run("block", "sendMessage", "user-17", "--for", "1h", "--reason", "spam").wants(t, exitOK)
	err = until("blocked", func(err error) bool {
		d, ok := errors.AsType[*ratelimit.DeniedError](err)
		return ok && time.Until(d.RetryAt) < time.Hour && time.Until(d.RetryAt) > 30*time.Minute
	})
	k := parse[keyDetails](t, w.run("show", "sendMessage", "user-17", "--json"))
	if d, _ := errors.AsType[*ratelimit.DeniedError](err); k.Reason != ratelimit.ReasonBlock || !k.RetryAt.Equal(d.RetryAt) {
		t.Errorf("show says %q until %v, and the program denies until %v", k.Reason, k.RetryAt, d.RetryAt)
	}
	w.run("unblock", "sendMessage", "user-17").wants(t, exitOK)

	w.run("unlimited", "sendMessage", "user-17", "--forever").wants(t, exitOK)
	_ = until("unlimited", granted)
	for range 5 {
		if err := consume(); err != nil {
			t.Errorf("unlimited: %v", err)
		}
	}
	w.run("restore", "sendMessage", "user-17").wants(t, exitOK)
	_ = until("restored", denied)

	// The addition survives, although the program cut balances to the old capacity a moment ago.
	w.run("override", "sendMessage", "user-17", "--capacity", "12", "--add", "--forever").wants(t, exitOK, "added 10 tokens")
	for range 10 {
		if err := consume(); err != nil {
			t.Errorf("of the 10 that were added: %v", err)
		}
	}
	if err := consume(); !denied(err) {
		t.Errorf("an eleventh: %v", err)
	}

	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		l := parse[limitsRead](t, w.run("limits", "--json")).Limits[0].LastHour
		d := parse[deniedKeyList](t, w.run("keys", "sendMessage", "--denied", "--json")).Keys
		s := parse[keyDetails](t, w.run("show", "sendMessage", "user-17", "--json"))
		if l != nil && l.Granted >= 18 && len(d) == 1 && d[0].Key == "user-17" && d[0].Denied >= 3 && l.Denied == d[0].Denied && len(s.Denials) > 0 && s.Denials[0].Denied > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("counted: %+v, %+v, %+v", l, d, s.Denials)
		}
	}
}
