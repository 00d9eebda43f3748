package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/txlimit/txlimit/ratelimit"
)

// keyShape is a kind of key, by an expression of SQL over i.
type keyShape struct{ name, sql string }

var keyShapes = []keyShape{
	{"IPv4 addresses", `host('0.0.0.0'::inet + (i * 2654435761) % 4294967296)`},
	{"UUIDs", `md5(i::text)::uuid::text`},
}

// size is what the keys of a shape take.
type size struct {
	shape              keyShape
	table, index       float64 // bytes per key
	used, first        float64 // bytes of the write-ahead log soon after a checkpoint: a call of a key with a row, and the first call of a key
	swept, sweptServer time.Duration
	sweptWAL           float64
	vacuum             time.Duration // of the server's processors
	vacuumWAL          float64
}

// measureSize makes rows in a random order, as calls make them, measures their size and calls after a checkpoint, and then sweeps all
// of them.
func (e *env) measureSize(ctx context.Context, g growth, shape keyShape) (s size, err error) {
	s.shape = shape
	pool, err := e.newPool(ctx, 4, nil)
	if err != nil {
		return s, err
	}
	defer func() {
		if undone := e.undo(ctx); err == nil {
			err = undone
		}
	}()
	limit := plenty(0).limit(1)
	_, err = pool.Exec(ctx, `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
		SELECT $1, `+shape.sql+`, 0, 1, 1e9 - 1, now() - interval '3 hours' FROM generate_series(1::bigint, $2) AS i ORDER BY random()`, limit.Name(), g.rows)
	if err != nil {
		return s, err
	}
	if _, err := pool.Exec(ctx, "VACUUM ANALYZE ratelimit.limits"); err != nil {
		return s, err
	}
	if err := pool.QueryRow(ctx, "SELECT pg_relation_size('ratelimit.limits')::float8 / count(*), pg_indexes_size('ratelimit.limits')::float8 / count(*) FROM ratelimit.limits").Scan(&s.table, &s.index); err != nil {
		return s, err
	}
	servers, err := findServers(ctx, e, pool)
	if err != nil {
		return s, err
	}

	// Swept are the rows that were not called, below; so these are few.
	key := func(i int) (key string, err error) {
		err = pool.QueryRow(ctx, `SELECT `+shape.sql+` FROM (VALUES ($1::bigint)) AS v (i)`, i).Scan(&key)
		return key, err
	}
	for _, calls := range []struct {
		pick func() int
		into *float64
	}{
		{func() int { return 1 + rand.IntN(g.rows) }, &s.used},
		{func() int { return g.rows + 1 + rand.IntN(g.rows) }, &s.first},
	} {
		keys := make([]string, g.calls)
		for i := range keys {
			if keys[i], err = key(calls.pick()); err != nil {
				return s, err
			}
		}
		if *calls.into, err = e.afterCheckpoint(ctx, pool, limit, keys); err != nil {
			return s, err
		}
	}

	before, err := servers.read(ctx, pool, false)
	if err != nil {
		return s, err
	}
	begin := time.Now()
	deleted, err := limits.Sweep(ctx, pool, limit)
	if err != nil {
		return s, err
	}
	s.swept = time.Since(begin)
	swept, err := servers.read(ctx, pool, false)
	if err != nil {
		return s, err
	}
	if deleted < int64(g.rows-g.calls) {
		return s, fmt.Errorf("%d rows were swept of %d, of which %d were called", deleted, g.rows, g.calls)
	}
	if _, err := pool.Exec(ctx, "VACUUM ratelimit.limits"); err != nil {
		return s, err
	}
	vacuumed, err := servers.read(ctx, pool, false)
	if err != nil {
		return s, err
	}
	perMillion := 1e6 / float64(deleted)
	scale := func(d time.Duration) time.Duration { return time.Duration(float64(d) * perMillion) }
	s.swept, s.sweptServer, s.sweptWAL = scale(s.swept), scale(swept.server-before.server), (swept.wal-before.wal)*perMillion
	s.vacuum, s.vacuumWAL = scale(vacuumed.server-swept.server), (vacuumed.wal-swept.wal)*perMillion
	fmt.Fprintf(e.out, "  %s: table %.1f, index %.1f bytes per key; %s rows swept\n", shape.name, s.table, s.index, thousands(float64(deleted)))
	return s, nil
}

// afterCheckpoint makes a call of each key right after a checkpoint, when most calls are the first to change their page. It returns the
// bytes of the write-ahead log per call.
func (e *env) afterCheckpoint(ctx context.Context, pool *pgxpool.Pool, limit ratelimit.Limit, keys []string) (float64, error) {
	if err := e.checkpoint(ctx); err != nil {
		return 0, err
	}
	before, err := readWAL(ctx, pool)
	if err != nil {
		return 0, err
	}
	for _, key := range keys {
		if _, err := limits.Consume(ctx, pool, limit.Key(key)); err != nil {
			return 0, err
		}
	}
	now, err := readWAL(ctx, pool)
	return (now - before) / float64(len(keys)), err
}

// redisBytesPerKey measures the memory of a key with the usual script.
func (e *env) redisBytesPerKey(ctx context.Context, g growth) (float64, error) {
	server, err := e.startRedis(ctx)
	if err != nil {
		return 0, err
	}
	client := redis.NewClient(&redis.Options{Addr: server.addr})
	defer func() { _ = client.Close() }()
	used := func() (float64, error) {
		info, err := client.InfoMap(ctx, "memory").Result()
		if err != nil {
			return 0, err
		}
		return strconv.ParseFloat(info["Memory"]["used_memory"], 64)
	}
	if err := client.FlushAll(ctx).Err(); err != nil {
		return 0, err
	}
	before, err := used()
	if err != nil {
		return 0, err
	}
	it, err := openRueidis(ctx, e, plenty(256))
	if err != nil {
		return 0, err
	}
	take := it.take
	it.take = func(ctx context.Context, key string) (bool, error) {
		i, err := strconv.Atoi(key)
		if err != nil {
			return false, err
		}
		return take(ctx, addressKey(uint32(i)))
	}
	if err := takeEach(ctx, it, g.keys); err != nil {
		return 0, err
	}
	now, err := used()
	return (now - before) / float64(g.keys), err
}
