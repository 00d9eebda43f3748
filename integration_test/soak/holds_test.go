package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// Holds in the mix: slots, slots of several limits, tokens that come back, things that exist, events that are counted once. Their ids are those of jobs
// that every process gets, within a few seconds, again and again. The records are a trigger's, of each change of a hold and of its limit's row, and what
// each process was told. They must satisfy this:
//
//   - The changes of a hold are a chain. A hold leaves the state held once, and is held again only under another token.
//   - At most n are held of each key at any moment, and at most n are live by the database's clock.
//   - A transaction moves as much in a limit's row as its holds say: a settled one what was held less what was used, a lapsed one what it did not keep.
//   - What was granted and acknowledged is in the record; what was settled and acknowledged was settled once; what was lost never was.
//   - Once all ttls are over, one sweep leaves no expired hold, and no slot in use but those of things.
var (
	heldSlots  = ratelimit.Slots("held slots", 3)
	heldInAll  = ratelimit.Slots("held in all", 6)
	heldThings = ratelimit.Slots("held things", 8)
	heldBudget = ratelimit.FixedWindow("held budget", heldTokens, 1e6*time.Hour, ratelimit.Start(time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)))
	heldLimits = []ratelimit.Limit{heldSlots, heldInAll, heldThings, heldBudget}
	mostHeld   = map[string]float64{"held slots": 3, "held in all": 6, "held things": 8}
)

const (
	heldTokens = 1e6
	heldCount  = 2 // tokens of a hold
)

// heldUsed is what the work of an id uses: less than is held, just as much, or more.
func heldUsed(id string) float64 { return float64(id[len(id)-1] % 5) }

const heldRecords = `
CREATE TABLE soak_holds (
    n bigint DEFAULT nextval('soak_n'), xid xid8 DEFAULT pg_current_xact_id(), at timestamptz DEFAULT clock_timestamp(),
    old ratelimit.holds, new ratelimit.holds -- NULL: no row
);
CREATE TABLE soak_held (n bigint DEFAULT nextval('soak_n'), xid xid8 DEFAULT pg_current_xact_id(), name text, key text, old_value double precision, value double precision);
CREATE FUNCTION soak_hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO soak_holds (old, new) VALUES (CASE WHEN TG_OP <> 'INSERT' THEN OLD END, CASE WHEN TG_OP <> 'DELETE' THEN NEW END);
    RETURN NULL;
END $$;
CREATE TRIGGER soak AFTER INSERT OR UPDATE OR DELETE ON ratelimit.holds FOR EACH ROW EXECUTE FUNCTION soak_hold();`

// heldLine is what a process was told of a hold.
type heldLine struct {
	Verb    string
	ID      string
	Limits  []string
	Token   string  `json:",omitempty"`
	Outcome outcome // committed; denied; lost; repeated; failed
	Reason  string  `json:",omitempty"`
}

const (
	lost     outcome = "lost"
	repeated outcome = "repeated"
)

// holder is one goroutine of a process that holds.
type holder struct {
	*rand.Rand
	*worker
	log    io.Writer
	tokens []heldToken // what was granted here, or was
}

type heldToken struct {
	id, token string
	names     []string
}

func (w *worker) holds(goroutine int, log io.Writer) {
	h := &holder{rand.New(rand.NewPCG(w.Seed, uint64(w.Number)<<32|uint64(w.Incarnation)<<16|uint64(goroutine)+1<<49)), w, log, nil}
	for !w.stop.Load() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if h.IntN(25) == 0 {
			ctx, cancel = context.WithTimeout(context.Background(), time.Duration(h.IntN(int(20*time.Millisecond))))
		}
		begin := time.Now()
		switch n := h.IntN(12); {
		case n < 5:
			h.hold(ctx)
		case n < 8:
			h.end(ctx)
		case n < 9:
			h.during(ctx)
		case n < 10:
			h.things(ctx)
		case n < 11:
			h.many(ctx)
		default:
			h.once(ctx)
		}
		cancel()
		w.calls.Add(1)
		if took := int64(time.Since(begin)); took > w.slowest.Load() {
			w.slowest.Store(took)
		}
		time.Sleep(time.Duration(h.IntN(int(20 * time.Millisecond))))
	}
}

// job is the id of a job that is delivered now, here and to others.
func (h *holder) job(what string) string {
	return fmt.Sprint(what, " ", time.Now().Unix()/2*10+int64(h.IntN(15)))
}

func keyOf(id string) string { return keyName(int(id[len(id)-1]) % 2) }

// handle is a way to reach the limiter that is no transaction.
func (h *holder) handle() ratelimit.DB {
	switch h.IntN(4) {
	case 0:
		return ratelimit.SQL(h.db["pgx"])
	case 1:
		return ratelimit.SQL(h.db["postgres"])
	}
	return h.pool
}

// call makes a call, in a transaction of its own or in one that may change its mind. It then writes down what was told.
func (h *holder) call(ctx context.Context, l heldLine, do func(ctx context.Context, db ratelimit.DB, l *heldLine) error) heldLine {
	var err error
	if abandon, level := h.IntN(8) == 0, []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[h.IntN(3)]; h.IntN(3) == 0 {
		err = h.limiter.InTx(ctx, h.pool, func(ctx context.Context, tx pgx.Tx) error {
			if err := do(ctx, tx, &l); err != nil {
				return err
			}
			if abandon {
				return errAbandoned
			}
			return nil
		}, ratelimit.Isolation(level))
	} else {
		err = do(ctx, h.handle(), &l)
	}
	denial, denies := errors.AsType[*ratelimit.DeniedError](err)
	switch {
	case denies:
		l.Outcome, l.Reason = denied, string(denial.Reason)
	case errors.Is(err, ratelimit.ErrHoldLost):
		l.Outcome = lost
	case err != nil:
		l.Outcome = unknown
	case l.Outcome == "":
		l.Outcome = committed
	}
	h.told(l)
	return l
}

func (h *holder) told(l heldLine) {
	text, err := json.Marshal(l)
	if err == nil {
		_, err = h.log.Write(append(text, '\n'))
	}
	if err != nil {
		panic(err)
	}
}

// heldRequests asks the limits of these names for a key, with so many tokens of the budget.
func heldRequests(key string, tokens float64, names ...string) (requests []ratelimit.Request) {
	for _, name := range names {
		switch name {
		case heldInAll.Name():
			requests = append(requests, heldInAll.Global())
		case heldBudget.Name():
			requests = append(requests, heldBudget.Key(key).Count(tokens))
		default:
			requests = append(requests, heldSlots.Key(key))
		}
	}
	return requests
}

// hold claims a job, and mostly settles it a moment later.
func (h *holder) hold(ctx context.Context) {
	id := h.job("job")
	names := [][]string{{heldSlots.Name()}, {heldBudget.Name()}, {heldSlots.Name(), heldInAll.Name(), heldBudget.Name()}}[id[len(id)-1]%3]
	ttl := time.Second + time.Duration(h.IntN(int(time.Second)))
	l := h.call(ctx, heldLine{Verb: "hold", ID: id, Limits: names}, func(ctx context.Context, db ratelimit.DB, l *heldLine) error {
		held, err := h.limiter.Hold(ctx, db, id, ttl, heldRequests(keyOf(id), heldCount, names...)...)
		l.Token = held.Token
		return err
	})
	if l.Outcome != committed {
		return
	}
	if h.tokens = append(h.tokens, heldToken{id, l.Token, names}); len(h.tokens) > 20 {
		h.tokens = h.tokens[1:]
	}
	if h.IntN(2) == 0 {
		time.Sleep(time.Duration(h.IntN(int(200 * time.Millisecond))))
		h.finish(ctx, h.tokens[len(h.tokens)-1])
	}
}

// end ends some hold that this goroutine had, in time, late or again.
func (h *holder) end(ctx context.Context) {
	if len(h.tokens) > 0 {
		h.finish(ctx, h.tokens[h.IntN(len(h.tokens))])
	}
}

func (h *holder) finish(ctx context.Context, of heldToken) {
	if h.IntN(4) == 0 {
		h.call(ctx, heldLine{Verb: "release", ID: of.id, Limits: of.names, Token: of.token}, func(ctx context.Context, db ratelimit.DB, _ *heldLine) error {
			_, err := h.limiter.Release(ctx, db, of.token)
			return err
		})
		return
	}
	h.call(ctx, heldLine{Verb: "settle", ID: of.id, Limits: of.names, Token: of.token}, func(ctx context.Context, db ratelimit.DB, l *heldLine) error {
		result, err := h.limiter.Settle(ctx, db, of.token, heldRequests(keyOf(of.id), heldUsed(of.id), of.names...)...)
		if l.Outcome = ""; err == nil && result.Repeated {
			l.Outcome = repeated
		}
		return err
	})
}

// during holds while a function runs, on a pool.
func (h *holder) during(ctx context.Context) {
	id := h.job("work")
	l := heldLine{Verb: "during", ID: id, Limits: []string{heldSlots.Name(), heldInAll.Name()}, Outcome: committed}
	err := h.limiter.During(ctx, h.pool, id, time.Second, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
		l.Token = held.Token
		work := time.Duration(h.IntN(int(100 * time.Millisecond)))
		if h.IntN(4) == 0 {
			work = 1500 * time.Millisecond // it is extended
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(work):
			return nil, nil
		}
	}, heldRequests(keyOf(id), 0, l.Limits...)...)
	denial, denies := errors.AsType[*ratelimit.DeniedError](err)
	switch {
	case denies:
		l.Outcome, l.Reason = denied, string(denial.Reason)
	case errors.Is(err, ratelimit.ErrHoldLost):
		l.Outcome = lost
	case err != nil:
		l.Outcome = unknown
	}
	h.told(l)
}

func (h *holder) things(ctx context.Context) {
	id, things := fmt.Sprint("thing ", h.IntN(12)), heldThings.Key(keyName(0))
	if h.IntN(2) == 0 {
		h.call(ctx, heldLine{Verb: "exists", ID: id, Limits: []string{heldThings.Name()}}, func(ctx context.Context, db ratelimit.DB, _ *heldLine) error {
			_, err := h.limiter.Hold(ctx, db, id, ratelimit.Forever, things)
			return err
		})
		return
	}
	h.call(ctx, heldLine{Verb: "is gone", ID: id, Limits: []string{heldThings.Name()}}, func(ctx context.Context, db ratelimit.DB, _ *heldLine) error {
		_, err := h.limiter.Release(ctx, db, id, things)
		return err
	})
}

// many takes and frees slots of things by SQL.
func (h *holder) many(ctx context.Context) {
	var ids []string
	for i := range 12 {
		if h.IntN(4) == 0 {
			ids = append(ids, fmt.Sprint("thing ", i))
		}
	}
	verb := []string{"ratelimit.hold_many", "ratelimit.release_many"}[h.IntN(2)]
	_, err := h.pool.Exec(ctx, "SELECT "+verb+"($1, $2, $3)", heldThings.Name(), keyName(0), ids)
	l := heldLine{Verb: verb, Limits: []string{heldThings.Name()}, Outcome: committed}
	if sqlState(err) == deniedByHand {
		l.Outcome = denied
	} else if err != nil {
		l.Outcome = unknown
	}
	h.told(l)
}

func (h *holder) once(ctx context.Context) {
	id := h.job("event")
	budget := heldBudget.Key(keyOf(id)).Count(heldCount)
	h.call(ctx, heldLine{Verb: "once", ID: id, Limits: []string{heldBudget.Name()}}, func(ctx context.Context, db ratelimit.DB, l *heldLine) error {
		_, result, err := h.limiter.Once(ctx, db, id, time.Minute, budget)
		if l.Outcome = ""; err == nil && result.Repeated {
			l.Outcome = repeated
		}
		return err
	})
}

// heldRow is a version of a row of ratelimit.holds.
type heldRow struct {
	Name, Key, ID, State, Unit, Token string
	Count                             float64
	Until                             time.Time
	endless                           bool
}

func (r *heldRow) held() bool { return r != nil && r.State == "held" }

// moved is how much a change of a hold moves in the row of its limit.
func moved(was, is *heldRow) float64 {
	switch {
	case was == nil && is.State != "held" && is.State != "once": // of a Settle that looks for a newer hold
		return 0
	case is != nil && (is.State == "held" || is.State == "once") && (was == nil || was.State != is.State || was.Token != is.Token || is.State == "once"):
		return -is.Count
	case !was.held() && (is == nil || was.State != "lapsed" || was.Unit != "tokens" || is.State != "settled"):
		return 0
	case was.State == "lapsed":
		return -max(0, heldUsed(was.ID)-was.Count)
	case is == nil:
		return was.Count
	case is.State == "lapsed":
		return was.Count - is.Count
	case is.State == "settled" && was.Unit == "tokens":
		return was.Count - heldUsed(was.ID)
	case is.State == "settled":
		return was.Count
	}
	return 0 // an extension
}

// checkHolds compares the records of holds with what they must satisfy, and with the tables.
func (c *checker) checkHolds(s *soak) {
	_, err := s.admin.Exec(s.Context(), `SELECT pg_sleep(greatest(extract(epoch FROM max(until) - clock_timestamp())::double precision, 0) + 0.01) FROM ratelimit.holds WHERE state = 'held' AND until < 'infinity'`)
	noError(c, err)
	_, err = new(ratelimit.Limiter).Sweep(s.Context(), s.admin, heldLimits...)
	noError(c, err)

	type hold struct{ name, key, id string }
	type limit struct{ name, key string }
	type stay struct{ from, until time.Time }
	rows := map[hold]*heldRow{}
	inUse := map[limit]float64{}
	granted, settled, ended := map[string]bool{}, map[string]int{}, map[string]int{} // by token, id and limit
	since := map[hold]time.Time{}
	stays := map[limit][]stay{}
	type account struct{ want, got float64 }
	accounts := map[string]map[limit]*account{} // by transaction
	of := func(xid string, l limit) *account {
		if accounts[xid] == nil {
			accounts[xid] = map[limit]*account{}
		}
		if accounts[xid][l] == nil {
			accounts[xid][l] = &account{}
		}
		return accounts[xid][l]
	}
	values := map[limit]float64{} // what the rows of the limits say
	full := func(name string) float64 {
		if name == heldBudget.Name() {
			return heldTokens
		}
		return 0
	}
	lines, err := s.admin.Query(s.Context(), `
		SELECT n, xid::text, at, to_jsonb(old) - 'until', to_jsonb(new) - 'until', nullif((old).until, 'infinity'), nullif((new).until, 'infinity'), '' AS name, '' AS key, NULL::double precision AS old_value, NULL::double precision AS value
		  FROM soak_holds
		UNION ALL SELECT n, xid::text, now(), NULL, NULL, NULL, NULL, name, key, old_value, value FROM soak_held
		 ORDER BY n`)
	noError(c, err)
	var n int64
	var xid, name, key string
	var at time.Time
	var was, is *heldRow
	var wasUntil, isUntil *time.Time
	var oldValue, value *float64
	_, err = pgx.ForEachRow(lines, []any{&n, &xid, &at, &was, &is, &wasUntil, &isUntil, &name, &key, &oldValue, &value}, func() error {
		if name != "" {
			l := limit{name, key}
			from, to := full(name), full(name)
			if oldValue != nil {
				from = *oldValue
			}
			if value != nil {
				to = *value
			}
			if before, is := values[l]; is && before != from {
				c.fail("change %d of %v starts from %v, and the last one led to %v", n, l, from, before)
			}
			values[l] = to
			of(xid, l).got += to - from
			return nil
		}
		for row, until := range map[*heldRow]*time.Time{was: wasUntil, is: isUntil} {
			if row != nil {
				if row.endless = until == nil; until != nil {
					row.Until = *until
				}
			}
		}
		row := is
		if is == nil {
			row = was
		}
		h, l := hold{row.Name, row.Key, row.ID}, limit{row.Name, row.Key}
		if last := rows[h]; (last == nil) != (was == nil) || last != nil && (last.State != was.State || last.Token != was.Token || last.Count != was.Count || !last.Until.Equal(was.Until)) {
			c.fail("change %d of %v starts from %+v, and the last one led to %+v", n, h, was, last)
		}
		rows[h] = is
		of(xid, l).want += moved(was, is)
		said := "a hold that is over: forgotten"
		switch {
		case is.held() && (!was.held() || was.Token != is.Token):
			if was.held() {
				c.fail("change %d: %v is held by two", n, h)
			}
			if is.Token != "" && granted[is.Token+h.name] {
				c.fail("change %d: %v is held a second time under one token", n, h)
			}
			granted[is.Token+h.name] = true
			since[h] = at
			said = "granted"
		case is.held():
			if said = "extended"; is.Count != was.Count || is.Until.Before(was.Until) {
				c.fail("change %d: %v was extended from %+v to %+v", n, h, was, is)
			}
		case was.held():
			if ended[was.Token+h.name]++; was.Token != "" && ended[was.Token+h.name] > 1 {
				c.fail("change %d: %v has ended twice", n, h)
			}
			end := at
			if !was.endless && was.Until.Before(at) {
				end = was.Until
			}
			stays[l] = append(stays[l], stay{since[h], end})
			if said = "released"; is != nil {
				said = is.State
			}
		case is != nil && is.State == "once":
			said = "counted once"
		case is != nil:
			said = is.State + " late"
		}
		if is != nil && is.State == "settled" {
			settled[is.Token+h.name]++
		}
		c.counts["changes of holds: "+said]++
		if row.Unit == "slots" {
			if is.held() && !was.held() {
				inUse[l] += is.Count
			} else if was.held() && !is.held() {
				inUse[l] -= was.Count
			}
			if inUse[l] > mostHeld[l.name] {
				c.fail("change %d: %v of %v are held", n, inUse[l], l)
			}
		}
		was, is = nil, nil // the next row may be read into the same
		return nil
	})
	noError(c, err)
	for xid, moves := range accounts {
		for l, a := range moves {
			if a.want != a.got {
				c.fail("transaction %s moved %v in %v, and its holds say %v", xid, a.got, l, a.want)
			}
		}
	}
	for l, all := range stays { // those of slots that have ended, by the database's clock
		type event struct {
			at time.Time
			by int
		}
		var events []event
		for _, s := range all {
			if s.until.After(s.from) {
				events = append(events, event{s.from, 1}, event{s.until, -1})
			}
		}
		slices.SortFunc(events, func(a, b event) int {
			if order := a.at.Compare(b.at); order != 0 {
				return order
			}
			return a.by - b.by
		})
		live, most := 0, 0
		for _, e := range events {
			live += e.by
			most = max(most, live)
		}
		if n, is := mostHeld[l.name]; is && float64(most) > n {
			c.fail("%d of %v were live at once", most, l)
		}
		c.counts[fmt.Sprintf("live at once: %s, at most", l.name)] = max(most, c.counts[fmt.Sprintf("live at once: %s, at most", l.name)])
	}

	// What the processes were told.
	files, err := filepath.Glob(filepath.Join(s.holdsDir, "*"))
	noError(c, err)
	for _, file := range files {
		noError(c, readHeld(file, func(l heldLine) {
			c.counts[strings.TrimSuffix(fmt.Sprintf("holds: %s, %s, %s", l.Verb, l.Outcome, l.Reason), ", ")]++
			for _, name := range l.Limits {
				switch token := strings.ReplaceAll(uuidOf(l.Token), "-", ""); {
				case token == "":
				case l.Verb == "hold" && l.Outcome == committed && !granted[uuidOf(l.Token)+name]:
					c.fail("%+v: it is not in the record", l)
				case (l.Verb == "settle" || l.Verb == "during") && l.Outcome == committed && settled[uuidOf(l.Token)+name] != 1:
					c.fail("%+v: it was settled %d times", l, settled[uuidOf(l.Token)+name])
				case l.Verb == "settle" && l.Outcome == lost && settled[uuidOf(l.Token)+name] > 0:
					c.fail("%+v: it was settled", l)
				}
			}
		}))
	}

	// Nothing has leaked.
	for what, query := range map[string]string{
		"holds whose time is over are left": `SELECT count(*) FROM ratelimit.holds WHERE state = 'held' AND until < 'infinity'`,
		"slots are in use that no hold has": `SELECT count(*) FROM ratelimit.limits AS l WHERE name LIKE 'held %' AND name <> 'held budget' AND -value <> (SELECT coalesce(sum(count), 0) FROM ratelimit.holds AS h WHERE h.name = l.name AND h.key = l.key AND state = 'held')`,
		"slots in use are not of things":    `SELECT count(*) FROM ratelimit.limits WHERE name IN ('held slots', 'held in all') AND value <> 0`,
	} {
		var n int
		if err := s.admin.QueryRow(s.Context(), query).Scan(&n); err != nil || n != 0 {
			c.fail("%d %s: %v", n, what, err)
		}
	}
	table, err := s.admin.Query(s.Context(), "SELECT name, key, value FROM ratelimit.limits WHERE name LIKE 'held %'")
	noError(c, err)
	var there float64
	_, err = pgx.ForEachRow(table, []any{&name, &key, &there}, func() error {
		if values[limit{name, key}] != there {
			c.fail("%s of %s has %v, and its changes lead to %v", name, key, there, values[limit{name, key}])
		}
		return nil
	})
	noError(c, err)
	wants := []string{
		"changes of holds: granted", "changes of holds: settled", "changes of holds: released", "changes of holds: lapsed", "changes of holds: counted once",
		"holds: hold, denied, quota", "holds: hold, denied, held", "holds: settle, lost", "holds: settle, repeated", "holds: once, repeated", "holds: during, committed",
		"holds: ratelimit.hold_many, committed", "holds: ratelimit.release_many, committed",
	}
	if *duration >= time.Minute {
		wants = append(wants, "changes of holds: extended", "changes of holds: settled late", "holds: hold, denied, settled", "holds: ratelimit.hold_many, denied")
	}
	for _, want := range wants {
		if c.counts[want] == 0 {
			c.Errorf("it never happened: %s", want)
		}
	}
}

// uuidOf is the token as the database has it.
func uuidOf(token string) string {
	if !strings.HasPrefix(token, "~") {
		return ""
	}
	u := token[1:33]
	return strings.Join([]string{u[:8], u[8:12], u[12:16], u[16:20], u[20:]}, "-")
}

// readHeld reads what a process was told. A killed process may have left half a line.
func readHeld(file string, each func(heldLine)) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for d := json.NewDecoder(bufio.NewReader(f)); ; {
		var l heldLine
		switch err := d.Decode(&l); {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", file, err)
		}
		each(l)
	}
}
