package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

// tokenBucket is the usual script: read, refill, decide, write, expire. Most token buckets on Redis are variants of it. The client
// passes the time, which is cheaper than asking the server.
const tokenBucket = `
local rate, capacity, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'ts')
local ts = tonumber(bucket[2]) or now
local tokens = math.min(capacity, (tonumber(bucket[1]) or capacity) + math.max(0, now - ts) * rate)
local allowed = tokens >= 1
if allowed then
  tokens = tokens - 1
  redis.call('HSET', KEYS[1], 'tokens', tokens, 'ts', math.max(ts, now))
  redis.call('PEXPIRE', KEYS[1], math.ceil(capacity / rate * 2000))
end
return { allowed and 1 or 0, math.floor(tokens) }
`

// now is the time in seconds, to the microsecond, as the script expects it.
func now() string { return strconv.FormatFloat(float64(time.Now().UnixMicro())/1e6, 'f', 6, 64) }

func openGoRedis(ctx context.Context, e *env, o setting) (*opened, error) {
	client, err := e.newGoRedis(ctx, o.goroutines)
	if err != nil {
		return nil, err
	}
	script := redis.NewScript(tokenBucket)
	prefix, rate, burst := e.redisPrefix(), strconv.Itoa(o.perSecond), strconv.Itoa(o.burst)
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Run(ctx, client, []string{prefix + key}, rate, burst, now()).Int64Slice()
		return err == nil && answer[0] == 1, err
	}}, nil
}

func openRedisRate(ctx context.Context, e *env, o setting) (*opened, error) {
	client, err := e.newGoRedis(ctx, o.goroutines)
	if err != nil {
		return nil, err
	}
	limiter := redis_rate.NewLimiter(client)
	prefix := e.redisPrefix()
	limit := redis_rate.Limit{Rate: o.perSecond, Burst: o.burst, Period: time.Second}
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		result, err := limiter.Allow(ctx, prefix+key, limit)
		return err == nil && result.Allowed == 1, err
	}}, nil
}

func openRueidis(ctx context.Context, e *env, o setting) (*opened, error) {
	server, err := e.startRedis(ctx)
	if err != nil {
		return nil, err
	}
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.addr}, DisableCache: true})
	if err != nil {
		return nil, err
	}
	e.undos = append(e.undos, func() error { client.Close(); return nil })
	script := rueidis.NewLuaScript(tokenBucket)
	prefix, rate, burst := e.redisPrefix(), strconv.Itoa(o.perSecond), strconv.Itoa(o.burst)
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		answer, err := script.Exec(ctx, client, []string{prefix + key}, []string{rate, burst, now()}).AsIntSlice()
		return err == nil && answer[0] == 1, err
	}}, nil
}

// newGoRedis opens go-redis with the pool size that is fastest for this number of goroutines. It tries the default, one connection
// for each goroutine, and sizes in between.
func (e *env) newGoRedis(ctx context.Context, goroutines int) (*redis.Client, error) {
	server, err := e.startRedis(ctx)
	if err != nil {
		return nil, err
	}
	size, found := server.poolSizes[goroutines]
	if !found {
		var best float64
		script := redis.NewScript(tokenBucket)
		for _, try := range []int{0, 2 * 20, 64, goroutines} { // 0: ten for each core
			if try > goroutines {
				continue
			}
			client := redis.NewClient(&redis.Options{Addr: server.addr, PoolSize: try})
			s := &side{name: "go-redis", goroutines: goroutines, call: func(ctx context.Context, worker int) error {
				return script.Run(ctx, client, []string{"try:" + strconv.Itoa(worker)}, "1000000000", "1000000000", now()).Err()
			}}
			var t *tally
			if _, err = s.run(ctx, e.moment(slice/4)); err == nil {
				t, err = s.run(ctx, e.moment(slice/2))
			}
			if err := client.Close(); err != nil {
				return nil, err
			}
			if err != nil {
				return nil, err
			}
			if t.perSecond() > best {
				best, size = t.perSecond(), client.Options().PoolSize
			}
		}
		if server.poolSizes == nil {
			server.poolSizes = map[int]int{}
		}
		server.poolSizes[goroutines] = size
		fmt.Fprintf(e.out, "  go-redis is fastest for %d goroutines with %d connections\n", goroutines, size)
	}
	client := redis.NewClient(&redis.Options{Addr: server.addr, PoolSize: size})
	e.undos = append(e.undos, client.Close)
	return client, nil
}

// redisPrefix returns a prefix that keeps the keys of one contender apart from the other keys.
func (e *env) redisPrefix() string {
	e.redis.prefixes++
	return strconv.Itoa(e.redis.prefixes) + ":"
}
