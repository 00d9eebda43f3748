package plproxy_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestSmoke(t *testing.T) {
	limiter := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("smoke", 10, time.Minute)
	db := pool(t, shared.proxy, 4)
	for i := range 12 {
		r, err := limiter.Consume(t.Context(), db, limit.Key("a"))
		fmt.Println(i, r.OK, r.Remaining, err)
	}
	c := &ratelimit.Coalescer{Pool: db}
	defer c.Close()
	done := make(chan error)
	for i := range 50 {
		go func() { _, err := limiter.Consume(t.Context(), c, limit.Key(fmt.Sprint("k", i%10))); done <- err }()
	}
	for range 50 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
