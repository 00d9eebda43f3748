package holds_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// The exhaustive test of holds: everything that can be done to two ids of one key, in every order, up to a depth. Orders that lead to the same
// rows are one state, from which the rest is played once. The database's clock is used, so that a call on a pool is the one of programs; time passes
// by moving what the rows say.
const (
	exhaustiveSlots  = 1
	exhaustiveBudget = 10   // of a window that does not end
	exhaustiveCount  = 4    // tokens of a hold
	exhaustiveTTL    = 60   // minutes
	exhaustivePast   = -120 // minutes: what is older is the same, since a sweep deletes what is older than an hour
)

// holdRow is what is known of an id in one limit.
type holdRow struct {
	state string // held, lapsed, settled
	of    int    // which grant of the id it is
	count float64
	rest  float64 // of a lapsed one: what of count did not come back
	until int     // minutes
}

// holdLedger is the rule of migrations/CONCURRENCY.md, J, written for this test: nothing of it is taken from the engine.
type holdLedger struct {
	names  []string // of the limits: slots, budget
	now    int      // minutes
	there  map[string]float64
	rows   map[string]holdRow // by limit and id
	given  map[string]int     // grants of an id
	locked map[string]bool    // rows that are passed over where nothing waits for them
}

func (m *holdLedger) clone() *holdLedger {
	return &holdLedger{names: m.names, now: m.now, there: maps.Clone(m.there), rows: maps.Clone(m.rows), given: maps.Clone(m.given)}
}

// String is what the database must say.
func (m *holdLedger) String() string {
	var s []string
	for _, name := range m.names {
		s = append(s, fmt.Sprintf("%s %g", name, m.there[name]))
	}
	for _, at := range slices.Sorted(maps.Keys(m.rows)) {
		row := m.rows[at]
		s = append(s, fmt.Sprintf("%s %s by grant %d: %g, %g until %d", at, row.state, row.of, row.count, row.rest, max(row.until-m.now, exhaustivePast)))
	}
	return strings.Join(s, "; ")
}

// comesBack is how much of x a limit takes back: all that fits, also where more was charged than it had.
func (m *holdLedger) comesBack(name string, x float64) float64 {
	if name == "budget" {
		return min(x, exhaustiveBudget-m.there[name])
	}
	return x
}

// lapse gives back what has expired by then: of one limit without one of its holds, or of all. all: it also forgets what is old.
func (m *holdLedger) lapse(all bool, then int, of, but string) {
	for at, row := range m.rows {
		name, _, _ := strings.Cut(at, " ")
		if m.locked[at] || at == but || of != "" && name != of {
			continue
		}
		if row.state == "held" && row.until <= then {
			back := m.comesBack(name, row.count)
			m.there[name] += back
			m.rows[at] = holdRow{"lapsed", row.of, row.count, row.count - back, m.now + 7*24*60}
		} else if all && row.state != "held" && row.until < m.now-60 {
			delete(m.rows, at)
		}
	}
}

func (m *holdLedger) hold(id string) string {
	settled := false
	for _, name := range m.names {
		row := m.rows[name+" "+id]
		switch {
		case row.state == "held" && row.until > m.now:
			return "held"
		case row.state == "settled" && row.until > m.now:
			settled = true
		}
	}
	if settled {
		return "settled"
	}
	takes := map[string]float64{"slots": 1, "budget": exhaustiveCount}
	then := m.clone()
	then.locked = m.locked
	then.lapse(false, m.now, "", "")
	if slices.ContainsFunc(m.names, func(name string) bool { return then.there[name] < takes[name] }) {
		return "quota" // which writes nothing
	}
	m.lapse(false, m.now, "", "")
	for _, name := range m.names {
		if own := m.rows[name+" "+id]; own.state == "held" { // it goes on without its id, and comes back for whoever asks
			m.there[name] += m.comesBack(name, own.count)
		}
		m.there[name] -= takes[name]
		m.rows[name+" "+id] = holdRow{"held", m.given[id], takes[name], 0, m.now + exhaustiveTTL}
	}
	m.given[id]++
	return "granted"
}

// end settles, or releases.
func (m *holdLedger) end(id string, of int, used float64, release bool) string {
	found, settled := map[string]holdRow{}, 0
	for _, name := range m.names {
		row, is := m.rows[name+" "+id]
		if !is || row.of != of || row.state != "held" && row.until <= m.now || row.state == "lapsed" && name == "slots" && !release {
			if !release {
				return "lost"
			}
			continue
		}
		if row.state == "settled" {
			settled++
			continue
		}
		found[name] = row
	}
	for name, row := range found {
		switch { // what ended before comes back before
		case name == "slots":
		case row.state == "lapsed":
			m.lapse(false, m.now, name, name+" "+id)
		case row.count != used:
			m.lapse(false, min(row.until, m.now), name, name+" "+id)
		}
		switch x := row.count - used; {
		case row.state == "held" && name == "slots":
			m.there[name]++
		case name == "slots":
		case row.state == "held" && x > 0:
			m.there[name] += m.comesBack(name, x)
		case row.state == "lapsed":
			m.there[name] += min(row.rest-used, 0)
		default:
			m.there[name] += min(x, 0)
		}
		if row.until, row.rest = m.now+24*60, 0; release {
			delete(m.rows, name+" "+id)
		} else {
			row.state = "settled"
			m.rows[name+" "+id] = row
		}
	}
	if !release && settled == len(m.names) {
		return "repeated"
	}
	return "done"
}

func (m *holdLedger) extend(id string, of int) string {
	for _, name := range m.names {
		row := m.rows[name+" "+id]
		if row.of != of || row.state != "held" || m.locked[name+" "+id] {
			continue
		}
		row.until = max(row.until, m.now+exhaustiveTTL)
		m.rows[name+" "+id] = row
	}
	return "done"
}

// holdMoment is a state of the two tables, as rows whose instants are minutes from now, and the tokens of all grants.
type holdMoment struct {
	Limits, Holds string
	tokens        map[string][]string // by id
	model         *holdLedger
	path          []string
}

// holdStep is something that can be done: by a program, and in the ledger.
type holdStep struct {
	name  string
	do    func(w *exhaustive, db harness.Handle) (string, error)
	model func(m *holdLedger) string
}

type exhaustive struct {
	testing.TB
	limits   *ratelimit.Limiter
	defs     []ratelimit.Limit
	pool     *pgxpool.Pool
	requests []ratelimit.Request
	granted  string // the token of a grant
}

func newExhaustive(t *testing.T, names ...string) *exhaustive {
	w := &exhaustive{TB: t, limits: &ratelimit.Limiter{}, pool: harness.NewPool(t, 3)}
	for _, name := range names {
		limit := ratelimit.Slots(name, exhaustiveSlots)
		if name == "budget" {
			limit = ratelimit.FixedWindow(name, exhaustiveBudget, 1e6*time.Hour, ratelimit.Start(harness.Noon.AddDate(-10, 0, 0)))
		}
		w.defs = append(w.defs, limit)
		w.requests = append(w.requests, limit.Key("k"))
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.pool, "test", w.defs...); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *exhaustive) begin() *holdMoment {
	m := &holdLedger{there: map[string]float64{}, rows: map[string]holdRow{}, given: map[string]int{}}
	for _, limit := range w.defs {
		m.names = append(m.names, limit.Name())
		m.there[limit.Name()] = map[string]float64{"slots": exhaustiveSlots, "budget": exhaustiveBudget}[limit.Name()]
	}
	return &holdMoment{Limits: "[]", Holds: "[]", tokens: map[string][]string{}, model: m}
}

// asked are the requests, with what is taken or used of the budget.
func (w *exhaustive) asked(tokens float64) (requests []ratelimit.Request) {
	for _, limit := range w.defs {
		request := limit.Key("k")
		if limit.Name() == "budget" {
			request = request.Count(tokens)
		}
		requests = append(requests, request)
	}
	return requests
}

// steps are all that can be done.
func (w *exhaustive) steps(at *holdMoment, sweeps bool) (steps []holdStep) {
	for _, id := range []string{"a", "b"} {
		steps = append(steps, holdStep{"hold " + id, func(w *exhaustive, db harness.Handle) (string, error) {
			held, err := w.limits.Hold(w.Context(), db, id, exhaustiveTTL*time.Minute, w.asked(exhaustiveCount)...)
			if denial, is := errors.AsType[*ratelimit.DeniedError](err); is {
				return string(denial.Reason), nil
			}
			w.granted = held.Token
			return "granted", err
		}, func(m *holdLedger) string { return m.hold(id) }})
		tokens := at.tokens[id]
		for of := max(0, len(tokens)-2); of < len(tokens); of++ { // the last token, and one before it
			for _, used := range []float64{1, exhaustiveCount, 6} {
				if len(w.defs) == 1 && w.defs[0].Name() == "slots" && used != 1 {
					continue
				}
				steps = append(steps, holdStep{fmt.Sprintf("settle %s %d with %g used", id, of, used), func(w *exhaustive, db harness.Handle) (string, error) {
					result, err := w.limits.Settle(w.Context(), db, tokens[of], w.asked(used)...)
					switch {
					case errors.Is(err, ratelimit.ErrHoldLost):
						return "lost", nil
					case result.Repeated:
						return "repeated", err
					}
					return "done", err
				}, func(m *holdLedger) string { return m.end(id, of, used, false) }})
			}
			steps = append(steps, holdStep{fmt.Sprint("release ", id, " ", of), func(w *exhaustive, db harness.Handle) (string, error) {
				return "done", harness.Second(w.limits.Release(w.Context(), db, tokens[of]))
			}, func(m *holdLedger) string { return m.end(id, of, 0, true) }})
			if sweeps { // where an extension is possible, a sweep is
				steps = append(steps, holdStep{fmt.Sprint("extend ", id, " ", of), func(w *exhaustive, db harness.Handle) (string, error) {
					for _, limit := range w.defs {
						if _, err := db.Exec(w.Context(), "SELECT ratelimit._extend(ARRAY[$1], '{k}', ARRAY[$2], ARRAY[$3::uuid], ARRAY[make_interval(mins => $4)])",
							limit.Name(), id, tokens[of][1:33], exhaustiveTTL); err != nil {
							return "", err
						}
					}
					return "done", nil
				}, func(m *holdLedger) string { return m.extend(id, of) }})
			}
		}
	}
	for _, minutes := range []int{90, 26 * 60, 8 * 24 * 60} {
		steps = append(steps, holdStep{fmt.Sprint("wait ", minutes, " minutes"), func(w *exhaustive, db harness.Handle) (string, error) {
			_, err := db.Exec(w.Context(), "UPDATE ratelimit.limits SET ts = ts - make_interval(mins => $1), lapses = lapses - make_interval(mins => $1)", minutes)
			if err == nil {
				_, err = db.Exec(w.Context(), "UPDATE ratelimit.holds SET taken_at = taken_at - make_interval(mins => $1), until = until - make_interval(mins => $1)", minutes)
			}
			return "done", err
		}, func(m *holdLedger) string { m.now += minutes; return "done" }})
	}
	if sweeps {
		steps = append(steps, holdStep{"sweep", func(w *exhaustive, db harness.Handle) (string, error) {
			if db == harness.Handle(w.pool) {
				_, err := w.limits.Sweep(w.Context(), db, w.defs...)
				return "done", err
			}
			_, err := db.Exec(w.Context(), "SELECT ratelimit._sweep_holds('', '', '', NULL)")
			return "done", err
		}, func(m *holdLedger) string { m.lapse(true, m.now, "", ""); return "done" }})
	}
	if i := slices.IndexFunc(w.defs, func(l ratelimit.Limit) bool { return l.Name() == "budget" }); i >= 0 {
		steps = append(steps, holdStep{"reset the budget", func(w *exhaustive, db harness.Handle) (string, error) {
			return "done", w.limits.Reset(w.Context(), db, w.requests[i].Count(1))
		}, func(m *holdLedger) string {
			m.there["budget"] = exhaustiveBudget
			for at, row := range m.rows {
				if strings.HasPrefix(at, "budget ") && row.state == "held" {
					row.state, row.rest, row.until = "lapsed", row.count, m.now+7*24*60
					m.rows[at] = row
				}
			}
			return "done"
		}})
	}
	return steps
}

// restore writes the rows of a holdMoment, as they would be now.
func (w *exhaustive) restore(ctx context.Context, db interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}, at *holdMoment) error {
	var b pgx.Batch
	b.Queue("DELETE FROM ratelimit.holds")
	b.Queue("DELETE FROM ratelimit.limits")
	b.Queue(`INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts, lapses)
		SELECT name, key, shard, shards, value, statement_timestamp() + ts * interval '1 minute', statement_timestamp() + lapses * interval '1 minute'
		FROM jsonb_to_recordset($1::text::jsonb) AS r (name text, key text, shard smallint, shards smallint, value double precision, ts double precision, lapses double precision)`, at.Limits)
	b.Queue(`INSERT INTO ratelimit.holds (name, key, id, state, unit, token, count, taken_at, rest, part, until)
		SELECT name, key, id, state, unit, token, count, statement_timestamp() + taken_at * interval '1 minute', rest, part, statement_timestamp() + until * interval '1 minute'
		FROM jsonb_to_recordset($1::text::jsonb) AS h (name text, key text, id text, state text, unit text, token uuid, count double precision, taken_at double precision, rest double precision,
			part double precision, until double precision)`, at.Holds)
	return db.SendBatch(ctx, &b).Close()
}

// look reads the rows, and wants them to be those of the model, and sound by themselves.
func (w *exhaustive) look(db harness.Handle, model *holdLedger, tokens map[string][]string) (next *holdMoment, said string) {
	next = &holdMoment{tokens: tokens, model: model}
	err := db.QueryRow(w.Context(), `SELECT
		coalesce((SELECT jsonb_agg(to_jsonb(r) || jsonb_build_object('ts', greatest(round(extract(epoch FROM r.ts - statement_timestamp()) / 60), -120),
			'lapses', CASE WHEN r.lapses IS NOT NULL THEN greatest(round(extract(epoch FROM r.lapses - statement_timestamp()) / 60), -120) END) ORDER BY r.name) FROM ratelimit.limits AS r), '[]')::text,
		coalesce((SELECT jsonb_agg(to_jsonb(h) || jsonb_build_object('taken_at', greatest(round(extract(epoch FROM h.taken_at - statement_timestamp()) / 60), -120),
			'until', greatest(round(extract(epoch FROM h.until - statement_timestamp()) / 60), -120)) ORDER BY h.name, h.id) FROM ratelimit.holds AS h WHERE h.state <> 'released'), '[]')::text`).Scan(&next.Limits, &next.Holds)
	if err != nil {
		w.Fatal(err)
	}
	var limits []struct {
		Name  string
		Value float64
	}
	var holds []struct {
		Name, ID, State, Unit, Token string
		Count, Rest, Until           float64
	}
	if err := errors.Join(json.Unmarshal([]byte(next.Limits), &limits), json.Unmarshal([]byte(next.Holds), &holds)); err != nil {
		w.Fatal(err)
	}
	got := &holdLedger{names: model.names, now: model.now, there: map[string]float64{}, rows: map[string]holdRow{}}
	for _, limit := range w.defs {
		got.there[limit.Name()] = map[string]float64{"slots": exhaustiveSlots, "budget": exhaustiveBudget}[limit.Name()]
	}
	for _, row := range limits {
		got.there[row.Name] = row.Value
		if row.Name == "slots" {
			got.there[row.Name] += exhaustiveSlots
		}
	}
	used, live, back := 0.0, 0, map[string]float64{}
	for _, row := range holds {
		if row.State != "lapsed" {
			row.Rest = 0
		}
		if strings.HasPrefix(row.ID, "~") {
			if row.State == "held" {
				back[row.Name] += row.Count
			}
		} else {
			of := slices.IndexFunc(tokens[row.ID], func(token string) bool { return strings.ReplaceAll(row.Token, "-", "") == token[1:33] })
			got.rows[row.Name+" "+row.ID] = holdRow{row.State, of, row.Count, row.Rest, model.now + int(row.Until)}
		}
		if row.State == "held" && row.Unit == "slots" {
			used += row.Count
			if row.Until > 0 {
				live++
			}
		}
	}
	if got.there["slots"] = exhaustiveSlots - used; live > exhaustiveSlots || slices.ContainsFunc(limits, func(l struct {
		Name  string
		Value float64
	}) bool {
		return l.Name == "slots" && l.Value != -used
	}) {
		w.Fatalf("%d slots are live, %g are held, and the rows are %s", live, used, next.Limits)
	}
	for name, x := range back {
		got.there[name] += got.comesBack(name, x)
	}
	return next, got.String()
}

// same is what two moments have in common if everything that follows is the same: tokens that can be used are named by their age.
func (at *holdMoment) same() string {
	s := at.Limits + at.Holds
	for _, id := range slices.Sorted(maps.Keys(at.tokens)) {
		tokens := at.tokens[id]
		for i, token := range tokens {
			u := token[1:33]
			s = strings.ReplaceAll(s, strings.Join([]string{u[:8], u[8:12], u[12:16], u[16:20], u[20:]}, "-"), fmt.Sprint(id, len(tokens)-i))
		}
		s += fmt.Sprint(id, min(len(tokens), 2))
	}
	return s
}

// after is the holdMoment's tokens after a step that may have granted one.
func (at *holdMoment) after(name, result, token string) map[string][]string {
	id, is := strings.CutPrefix(name, "hold ")
	if !is || result != "granted" {
		return at.tokens
	}
	tokens := maps.Clone(at.tokens)
	tokens[id] = append(slices.Clone(tokens[id]), token)
	return tokens
}

// explore plays every order of steps up to a depth, each state once, and returns the states.
func (w *exhaustive) explore(depth int, sweeps bool, on func(do func(db harness.Handle) error) error) []*holdMoment {
	begin := w.begin()
	all, played, seen := []*holdMoment{begin}, 0, map[string]bool{begin.same(): true}
	for layer := all; depth > 0; depth-- {
		var next []*holdMoment
		for _, at := range layer {
			for _, s := range w.steps(at, sweeps) {
				played++
				path := append(slices.Clone(at.path), s.name)
				err := on(func(db harness.Handle) error {
					if err := w.restore(w.Context(), db.(interface {
						SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
					}), at); err != nil {
						return err
					}
					model := at.model.clone()
					want := s.model(model)
					result, err := s.do(w, db)
					if err != nil || result != want {
						return fmt.Errorf("%s, want %s: %w", result, want, err)
					}
					then, said := w.look(db, model, at.after(s.name, result, w.granted))
					if said != model.String() {
						return fmt.Errorf("the rows are\n%s\nwant\n%s", said, model)
					}
					if key := then.same(); !seen[key] {
						seen[key] = true
						then.path = path
						next = append(next, then)
					}
					return nil
				})
				if err != nil {
					w.Fatalf("%s: %v", strings.Join(path, ", "), err)
				}
			}
		}
		all = append(all, next...)
		layer = next
	}
	w.Logf("%d states, %d steps", len(all), played)
	return all
}

var exhaustiveLimits = map[string][]string{"slots": {"slots"}, "tokens": {"budget"}, "both": {"budget", "slots"}}

// TestHoldsInEveryOrder: after every sequence of Hold, Settle, Release, extension, Reset, Sweep and the passing of time, the rows are those of a
// model: each hold gives back at most once, at most n are live, and no token is lost or made.
func TestHoldsInEveryOrder(t *testing.T) {
	for name, limits := range exhaustiveLimits {
		for _, level := range append([]pgx.TxIsoLevel{""}, harness.Levels...) {
			t.Run(fmt.Sprint(name, " ", level), func(t *testing.T) {
				t.Parallel()
				w := newExhaustive(t, limits...)
				on := func(do func(db harness.Handle) error) error { return do(w.pool) }
				depth := 4
				if testing.Short() {
					depth = 3
				} else if *harness.Whole {
					depth = 5
				}
				if level != "" {
					depth--
					on = func(do func(db harness.Handle) error) error {
						tx, err := w.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
						if err != nil {
							return err
						}
						return errors.Join(do(tx), tx.Rollback(t.Context()))
					}
				}
				w.explore(depth, level == "" || level == pgx.ReadCommitted, on)
			})
		}
	}
}

// passesOver are the sets of rows that a step may pass over, beside another one that has locked some: it does not wait for them.
func (at *holdMoment) passesOver(beside, s holdStep) (sets []map[string]bool) {
	sets = append(sets, nil)
	does := func(s holdStep, verb string) bool { return strings.HasPrefix(s.name, verb) }
	if does(s, "sweep") || does(s, "extend") || does(beside, "extend") {
		for _, row := range slices.Sorted(maps.Keys(at.model.rows)) {
			for _, set := range slices.Clone(sets) {
				more := map[string]bool{row: true}
				maps.Copy(more, set)
				sets = append(sets, more)
			}
		}
	}
	return sets
}

// TestHoldsInEveryPair: while a step is open in a transaction, another one comes on a pool, in every state of a few steps. Whether it waits or
// not, and whether the first is committed or rolled back, both have done what they would have done one after the other.
func TestHoldsInEveryPair(t *testing.T) {
	for name, limits := range exhaustiveLimits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := harness.NewRand(t)
			w := newExhaustive(t, limits...)
			states := w.explore(harness.Sized(3, 2), true, func(do func(db harness.Handle) error) error { return do(w.pool) })
			pairs, waited := 0, 0
			for _, at := range states {
				steps := slices.DeleteFunc(w.steps(at, true), func(s holdStep) bool {
					return strings.HasPrefix(s.name, "wait ") || strings.HasSuffix(s.name, " 6 used")
				})
				for _, first := range steps {
					for _, second := range steps {
						if !*harness.Whole && r.IntN(len(states)*len(steps)*len(steps)) >= harness.Sized(600, 50) {
							continue
						}
						for _, commit := range []bool{true, false} {
							pairs++
							wait, err := w.pair(at, first, second, commit)
							if err != nil {
								t.Fatalf("%s; then %s is open, and %s comes, and the first is committed: %t: %v", strings.Join(at.path, ", "), first.name, second.name, commit, err)
							}
							if wait {
								waited++
							}
						}
					}
				}
			}
			t.Logf("%d pairs, and %d waited", pairs, waited)
			if waited == 0 || waited == pairs {
				t.Error("some wait, and some do not")
			}
		})
	}
}

// pair plays two steps at once, and reports whether the second one waited.
func (w *exhaustive) pair(at *holdMoment, first, second holdStep, commit bool) (waited bool, err error) {
	if err := w.restore(w.Context(), w.pool, at); err != nil {
		return false, err
	}
	tx, err := w.pool.Begin(w.Context())
	if err != nil {
		return false, err
	}
	defer tx.Rollback(context.WithoutCancel(w.Context()))
	var pid int
	if err := tx.QueryRow(w.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return false, err
	}
	said, err := first.do(w, tx)
	if err != nil {
		return false, err
	}
	token := w.granted
	other := *w
	then, done := "", make(chan error, 1)
	go func() {
		var err error
		then, err = second.do(&other, w.pool)
		done <- err
	}()
	for over := false; !over && !waited; {
		select {
		case err = <-done:
			over = true
		case <-time.After(time.Millisecond):
			err = w.pool.QueryRow(w.Context(), "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid)))", pid).Scan(&waited)
		}
		if err != nil {
			return false, err
		}
	}
	if !commit {
		err = tx.Rollback(w.Context())
	} else {
		err = tx.Commit(w.Context())
	}
	if waited {
		err = errors.Join(err, <-done)
	}
	if err != nil {
		return false, err
	}
	tokens := at.tokens
	if commit {
		tokens = at.after(first.name, said, token)
	}
	tokens = (&holdMoment{tokens: tokens}).after(second.name, then, other.granted)

	var wants []string
	_, rows := w.look(w.pool, at.model, tokens)
	for _, locked := range at.passesOver(first, second) {
		for _, order := range []bool{true, false} {
			m := at.model.clone()
			model := func(m *holdLedger) (said string) {
				m.locked = locked
				said = second.model(m)
				m.locked = nil
				return said
			}
			wantSaid := said
			var wantThen string
			switch {
			case !commit:
				wantThen = model(m)
			case order:
				wantSaid, wantThen = first.model(m), model(m)
			default:
				wantThen, wantSaid = model(m), first.model(m)
			}
			if wantSaid == said && wantThen == then && m.String() == rows {
				return waited, nil
			}
			wants = append(wants, fmt.Sprintf("%s, %s: %s", wantSaid, wantThen, m))
		}
	}
	return waited, fmt.Errorf("%s, %s: %s\nwant one of\n%s", said, then, rows, strings.Join(wants, "\n"))
}
