package main

import (
	"container/heap"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// refundRule decides how many tokens of an estimate that was too high are refunded.
type refundRule struct {
	name string
	back func(l algebra.Limit, rows []algebra.Row, taken algebra.Taken, count float64, now algebra.Micros) float64
}

var refundRules = []refundRule{
	{"no refunds", func(algebra.Limit, []algebra.Row, algebra.Taken, float64, algebra.Micros) float64 { return 0 }},
	{"all of it, up to the capacity", func(_ algebra.Limit, _ []algebra.Row, _ algebra.Taken, count float64, _ algebra.Micros) float64 {
		return count
	}},
	{"this library's", algebra.Limit.Refund},
}

const (
	llmRate     = 60_000.0 // tokens per minute of the simulated team
	llmDemand   = 1.3      // the tokens that jobs really take, as a multiple of the rate
	llmEstimate = 1.5      // the tokens that a job reserves, as a multiple of the tokens that it takes
	llmMean     = 2000.0
	llmSpan     = 4 * time.Hour
)

// printRefunds prints the share of a limit that is used under saturation, by rule, by MaxReserved and by the duration of jobs. Jobs
// arrive at random, reserve their estimate, run at the instant that the limiter tells, and give back the tokens that they did not take.
func printRefunds(out io.Writer) error {
	fmt.Fprintf(out, "Share of the rate that jobs used. In brackets: the worst breach of the promise, as a share of the capacity.\n"+
		"Token bucket of %v per minute; demand %v times that. A job takes %v tokens on average (exponential) and reserves %v times the tokens that it takes. %v are simulated.\n",
		llmRate, llmDemand, llmMean, llmEstimate, llmSpan)
	for _, c := range []struct {
		capacity float64
		burst    int
	}{{60_000, 1}, {60_000, 20}, {10_000, 1}} {
		limit := algebra.Limit{Rate: llmRate, Period: time.Minute, Capacity: c.capacity}
		fmt.Fprintf(out, "\nCapacity %v; jobs arrive at random, %d at once:\n", c.capacity, c.burst)
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprint(w, "MaxReserved\tjobs take")
		for _, rule := range refundRules {
			fmt.Fprintf(w, "\t%s", rule.name)
		}
		fmt.Fprintln(w)
		for _, share := range []float64{0, 0.5, 1, 2} {
			for _, takes := range []time.Duration{8 * time.Second, 40 * time.Second} {
				fmt.Fprintf(w, "%v of the capacity\t%v", share, takes)
				for _, rule := range refundRules {
					used, broken := simulateRefunds(limit, rule, c.burst, share*limit.Capacity, takes)
					fmt.Fprintf(w, "\t%.2f (%.0f %%)", used, 100*broken)
				}
				fmt.Fprintln(w)
			}
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// llmJob is a granted job.
type llmJob struct {
	at, settled     algebra.Micros
	estimate, takes float64
	taken           algebra.Taken
}

// llmJobs is a heap of jobs, by the instant at which they are settled.
type llmJobs []llmJob

func (r llmJobs) Len() int           { return len(r) }
func (r llmJobs) Less(i, j int) bool { return r[i].settled < r[j].settled }
func (r llmJobs) Swap(i, j int)      { r[i], r[j] = r[j], r[i] }
func (r *llmJobs) Push(x any)        { *r = append(*r, x.(llmJob)) }
func (r *llmJobs) Pop() any {
	last := (*r)[len(*r)-1]
	*r = (*r)[:len(*r)-1]
	return last
}

// simulateRefunds returns the share of the rate that was used, and the worst breach of the promise, as a share of the capacity.
func simulateRefunds(limit algebra.Limit, rule refundRule, burst int, maxReserved float64, takes time.Duration) (used, broken float64) {
	r := rand.New(rand.NewPCG(1, 2)) // the same jobs in each cell
	start := algebra.At(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	end := start + algebra.Micros(llmSpan.Microseconds())
	pause := float64(burst) * llmMean / (llmDemand * limit.Rate / float64(limit.Period.Microseconds()))
	var rows []algebra.Row
	var promised algebra.Micros
	var running llmJobs
	var ran []llmJob
	arrived := 0
	for now := start; ; {
		if arrived++; arrived%burst == 0 {
			now += algebra.Micros(r.ExpFloat64() * pause)
		}
		takesTokens := llmMean * r.ExpFloat64()
		if now >= end {
			break
		}
		for len(running) > 0 && running[0].settled <= now {
			job := heap.Pop(&running).(llmJob)
			job.taken.Promised = promised
			back := rule.back(limit, rows, job.taken, job.estimate-job.takes, job.settled)
			rows = limit.Take(rows, 1, -back, job.settled)
		}
		estimate := llmEstimate * takesTokens
		if estimate > limit.Capacity || !limit.Enough(rows, estimate, -maxReserved, now) {
			continue
		}
		rows = limit.Take(rows, 1, estimate, now)
		at := limit.Repaid(rows, now)
		if at > now {
			promised = max(promised, at)
		}
		job := llmJob{at, at + algebra.Micros(takes.Microseconds()), estimate, takesTokens,
			algebra.Taken{At: now, RunAt: at, Count: estimate, Held: rows[0].Value, Part: 1}}
		heap.Push(&running, job)
		ran = append(ran, job)
		used += takesTokens
	}
	return used / (limit.Rate * llmSpan.Seconds() / limit.Period.Seconds()), brokenBy(limit, ran) / limit.Capacity
}

// brokenBy returns the most tokens by which the jobs of any span exceed the capacity and the refill of that span.
func brokenBy(limit algebra.Limit, ran []llmJob) (worst float64) {
	slices.SortStableFunc(ran, func(a, b llmJob) int { return int(a.at - b.at) })
	level, last := limit.Capacity, algebra.Min // the level of a bucket from which jobs take when they run
	for _, job := range ran {
		level = min(level+float64(job.at-last)/float64(limit.Period.Microseconds())*limit.Rate, limit.Capacity) - job.takes
		last = job.at
		worst = max(worst, -level)
	}
	return worst
}
