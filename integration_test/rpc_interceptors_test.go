package integration_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/txlimit/txlimit/ratelimit"
)

// denial reads the details of a denial, as any client does: the delay, or -1, and the violations.
func (o *office) denial(s *status.Status) (delay time.Duration, violations string) {
	o.Helper()
	if s.Code() != codes.ResourceExhausted {
		o.Fatalf("%v", s)
	}
	delay = -1
	var list []string
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.RetryInfo:
			delay = d.RetryDelay.AsDuration()
		case *errdetails.QuotaFailure:
			for _, v := range d.Violations {
				if v.Subject != "" {
					o.Errorf("the subject is %q", v.Subject)
				}
				list = append(list, fmt.Sprint(v.QuotaId, " ", v.QuotaValue))
			}
		default:
			o.Errorf("a detail is %v", d)
		}
	}
	return delay, strings.Join(list, ", ")
}

func TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied(t *testing.T) {
	perUser := ratelimit.TokenBucket("perUser", 3, time.Minute)
	perTeam := ratelimit.TokenBucket("per „Team“", 10.5, time.Hour)
	perSite := ratelimit.FixedWindow("perSite", 1000, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		client := serve()
		for range 3 {
			if got, s := client.say(t.Context(), "hello"); s.Code() != codes.OK || got != "hello" {
				o.Fatalf("%q, %v", got, s)
			}
		}
		_, s := client.say(t.Context(), "hello")
		if delay, violations := o.denial(s); delay != 20*time.Second || violations != "perUser 3" {
			o.Errorf("%v, %s", delay, violations)
		}
		if _, err := o.limit.Limiter.Consume(t.Context(), o.pool, perTeam.Key("secret team").Count(5)); err != nil {
			o.Fatal(err)
		}
		_, s = client.say(t.Context(), "hello")
		if delay, violations := o.denial(s); delay != 171428572*time.Microsecond || violations != "perUser 3, per „Team“ 10" {
			o.Errorf("%v, %s", delay, violations)
		}
		if strings.Contains(s.String(), "secret") || !strings.Contains(s.Message(), "perUser") {
			o.Errorf("%v", s)
		}
		o.clock.Advance(171428572 * time.Microsecond)
		if _, s := client.say(t.Context(), "hello"); s.Code() != codes.OK || o.called.Load() != 4 {
			o.Errorf("when it was told to retry: %v, called %d times", s, o.called.Load())
		}
		if d := o.observed(); len(d) != 6 || d[0].Code != codes.OK || !d[0].Passed || d[4].Code != codes.ResourceExhausted || d[4].Passed || !denied(d[4].Err) {
			o.Errorf("observed %+v", d)
		}
	}, perUser.Key("secret user"), perTeam.Key("secret team"), perTeam.Key("secret team").Count(0.5), perSite.Global())
}
