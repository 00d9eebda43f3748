package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// redisServer is a redis-server without persistence, on a free port of the loopback interface. Postgres is reached by the same
// transport.
type redisServer struct {
	addr     string
	version  string
	cmd      *exec.Cmd
	lifeline io.Closer

	prefixes  int         // the number of prefixes given out
	poolSizes map[int]int // the fastest pool size of go-redis, by number of goroutines
}

// errNoRedis says how to install redis-server.
var errNoRedis = errors.New("redis-server is not in PATH; install it (apt-get install redis-server, brew install redis)")

func (e *env) startRedis(ctx context.Context) (*redisServer, error) {
	if e.redis != nil {
		return e.redis, nil
	}
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errNoRedis
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &redisServer{addr: listener.Addr().String()}
	port := listener.Addr().(*net.TCPAddr).Port
	if err := listener.Close(); err != nil {
		return nil, err
	}

	// The shell ends the server when its standard input ends. That happens when this process ends, for whatever reason.
	s.cmd = exec.Command("sh", "-c", `"$0" "$@" </dev/null & read -r _; kill $!; wait $!`, program, "--bind", "127.0.0.1",
		"--port", strconv.Itoa(port), "--save", "", "--appendonly", "no", "--loglevel", "warning", "--dir", os.TempDir())
	s.cmd.Stderr = os.Stderr
	if s.lifeline, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	client := redis.NewClient(&redis.Options{Addr: s.addr})
	defer func() { _ = client.Close() }()
	for attempt := 0; ; attempt++ {
		info, err := client.InfoMap(ctx, "server").Result()
		if err == nil {
			s.version = info["Server"]["redis_version"]
			e.redis = s
			fmt.Fprintf(e.out, "on Redis %s, without persistence\n", s.version)
			return s, nil
		}
		if attempt == 100 || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("redis-server did not start: %w", err), s.close())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *redisServer) close() error {
	err := s.lifeline.Close()
	_ = s.cmd.Wait() // it was ended by a signal
	return err
}
