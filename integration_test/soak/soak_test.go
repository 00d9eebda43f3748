// Package soak lets four processes use the limiter in every way for a given time, while connections are cut, statements
// time out, contexts end and processes are killed. Afterwards it compares all committed changes with the exact model.
//
//	go test ./integration_test/soak -time 20m -timeout 1h
//
// There are two records. In the database, a trigger records each change of a row of ratelimit.limits, and a transaction records
// its calls: both commit exactly if the tokens do. In files, each process records its answers: a transaction's outcome,
// and, for a call that is its own transaction, the call before it is sent and the answer after it. check_test.go says what
// the records must satisfy.
package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	duration = flag.Duration("time", 8*time.Second, "how long the processes use the limiter")
	seedFlag = flag.Uint64("seed", 0, "replay the traffic and the faults of this seed (0: a new one); their interleaving still varies")
)

const (
	processes = 4
	enough    = 1000 // changes of rows
	// workerArgument makes the test binary run as one of the processes.
	workerArgument = "soak-worker"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == workerArgument {
		if err := work(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "soak: a worker:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// records are the tables for the records in the database. One sequence numbers both. A row of ratelimit.limits stays locked from
// its change to the end of the transaction, so each row's numbers are in the order of its versions.
const records = `
CREATE SEQUENCE soak_n;
CREATE TABLE soak_changes (
    n bigint DEFAULT nextval('soak_n'), xid xid8 DEFAULT pg_current_xact_id(), app text DEFAULT current_setting('application_name'),
    at timestamptz DEFAULT clock_timestamp(),
    name text, key text, shard integer, shards integer,
    old_value double precision, old_ts timestamptz, -- NULL: inserted
    value double precision, ts timestamptz          -- NULL: deleted
);
CREATE TABLE soak_promised (name text, key text, at timestamptz DEFAULT clock_timestamp(), promised timestamptz);
CREATE TABLE soak_calls (n bigint DEFAULT nextval('soak_n'), xid xid8 DEFAULT pg_current_xact_id(), op bigint, call text);
CREATE FUNCTION soak_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'DELETE' AND NEW.promised IS NOT NULL THEN
        INSERT INTO soak_promised (name, key, promised) VALUES (NEW.name, NEW.key, NEW.promised);
    END IF;
    IF TG_OP = 'UPDATE' AND (OLD.value, OLD.ts) = (NEW.value, NEW.ts) AND OLD.promised IS DISTINCT FROM NEW.promised THEN
        RETURN NULL; -- the second write of a reservation
    ELSIF coalesce(NEW.name, OLD.name) LIKE 'held %' THEN -- see holds_test.go
        INSERT INTO soak_held (name, key, old_value, value) VALUES (coalesce(NEW.name, OLD.name), coalesce(NEW.key, OLD.key), OLD.value, NEW.value);
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO soak_changes (name, key, shard, shards, value, ts) VALUES (NEW.name, NEW.key, NEW.shard, NEW.shards, NEW.value, NEW.ts);
    ELSIF TG_OP = 'UPDATE' THEN
        INSERT INTO soak_changes (name, key, shard, shards, old_value, old_ts, value, ts)
        VALUES (NEW.name, NEW.key, NEW.shard, NEW.shards, OLD.value, OLD.ts, NEW.value, NEW.ts);
    ELSE
        INSERT INTO soak_changes (name, key, shard, shards, old_value, old_ts) VALUES (OLD.name, OLD.key, OLD.shard, OLD.shards, OLD.value, OLD.ts);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER soak AFTER INSERT OR UPDATE OR DELETE ON ratelimit.limits FOR EACH ROW EXECUTE FUNCTION soak_change();`

// soak is one run.
type soak struct {
	*testing.T
	url  string
	seed uint64
	dir  string // directory of the files
	// holdsDir is the directory of the files about holds.
	holdsDir string
	admin    *pgxpool.Pool // not subject to faults

	mu      sync.Mutex
	workers [processes]*process
	faults  map[string]int
}

func TestSoak(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("replay: go test ./integration_test/soak -time %v -timeout %v -seed %d", *duration, *duration*2+10*time.Minute, seed)
	server, err := postgres.Start(t.Context())
	if err != nil {
		t.Fatal(err) // without Postgres the tests fail; they are not skipped
	}
	t.Cleanup(func() { noError(t, server.Close()) })
	t.Logf("on %v", server)
	s := &soak{T: t, url: migrated.NewDatabase(t, server), seed: seed, dir: t.TempDir(), holdsDir: t.TempDir(), faults: map[string]int{}}
	if s.admin, err = pgxpool.New(t.Context(), s.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.admin.Close)
	_, err = s.admin.Exec(t.Context(), records+heldRecords)
	noError(t, err)
	noError(t, new(ratelimit.Limiter).Publish(t.Context(), s.admin, "soak", heldLimits...))

	for i := range s.workers {
		s.workers[i] = s.spawn(i, 0)
	}
	s.injectFaults(time.Now().Add(*duration))
	for begin := time.Now(); s.changes() < enough && time.Since(begin) < 5*time.Minute; { // a busy machine needs longer
		s.injectFaults(time.Now().Add(*duration / 4))
	}
	s.stopWorkers()
	if t.Failed() {
		return // anything left behind would be a consequence
	}
	s.check()
}

// changes returns the number of changes of rows so far.
func (s *soak) changes() (n int) {
	noError(s, s.admin.QueryRow(s.Context(), "SELECT count(*) FROM soak_changes").Scan(&n))
	return n
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// process is a worker, in its parent.
type process struct {
	cmd         *exec.Cmd
	in          io.WriteCloser
	out         *bufio.Reader
	number      int
	incarnation int
}

// spawn starts a worker: the first of its number, or one that replaces a killed worker.
func (s *soak) spawn(number, incarnation int) *process {
	self, err := os.Executable()
	noError(s, err)
	p := &process{cmd: exec.Command(self, workerArgument), number: number, incarnation: incarnation}
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	noError(s, err)
	out, err := p.cmd.StdoutPipe()
	noError(s, err)
	p.out = bufio.NewReader(out)
	noError(s, p.cmd.Start())
	noError(s, json.NewEncoder(p.in).Encode(job{
		URL: s.url, Seed: s.seed, Number: number, Incarnation: incarnation, Settle: min(*duration/4, time.Minute),
		File: filepath.Join(s.dir, fmt.Sprintf("%d.%d", number, incarnation)), Holds: filepath.Join(s.holdsDir, fmt.Sprintf("%d.%d", number, incarnation)),
	}))
	return p
}

// injectFaults injects faults until the time is over.
func (s *soak) injectFaults(until time.Time) {
	ctx := s.Context()
	var wg sync.WaitGroup
	every := func(n uint64, least, most time.Duration, what func(r *rand.Rand)) {
		r := rand.New(rand.NewPCG(s.seed, n))
		wg.Go(func() {
			for {
				time.Sleep(min(least+rand.N(most-least), time.Until(until)))
				if !time.Now().Before(until) {
					return
				}
				what(r)
			}
		})
	}
	every(1, 200*time.Millisecond, time.Second, func(*rand.Rand) {
		var n int
		err := s.admin.QueryRow(ctx, `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
			WHERE application_name LIKE $1 ORDER BY random() LIMIT 1) AS victim`, appName(s.seed, "%")).Scan(&n)
		s.fault("connections terminated", n, err)
	})
	every(2, 300*time.Millisecond, 1500*time.Millisecond, func(r *rand.Rand) { // so that statements time out
		s.fault("rows locked", 1, s.lockARow(ctx, keyName(r.IntN(2)), time.Duration(r.IntN(int(600*time.Millisecond)))))
	})
	kill := min(*duration/2, 30*time.Second)
	every(3, kill/2, kill*3/2, func(r *rand.Rand) {
		i := r.IntN(processes)
		old := s.workers[i]
		err := old.cmd.Process.Kill()
		_ = old.cmd.Wait() // says that it was killed
		_ = old.in.Close()
		s.workers[i] = s.spawn(i, old.incarnation+1)
		s.fault("processes killed", 1, err)
	})
	every(4, 100*time.Millisecond, time.Second, func(*rand.Rand) {
		n, err := s.sweepAhead(ctx)
		s.fault("rows swept", n, err)
	})
	every(5, 200*time.Millisecond, 2*time.Second, func(*rand.Rand) {
		_, err := new(ratelimit.Limiter).Sweep(ctx, s.admin, append(sweptSubjects(), heldLimits...)...)
		s.fault("sweeps by the real clock", 1, err)
	})
	wg.Wait()
}

// sweepAhead sweeps the rows that have been full for an hour, by a clock that is an hour ahead: all that are full. A Sweep by such a clock would
// also end all holds.
func (s *soak) sweepAhead(ctx context.Context) (deleted int, err error) {
	for _, limit := range sweptSubjects() {
		config := limit.Config()
		for first := new(string); first != nil; {
			var n int
			if err := s.admin.QueryRow(ctx, `SELECT deleted, next FROM ratelimit._sweep($1, $2, $3, $4, $5, $6, $7, NULL, clock_timestamp() + interval '1 hour')`,
				config.Name, config.Rate, period(config), config.Kind, *config.Capacity, config.Start, *first).Scan(&n, &first); err != nil {
				return deleted, err
			}
			deleted += n
		}
	}
	return deleted, nil
}

func (s *soak) fault(what string, n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[what] += n
	if err != nil {
		s.Errorf("%s: %v", what, err)
	}
}

// lockARow locks the rows of a key, perhaps for longer than statement_timeout.
func (s *soak) lockARow(ctx context.Context, key string, d time.Duration) error {
	return pgx.BeginFunc(ctx, s.admin, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT FROM ratelimit.limits WHERE key = $1 ORDER BY name, key, shard FOR UPDATE`, key)
		time.Sleep(d)
		return err
	})
}

// stopWorkers stops the traffic, looks for anything left behind in the server, and then lets the processes end.
func (s *soak) stopWorkers() {
	for _, p := range s.workers {
		if _, err := fmt.Fprintln(p.in, "stop"); err != nil {
			s.Errorf("process %d: %v", p.number, err)
		}
	}
	for _, p := range s.workers {
		if _, err := p.out.ReadString('\n'); err != nil {
			s.Errorf("process %d did not stop: %v", p.number, err)
		}
	}
	// Backends that were terminated, or whose clients were killed, may take a moment to end.
	s.none("transactions", `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE $1 AND state <> 'idle'`)
	s.none("locks", `SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE application_name LIKE $1`)
	for _, p := range s.workers {
		noError(s, p.in.Close())
		var r report
		if err := json.NewDecoder(p.out).Decode(&r); err != nil {
			s.Errorf("process %d ended without a report: %v", p.number, err)
		}
		if err := p.cmd.Wait(); err != nil {
			s.Errorf("process %d: %v", p.number, err)
		}
		s.Logf("process %d.%d: %v", p.number, p.incarnation, r)
		for _, leak := range r.Leaks {
			s.Errorf("process %d: %s", p.number, leak)
		}
	}
	s.none("connections", `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE $1`)
}

// none waits for a count to become zero.
func (s *soak) none(what, query string) {
	s.Helper()
	n := -1
	for deadline := time.Now().Add(20 * time.Second); n != 0 && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		noError(s, s.admin.QueryRow(s.Context(), query, appName(s.seed, "%")).Scan(&n))
	}
	if n != 0 {
		s.Errorf("leaked: %d %s", n, what)
	}
}

// appName is the application_name of a run's connections for a handle, or for all handles ("%").
func appName(seed uint64, handle string) string { return fmt.Sprintf("soak %x %s", seed, handle) }

// readLines reads a process's records. A killed process may have left half a line.
func readLines(file string, each func(line)) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for d := json.NewDecoder(bufio.NewReaderSize(f, 1<<20)); ; {
		var l line
		switch err := d.Decode(&l); {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", file, err)
		}
		each(l)
	}
}
