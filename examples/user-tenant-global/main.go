// User-tenant-global asks three limits in one call: the user's, the tenant's, and that of the whole site. All grant, or
// none: a request that the tenant's limit denies costs its user nothing.
//
//	go run ./examples/user-tenant-global
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits    *ratelimit.Limiter // of Open
	perUser   = ratelimit.TokenBucket("perUser", 3, time.Hour)
	perTenant = ratelimit.TokenBucket("perTenant", 5, time.Hour)
	perSite   = ratelimit.TokenBucket("perSite", 7, time.Hour)
)

// requests returns what a user's call asks for. A user's key contains the tenant: ann of acme is not ann of globex.
func requests(tenant, user string) []ratelimit.Request {
	return []ratelimit.Request{perUser.Key(tenant, user), perTenant.Key(tenant), perSite.Global()}
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "user-tenant-global", Limits: []ratelimit.Limit{perUser, perTenant, perSite}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "tenant\tuser\tanswer\tleft: user\ttenant\tsite")
	for _, call := range []struct {
		tenant, user string
		deniedBy     string
		left         [3]float64 // of the user, the tenant and the site
	}{
		{"acme", "ann", "", [3]float64{2, 4, 6}},
		{"acme", "ann", "", [3]float64{1, 3, 5}},
		{"acme", "ann", "", [3]float64{0, 2, 4}},
		{"acme", "ann", "perUser", [3]float64{0, 2, 4}}, // the tenant and the site lose nothing
		{"acme", "bob", "", [3]float64{2, 1, 3}},
		{"acme", "bob", "", [3]float64{1, 0, 2}},
		{"acme", "bob", "perTenant", [3]float64{1, 0, 2}},
		{"acme", "ann", "perUser, perTenant", [3]float64{0, 0, 2}},
		{"globex", "ann", "", [3]float64{2, 4, 1}},
		{"globex", "ann", "", [3]float64{1, 3, 0}},
		{"globex", "ann", "perSite", [3]float64{1, 3, 0}},
	} {
		result, err := limits.Consume(ctx, pool, requests(call.tenant, call.user)...)
		var deniedBy []string
		if denial, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			for _, status := range denial.Requests {
				if !status.OK {
					deniedBy = append(deniedBy, status.Limit.Name())
				}
			}
		} else if err != nil {
			return err
		}

		answer := "granted"
		if len(deniedBy) > 0 {
			answer = "denied by " + strings.Join(deniedBy, ", ")
		}
		var left [3]float64
		for i, status := range result.Requests { // in the order of the call, granted or denied
			left[i] = math.Floor(status.Remaining)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%v\t%v\t%v\n", call.tenant, call.user, answer, left[0], left[1], left[2])
		if strings.Join(deniedBy, ", ") != call.deniedBy || left != call.left {
			return errors.Join(fmt.Errorf("want %q to deny, and %v left", call.deniedBy, call.left), table.Flush())
		}
	}
	return table.Flush()
}
