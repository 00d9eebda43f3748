package replay_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

const messages = `created_at,user_id
2026-07-01 12:00:00,ann
2026-07-01 12:00:01,ann
2026-07-01 12:00:02,ann
2026-07-01 12:00:03,bob
2026-07-01 12:00:04,ann
2026-07-01 12:06:04,ann
`

// Two candidates, side by side.
func Example() {
	report, err := replay.Run(
		replay.CSV(strings.NewReader(messages), replay.Fields{Time: "created_at", Key: "user_id"}),
		ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(3)),
		ratelimit.TokenBucket("sendMessage", 10, time.Hour),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(report)
	// Output:
	// 6 events of 2 keys, from 2026-07-01 12:00:00Z to 2026-07-01 12:06:04Z
	//
	//    limit                                              granted  denied  share   keys denied  longest wait  capacity to deny nobody  1 key in 1000
	// 1  sendMessage: token bucket, 10 per 1h, capacity 3   5        1       16.67%  1            5m56s         4                        4
	// 2  sendMessage: token bucket, 10 per 1h, capacity 10  6        0       0%      0            -             4                        4
	//
	// busiest (5s each)
	// from                  events  denied by 1  denied by 2
	// 2026-07-01 12:00:00Z  5       1            0
	// 2026-07-01 12:06:00Z  1       0            0
	//
	// most denied by 1
	// key  events  denied  longest wait  at
	// ann  5       1       5m56s         2026-07-01 12:00:04Z
	//
	// longest waits by 1
	// key  events  denied  longest wait  at
	// ann  5       1       5m56s         2026-07-01 12:00:04Z
}

// The numbers for a limit on messages, from the messages of the last week, as a picture.
func ExampleQuery() {
	ctx := context.Background()
	picture := func(pool *pgxpool.Pool, w io.Writer) error {
		events := replay.Query(ctx, pool, `
			SELECT created_at, user_id FROM messages
			WHERE created_at > now() - interval '7 days' ORDER BY created_at`)
		report, err := replay.Run(events, ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(3)))
		if err != nil {
			return err
		}
		_, err = io.WriteString(w, report.SVG())
		return err
	}
	_ = picture
}

// The log of a web server has the time at which a request began, and is written when it has ended.
func ExampleReorder() {
	log, err := os.Open("/var/log/nginx/access.log")
	if err != nil {
		return
	}
	defer log.Close()
	events := replay.Reorder(replay.Combined(log, replay.Fields{Key: "host"}), time.Minute)
	report, err := replay.Run(events, ratelimit.TokenBucket("perAddress", 100, time.Minute))
	if err != nil {
		return
	}
	fmt.Print(report)
}

// A sequence of events can be changed on its way. Here, lines with mistakes are left out.
func ExampleRun() {
	log := `192.0.2.1 - - [01/Jul/2026:12:00:00 +0000] "POST /login HTTP/1.1" 401 12` + "\n" +
		`192.0.2.1 - - [01/Jul/2026:12:00:01 +00` + "\n" +
		`192.0.2.1 - - [01/Jul/2026:12:00:02 +0000] "POST /login HTTP/1.1" 401 12` + "\n"

	skipped := 0
	valid := func(events iter.Seq2[replay.Event, error]) iter.Seq2[replay.Event, error] {
		return func(yield func(replay.Event, error) bool) {
			for event, err := range events {
				if _, ok := errors.AsType[*replay.MistakeError](err); ok {
					skipped++
				} else if !yield(event, err) {
					return
				}
			}
		}
	}
	events := replay.Combined(strings.NewReader(log), replay.Fields{Key: "host"})
	report, err := replay.Run(valid(events), ratelimit.TokenBucket("logins", 1, time.Minute))
	if err != nil {
		fmt.Println(err)
		return
	}
	capacity, _ := report.Candidates[0].Suggest(0)
	fmt.Printf("%d lines skipped, %d denied, a capacity of %v would deny nobody\n", skipped, report.Candidates[0].Denied, capacity)
	// Output:
	// 1 lines skipped, 1 denied, a capacity of 2 would deny nobody
}
