package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// The page that has the tables has them between these lines.
const (
	growthBegin = "<!-- go run ./bench growth: begin -->\n"
	growthEnd   = "<!-- go run ./bench growth: end -->\n"
)

// writeGrowth writes the tables in Markdown. A microsecond per decision is a second per million decisions.
func writeGrowth(w io.Writer, g growth, about string, ways []*growthWay, sizes []size, inRedis float64) {
	fmt.Fprintf(w, "Written by `go run ./bench growth` (%s). %s\n\n", time.Now().UTC().Format("2006-01-02 15:04 MST"), about)
	fmt.Fprintf(w, "| way | goroutines | per second | server | client | sum | per server second | WAL bytes |\n|---|--:|--:|--:|--:|--:|--:|--:|\n")
	byName := map[string]*growthWay{}
	for _, way := range ways {
		byName[way.name] = way
		server, client := way.perMillion()
		wal := "none"
		if !way.redis {
			wal = thousands(way.spent.wal / float64(way.total.latencies.n))
		}
		name := way.name
		if way.pace > 0 {
			name += fmt.Sprintf(", at %s/s", thousands(float64(way.pace)))
		}
		if stolen := way.total.cpu.share(); stolen >= 0.02 {
			name += fmt.Sprintf(" (the host took %.0f %%)", 100*stolen)
		}
		fmt.Fprintf(w, "| %s | %d | %s | %s | %s | %s | %s | %s |\n", name, way.side.goroutines, thousands(way.total.perSecond()),
			digits(server), digits(client), digits(server+client), perServerSecond(server), wal)
		if without := byName[txWithout]; way.name == txWith && without != nil {
			s, c := without.perMillion()
			fmt.Fprintf(w, "| of which the limit | | | %s | %s | %s | %s | %s |\n", digits(server-s), digits(client-c), digits(server+client-s-c), perServerSecond(server-s),
				thousands(way.spent.wal/float64(way.total.latencies.n)-without.spent.wal/float64(without.total.latencies.n)))
		}
	}
	fmt.Fprintf(w, "\nPer second: decisions, or commits of a transaction with one decision. Server, client, sum: processor seconds per million of them. "+
		"Per server second: how many one second of the server's processor time makes. \"Many keys\" are %s keys with a row, at random.\n\n", thousands(float64(g.keys)))

	fmt.Fprintf(w, "| of %s keys |", thousands(float64(g.rows)))
	row := func(name string, value func(s size) string) {
		fmt.Fprintf(w, "| %s |", name)
		for _, s := range sizes {
			fmt.Fprintf(w, " %s |", value(s))
		}
		fmt.Fprintln(w)
	}
	for _, s := range sizes {
		fmt.Fprintf(w, " %s |", s.shape.name)
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("--:|", len(sizes)))
	row("table, bytes per key", func(s size) string { return thousands(s.table) })
	row("index, bytes per key", func(s size) string { return thousands(s.index) })
	row("soon after a checkpoint: WAL bytes of a call", func(s size) string { return thousands(s.used) })
	row("the same, first call of a key", func(s size) string { return thousands(s.first) })
	row("sweep of a million idle keys, seconds", func(s size) string { return digits(s.swept.Seconds()) })
	row("of the server's processor", func(s size) string { return digits(s.sweptServer.Seconds()) })
	row("WAL MB", func(s size) string { return thousands(s.sweptWAL / 1e6) })
	row("VACUUM after it, processor seconds per million", func(s size) string { return digits(s.vacuum.Seconds()) })
	row("WAL MB", func(s size) string { return thousands(s.vacuumWAL / 1e6) })
	fmt.Fprintf(w, "\nRedis keeps %s bytes of memory per key (an IPv4 address, with the usual script).\n", thousands(inRedis))
	writeExamples(w, ways, sizes, inRedis)
}

// writeExamples works out the examples of the page from what was measured.
func writeExamples(w io.Writer, ways []*growthWay, sizes []size, inRedis float64) {
	find := func(name string, pace int) *growthWay {
		for _, way := range ways {
			if way.name == name && way.pace == pace {
				return way
			}
		}
		return nil
	}
	fmt.Fprintf(w, "\n| example | server's processors | clients' processors | disk or memory | WAL |\n|---|--:|--:|--:|--:|\n")
	line := func(name string, server, client float64, space, wal string) {
		fmt.Fprintf(w, "| %s | %.3f | %.3f | %s | %s |\n", name, server, client, space, wal)
	}
	uuids, addresses := sizes[1], sizes[0]
	const tenants, gateway = 2000, 60_000 // per second
	mb := func(bytes float64) string { return fmt.Sprintf("%.3g MB", bytes/1e6) }
	perSecond := func(way *growthWay, rate float64) string {
		return mb(rate*way.spent.wal/float64(way.total.latencies.n)) + "/s"
	}
	for _, x := range []struct {
		name, way  string
		rate, keys int
	}{
		{"50,000 tenants, 2,000/s: pool", "pool, many keys", tenants, 50_000},
		{"tenants by a `Coalescer`", "`Coalescer`, many keys", tenants, 50_000},
		{"tenants on Redis, go-redis", "Redis, go-redis, many keys", tenants, 50_000},
		{"gateway, 100,000 clients, 60,000/s: `Coalescer`", "`Coalescer`, many keys", gateway, 100_000},
		{"gateway on Redis, go-redis", "Redis, go-redis, many keys", gateway, 100_000},
		{"gateway on Redis, rueidis", "Redis, rueidis, many keys", gateway, 100_000},
	} {
		way := find(x.way, x.rate)
		if way == nil {
			continue
		}
		server, client := way.perMillion()
		space, wal := mb(float64(x.keys)*inRedis), "none"
		if !way.redis {
			space, wal = mb(float64(x.keys)*(uuids.table+uuids.index)), perSecond(way, float64(x.rate))
		}
		line(x.name, server*float64(x.rate)/1e6, client*float64(x.rate)/1e6, space, wal)
	}
	with, without := find(txWith, 0), find(txWithout, 0)
	if with != nil && without != nil {
		s, c := with.perMillion()
		s0, c0 := without.perMillion()
		wal := with.spent.wal/float64(with.total.latencies.n) - without.spent.wal/float64(without.total.latencies.n)
		line("tenants, what the limit adds to their transactions", (s-s0)*tenants/1e6, (c-c0)*tenants/1e6,
			mb(50_000*(uuids.table+uuids.index)), mb(tenants*wal)+"/s")
	}
	if first := find("pool, new keys", 0); first != nil {
		const perDay, day = 10e6, 86_400
		server, client := first.perMillion()
		// Each key is used once, swept once, and its space is cleaned up once.
		server += addresses.sweptServer.Seconds() + addresses.vacuum.Seconds()
		line("10 million addresses a day, each once, swept after a day", server*perDay/1e6/day, client*perDay/1e6/day, mb(perDay*(addresses.table+addresses.index)),
			fmt.Sprintf("up to %.3g GB a day", (perDay*addresses.first+perDay/1e6*(addresses.sweptWAL+addresses.vacuumWAL))/1e9))
	}
}

// digits formats a number with three digits or more.
func digits(v float64) string {
	if v >= 999.5 {
		return thousands(v)
	}
	return fmt.Sprintf("%.3g", v)
}

// perServerSecond is how many calls a second of the server's processor time makes, if a million of them take cost seconds.
func perServerSecond(cost float64) string {
	if cost <= 0 { // /proc counts in ticks of 10 ms
		return "too many to measure"
	}
	return thousands(1e6 / cost)
}

// perMillion returns the seconds of processors per million calls. Calls that ended after the deadline count: they cost, too.
func (w *growthWay) perMillion() (server, client float64) {
	n := float64(w.total.latencies.n)
	return w.spent.server.Seconds() * 1e6 / n, w.spent.client.Seconds() * 1e6 / n
}

// writeBetween puts text between the lines of growthBegin and growthEnd of a page.
func writeBetween(page, text string) (string, error) {
	before, rest, found := strings.Cut(page, growthBegin)
	_, after, ended := strings.Cut(rest, growthEnd)
	if !found || !ended {
		return "", errors.New("the page does not have the two comments between which the tables go")
	}
	return before + growthBegin + text + growthEnd + after, nil
}

// growthPage writes the tables into a page.
func growthPage(name, text string) error {
	page, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	changed, err := writeBetween(string(page), text)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return os.WriteFile(name, []byte(changed), 0o644)
}
