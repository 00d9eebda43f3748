package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// step is an event at an instant, and what is sent then.
//
//	x: a b                a call x for the keys a and b arrives; x@1: has another clock; 1..9: are nine calls, each for a key of its own
//	x leaves              its caller no longer waits: "was sent" if its statement is at the database, "stays" if it is too late
//	x back                its statement has decided x, and so all its calls
//	x back but y z        its statement has not decided y and z: they get a second one
//	x timed out, x fails 23514, x is unreachable
//	x is given up         the same, because its context has ended: that of a call by itself, or of a statement that nobody waits for
//	ask                   time goes by
//
// What is sent: "x" is a call by itself, and "[y z]" a statement of queued calls; both may be apart. "fail y z" returns to these
// calls the error of their statement. "cancel" ends a statement that nobody waits for. "wait 2ms" makes a place ask again
// then. A place asks for its next statement at once or, after an event with "...", at the next event.
type step struct {
	at    time.Duration
	event string
	sent  string
}

const ms = time.Millisecond

func TestTheScheduleSendsWhatItShould(t *testing.T) {
	t.Parallel()
	for story, steps := range map[string][]step{
		"a lone call goes straight through": {
			{0, "x: a", "x"},
			{0, "x back", ""},
			{0, "y: a", "y"},
		},
		"calls that wait share a statement, in order of arrival": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c1: c", ""},
			{0, "d: d", ""},
			{0, "c2: c", ""},
			{0, "x back", "[c1 d c2]"},
			{0, "e: e", ""},
			{0, "d back", "[e]"},
		},
		"a key is in one statement at a time, and other keys have the second place": {
			{0, "x: locked", "x"},
			{0, "y: locked", ""},
			{0, "a: a", "[a]"},
			{0, "z: locked", ""},
			{0, "b: b", ""},
			{0, "a back", "[b]"},
			{0, "b back", ""},
			{0, "c: c", "[c]"},
			{0, "x back", "[y z]"},
		},
		"callers that are told and ask again at once share the next statement": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c1: c", ""},
			{0, "d1: d", ""},
			{0, "x back", "[c1 d1]"},
			{0, "y back", ""},
			{0, "c1 back ...", ""},
			{0, "d2: d ...", ""},
			{0, "c2: c", "[d2 c2]"},
		},
		"calls at different instants share no statement": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c@1: c", ""},
			{0, "d@1: d", ""},
			{0, "e@2: e", ""},
			{0, "f@1: f", ""},
			{0, "x back", "[c d]"},
			{0, "y back", "[e]"},
			{0, "c back", "[f]"},
		},
		"a call for two keys is not overtaken": {
			{0, "x: a", "x"},
			{0, "both: a b", ""},
			{0, "b1: b", ""},
			{0, "b2: b", ""},
			{0, "c: c", "[c]"},
			{0, "x back", "[both b1 b2]"},
		},

		"a call that leaves holds nobody up": {
			{0, "x: a", "x"},
			{0, "both: a b", ""},
			{0, "b1: b", ""},
			{0, "b2: b", ""},
			{0, "both leaves", "[b1 b2]"},
		},
		"a call that leaves the queue takes nothing": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c: c", ""},
			{0, "d: d", ""},
			{0, "c leaves", ""},
			{0, "x back", "[d]"},
		},
		"the last caller that leaves cancels the statement, and blames no key": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c1: c", ""},
			{0, "d: d", ""},
			{0, "x back", "[c1 d]"},
			{0, "c1 leaves", "was sent"},
			{0, "d leaves", "was sent, cancel"},
			{0, "d timed out", ""},
			{0, "c2: c", "c2"},
		},
		"a decided call does not leave": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c: c", ""},
			{0, "x back", "[c]"},
			{0, "c back ...", ""},
			{0, "c leaves", "stays"},
		},
		"a call that may be sent by itself does not leave": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c: c", ""},
			{0, "d: d", ""},
			{0, "x back", "[c d]"},
			{0, "c fails 23514", "c"},
			{0, "c leaves", "stays"},
		},

		"some calls are decided: the others can still leave, and only their keys are at the database": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "c: c", ""},
			{0, "d: d", ""},
			{0, "e: e", ""},
			{0, "x back", "[c d e]"},
			{0, "y back", ""},
			{0, "c leaves", "was sent"},
			{0, "d2: d", ""},
			{0, "d back but c e", "[d2]"},
			{0, "e2: e", ""},
			{0, "e leaves", "was sent, cancel"},
			{0, "e is given up", "[e2]"},
		},

		"a refused statement: each call is sent by itself, and keeps its place": {
			{0, "x: a", "x"},
			{0, "y: b", "y"},
			{0, "both: c d", ""},
			{0, "e: e", ""},
			{0, "f: f", ""},
			{0, "x back", "[both e f]"},
			{0, "f leaves", "was sent"},
			{0, "g: g", ""},
			{0, "e fails 23514", "e"}, // a call for one key first
			{0, "y back", "both"},
			{0, "both fails 23514", "[g]"},
			{0, "e back", ""},
		},

		"a locked key: only its calls fail, and until it is decided, its calls are apart": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "a1: a", ""},
			{0, "b: b", ""},
			{0, "c: c", ""},
			{0, "a2: a", ""},
			{0, "x back", "[a1 b c a2]"},
			{0, "a1 timed out", "[a1 a2] apart"},
			{0, "y back", ""},
			{0, "d: d", "[d]"},
			{0, "a1 timed out", "[b] apart, fail a1 a2"},
			{0, "b back", "[c] apart"},
			{0, "c back", ""},
			{0, "a3: a", "[a3] apart"},
			{0, "d back", ""},
			{0, "a4: a", ""},
			{0, "e: e", "[e]"},
			{0, "a3 back", "[a4]"},
			{0, "a4 back", ""},
			{0, "a5: a", "a5"},
		},
		"a key that timed out alone": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "a1: a", ""},
			{0, "a2: a", ""},
			{0, "x back", "[a1 a2]"},
			{0, "a1 timed out", "fail a1 a2"},
			{0, "a3: a", "[a3] apart"},
			{0, "a3 back", ""},
			{0, "y timed out", ""},
			{0, "y2: y", "[y2] apart"},
		},
		"a key whose statement the server cancels": {
			{0, "x: x", "x"},
			{0, "a1: a", "a1"},
			{0, "a1 fails 57014", ""},
			{0, "a2: a", "[a2] apart"},
		},
		"locked keys have one place, and take turns": {
			{0, "a1: a", "a1"},
			{0, "b1: b", "b1"},
			{0, "a1 timed out", ""},
			{0, "b1 timed out", ""},
			{0, "a2: a", "[a2] apart"},
			{0, "b2: b", ""},
			{0, "c: c", "[c]"},
			{0, "d: d", ""},
			{0, "c back", "[d]"},
			{0, "a2 timed out", "[b2] apart, fail a2"},
		},
		"a second try is not overtaken": {
			{0, "x: x", "x"},
			{0, "old1: old", "old1"},
			{0, "old1 timed out", ""},
			{0, "old2: old", "[old2] apart"},
			{0, "a1: a", ""},
			{0, "b: b", ""},
			{0, "x back", "[a1 b]"},
			{0, "a1 timed out", ""},
			{0, "a2: a", ""},
			{0, "c: c", "[c]"},
			{0, "old2 back", "[a1 a2] apart"},
		},
		"a call that gives up a locked key blames nobody": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "a1: a", ""},
			{0, "b: b", ""},
			{0, "x back", "[a1 b]"},
			{0, "a1 timed out", "[a1] apart"},
			{0, "a1 leaves", "was sent, cancel"},
			{0, "a1 is unreachable", "[b] apart"}, // pgx's error has no SQLSTATE
			{0, "b back", ""},
			{0, "a2: a", "a2"},
			{0, "a2 is given up", ""},
			{0, "a3: a", "a3"},
		},
		"a call apart that is refused is sent by itself, apart": {
			{0, "x: x", "x"},
			{0, "a1: a", "a1"},
			{0, "a1 timed out", ""},
			{0, "a2: a", "[a2] apart"},
			{0, "a2 fails P0001", "a2 apart"},
			{0, "a3: a", ""},
			{0, "a2 timed out", "[a3] apart"},
			{0, "a3 fails P0001", "a3 apart"},
			{0, "a3 back", ""},
			{0, "a4: a", "a4"},
		},

		"a locked table: after eight keys, the calls fail without a try": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "1..10:", ""},
			{0, "x back", "[1 2 3 4 5 6 7 8 9 10]"},
			{0, "1 timed out", "[1] apart"},
			{0, "1 timed out", "[2] apart, fail 1"},
			{0, "2 timed out", "[3] apart, fail 2"},
			{0, "3 timed out", "[4] apart, fail 3"},
			{0, "4 timed out", "[5] apart, fail 4"},
			{0, "5 timed out", "[6] apart, fail 5"},
			{0, "6 timed out", "[7] apart, fail 6"},
			{0, "7 timed out", "[8] apart, fail 7"},
			{0, "8 timed out", "fail 8 9 10"},
		},
		"failures of before fail nobody": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "1..7:", ""},
			{0, "x back", "[1 2 3 4 5 6 7]"},
			{0, "1 timed out", "[1] apart"},
			{0, "1 timed out", "[2] apart, fail 1"},
			{0, "2 timed out", "[3] apart, fail 2"},
			{0, "3 timed out", "[4] apart, fail 3"},
			{0, "4 timed out", "[5] apart, fail 4"},
			{0, "5 timed out", "[6] apart, fail 5"},
			{0, "6 timed out", "[7] apart, fail 6"},
			{0, "7 timed out", "fail 7"},
			{0, "z: z", "z"},
			{0, "8..9:", ""},
			{0, "y back", "[8 9]"},
			{0, "8 timed out", "[8] apart"},
			{0, "8 timed out", "[9] apart, fail 8"},
		},
		"a key that fails again and again fails no other": slices.Concat(
			[]step{{0, "x: x", "x"}, {0, "a: a", "a"}, {0, "a timed out", ""}},
			slices.Repeat([]step{{0, "a: a", "[a] apart"}, {0, "a timed out", "fail a"}}, 7),
			[]step{
				{0, "a: a", "[a] apart"},
				{0, "1..2:", ""},
				{0, "x back", "[1 2]"},
				{0, "1 timed out", ""},
				{0, "a timed out", "[1] apart, fail a"},
			}),
		"no connection: the calls fail without a try": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "1..3:", ""},
			{0, "x back", "[1 2 3]"},
			{0, "1 timed out", "[1] apart"},
			{0, "1 is unreachable", "fail 1 2 3"},
		},

		"a locked user fails nobody else of the team": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "a1: team a", ""},
			{0, "a2: team a", ""},
			{0, "b: team b", ""},
			{0, "c: team c", ""},
			{0, "d: team d", ""},
			{0, "x back", "[a1 a2 b c d]"},
			{0, "a1 timed out", "[a1] apart"},
			{0, "a1 timed out", "[a2] apart, fail a1"},
			{0, "a2 timed out", "[b c d] apart, fail a2"},
			{0, "b timed out", "[b] apart"},
			{0, "b timed out", "[c] apart, fail b"},
			{0, "c back", "[d] apart"},
			{0, "d back", ""},
		},
		"a locked team: after four calls, the others fail without a try": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "a: team a", ""},
			{0, "b: team b", ""},
			{0, "c: team c", ""},
			{0, "d: team d", ""},
			{0, "e: team e", ""},
			{0, "f: f", ""},
			{0, "x back", "[a b c d e f]"},
			{0, "a timed out", "[f] apart"},
			{0, "f back", "[a] apart"},
			{0, "a timed out", "[b c d e] apart, fail a"},
			{0, "b timed out", "[b] apart"},
			{0, "b timed out", "[c] apart, fail b"},
			{0, "c timed out", "[d] apart, fail c"},
			{0, "d timed out", "fail d e"},
		},
		"a locked team: a call that was not apart with the others has a try": {
			{0, "x: x", "x"},
			{0, "y: y", "y"},
			{0, "f: f", ""},
			{0, "a: team a", ""},
			{0, "b: team b", ""},
			{0, "c: team c", ""},
			{0, "d: team d", ""},
			{0, "g: team f", ""},
			{0, "x back", "[f a b c d g]"},
			{0, "f timed out", "[f] apart"},
			{0, "f timed out", "[a] apart, fail f"},
			{0, "a timed out", "[b c d] apart, fail a"}, // g's keys are both blamed
			{0, "b timed out", "[b] apart"},
			{0, "b timed out", "[c] apart, fail b"},
			{0, "c timed out", "[g] apart, fail c d"},
			{0, "g back", ""},
		},
		"a team is decided, with several users: it is no longer blamed": {
			{0, "x: x", "x"},
			{0, "t1: team", "t1"},
			{0, "t1 timed out", ""},
			{0, "z1: z", "z1"},
			{0, "z1 timed out", ""},
			{0, "z2: z", "[z2] apart"},
			{0, "p: team p", ""},
			{0, "q: team q", ""},
			{0, "z2 back", "[p q] apart"},
			{0, "p back", ""},
			{0, "t2: team", "t2"},
		},
	} {
		t.Run(story, func(t *testing.T) {
			t.Parallel()
			newPlay(t, 0).play(steps)
		})
	}
}

func TestTheScheduleKeepsThePace(t *testing.T) {
	t.Parallel()
	for story, steps := range map[string][]step{
		"calls share a statement when it is due": {
			{0, "x: a", "x"},
			{1 * ms, "x back", ""},
			{2 * ms, "a1: a", "wait 98ms"},
			{3 * ms, "a1 leaves", ""},
			{4 * ms, "a2: a", "wait 96ms"},
			{5 * ms, "b: b", ""},
			{100 * ms, "ask", "[a2 b]"},
			{110 * ms, "c: c", "wait 90ms"},
			{150 * ms, "a2 back", "wait 50ms"},
			{200 * ms, "ask", "[c]"},
			{210 * ms, "c back", ""},
			{500 * ms, "d: d", "d"},
		},
		"both places keep it": {
			{0, "x: x", "x"},
			{0, "x back", ""},
			{0, "locked@1: locked", "wait 100ms"},
			{0, "free: free", "wait 100ms"},
			{100 * ms, "ask", "[locked], wait 100ms"},
			{200 * ms, "ask", "[free]"},
		},
		"a place that finds no call takes no turn": {
			{0, "x: a", "x"},
			{150 * ms, "both: a b", ""},
			{150 * ms, "b: b", ""},
			{151 * ms, "c: c", "[c]"},
		},
		"calls that are tried again do not wait": {
			{0, "x: x", "x"},
			{0, "a: a", "wait 100ms"},
			{0, "b: b", ""},
			{0, "c: c", ""},
			{100 * ms, "ask", "[a b c]"},
			{101 * ms, "a timed out", "[a] apart"},
			{102 * ms, "a back", "[b] apart"},
			{102 * ms, "b fails 23514", "b"},
		},
	} {
		t.Run(story, func(t *testing.T) {
			t.Parallel()
			newPlay(t, 100*ms).play(steps)
		})
	}
}

// Some errors may be due to some calls of a statement, which are then sent by themselves. Others are the error of all.
func TestTheScheduleTellsTheErrorsOfSomeCallsFromThoseOfAll(t *testing.T) {
	t.Parallel()
	for state, sent := range map[string]string{
		stateSharded: "c", stateForeign: "c", "22P05": "c", "23514": "c", "P0001": "c", "AB123": "c", "40P01": "c", "0A000": "c", "42501": "c",
		stateIsolation: "fail c d", "08006": "fail c d", "25006": "fail c d", "40003": "fail c d", "42P01": "fail c d", "53300": "fail c d", "57P01": "fail c d",
	} {
		newPlay(t, 0).play([]step{
			{0, "x: x", "x"}, {0, "y: y", "y"}, {0, "c: c", ""}, {0, "d: d", ""}, {0, "x back", "[c d]"},
			{0, "c fails " + state, sent},
		})
	}
}

func TestTheScheduleBoundsAStatement(t *testing.T) {
	t.Parallel()
	p := newPlay(t, 0)
	p.play([]step{{0, "x: x", "x"}, {0, "y: y", "y"}, {0, "1..1030:", ""}})
	if sent := p.event(step{0, "x back", ""}); len(strings.Fields(sent)) != maxBatch {
		t.Errorf("%s, want %d calls", sent, maxBatch)
	}
}

func TestTheScheduleForgetsBlamedKeys(t *testing.T) {
	t.Parallel()
	p := newPlay(t, 0)
	for i := range maxBlamed + 2 {
		key := fmt.Sprint(i)
		p.arrive(key, []string{key})
		p.back(p.calls[key], "timed out")
		p.places = nil
	}
	if len(p.s.blamed) != 1 {
		t.Errorf("%d keys are blamed, want only the last", len(p.s.blamed))
	}
}

// Random events, of which many happen at once. In the end, all calls are answered, and nothing is left behind.
func TestTheScheduleAnswersEveryCall(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 0))
		p := newPlay(t, time.Duration(r.IntN(2))*ms)
		var events []string
		for at := time.Duration(0); (len(events) < 200 || len(p.places) > 0) && len(events) < 5000 && !t.Failed(); at += time.Duration(r.IntN(500)) * time.Microsecond {
			event := p.random(r, len(events), len(events) < 200)
			if r.IntN(4) == 0 {
				event += " ..."
			}
			events = append(events, fmt.Sprintf("%v %s: %s", at, event, p.event(step{at, event, ""})))
		}
		if open := p.open(); len(open) > 0 || len(p.places) > 0 || len(p.s.queue) > 0 || len(p.s.busy) > 0 || p.s.apartFlying || t.Failed() {
			t.Fatalf("seed %d: after %d events, these calls are not answered: %v\n%+v\n%s", seed, len(events), open, p.s, strings.Join(events, "\n"))
		}
	}
}

// random is an event that may happen now. i is its number.
func (p *play) random(r *rand.Rand, i int, arrive bool) string {
	n := r.IntN(10)
	if n < 5 && arrive {
		keys := []string{"a", "b", "c", "d", "e"}
		r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		return fmt.Sprintf("%d@%d: %s", i, r.IntN(8)/7, strings.Join(keys[:1+r.IntN(8)/7], " "))
	}
	if waiting := slices.DeleteFunc(p.open(), func(name string) bool { return p.calls[name].waiter == nil }); n < 6 && len(waiting) > 0 {
		return waiting[r.IntN(len(waiting))] + " leaves"
	}
	if len(p.places) == 0 {
		return "ask"
	}
	pl := p.places[r.IntN(len(p.places))]
	what := []string{" back", " back", " back", " timed out", " timed out", " is given up", " fails 23514", " fails 57P01", " is unreachable"}[r.IntN(9)]
	switch {
	case pl.alone != nil:
		return pl.alone.name + what
	case !pl.flying:
		return "ask"
	}
	if what == " is given up" && !pl.over {
		what = " fails 57014"
	}
	var names []string
	for _, w := range pl.b.waiters {
		names = append(names, p.of(w).name)
	}
	if others := names[1+r.IntN(len(names)):]; what == " back" && len(others) > 0 {
		what += " but " + strings.Join(others, " ")
	}
	return names[0] + what
}

// open has the names of the calls that are not answered.
func (p *play) open() (names []string) {
	for name, c := range p.calls {
		if !c.answered {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (p *play) play(steps []step) {
	for i, s := range steps {
		if sent := p.event(s); sent != s.sent {
			p.t.Fatalf("step %d, at %v: %s: %q, want %q", i+1, s.at, s.event, sent, s.sent)
		}
	}
}

// play plays events on a schedule, as the Coalescer's goroutines would.
type play struct {
	t      *testing.T
	s      schedule
	pace   time.Duration
	now    time.Time
	step   string // the present event, for errors
	calls  map[string]*played
	places []*place
	sent   []string // by the present event
	failed []string
}

func newPlay(t *testing.T, pace time.Duration) *play {
	return &play{t: t, pace: pace, calls: map[string]*played{}}
}

// played is a call.
type played struct {
	name     string
	ds       []demand
	waiter   *waiter // nil: it did not wait
	answered bool
	gone     bool // and its caller has read the answer
}

// place is a place in use.
type place struct {
	alone  *played   // the call that is sent by itself
	b      *batch    // or else, the statement
	flying bool      // it is at the database
	over   bool      // it is canceled
	asks   time.Time // when the place asks for a statement, if it has none
	waits  *waiter   // it has asked, and waits for the pace to send this call
}

// event plays an event, checks what is true after each, and returns what was sent.
func (p *play) event(s step) string {
	p.now, p.step, p.sent, p.failed = time.Unix(0, 0).Add(s.at), fmt.Sprintf("at %v: %s", s.at, s.event), nil, nil
	event, later := strings.CutSuffix(s.event, " ...")
	name, what, _ := strings.Cut(event, " ")
	switch name, arrives := strings.CutSuffix(name, ":"); {
	case event == "ask":
	case arrives:
		p.arrive(name, strings.Fields(what))
	case what == "leaves":
		p.leave(p.call(name))
	default:
		p.back(p.call(name), what)
	}
	p.do()
	for i := 0; i < len(p.places) && !later; i++ { // more places may start meanwhile
		if pl := p.places[i]; pl.b != nil && !pl.flying && !pl.asks.After(p.now) {
			p.ask(pl)
			p.do()
		}
	}
	p.places = slices.DeleteFunc(p.places, func(pl *place) bool { return pl.b == nil && pl.alone == nil })
	for _, c := range p.calls {
		c.gone = c.answered && !later
	}
	p.check()
	if p.failed != nil {
		p.sent = append(p.sent, "fail "+strings.Join(p.failed, " "))
	}
	return strings.Join(p.sent, ", ")
}

// call is the call with a name.
func (p *play) call(name string) *played {
	c, found := p.calls[name]
	if !found {
		p.t.Fatalf("%s: there is no call %q", p.step, name)
	}
	return c
}

func (p *play) arrive(name string, keys []string) {
	if from, to, several := strings.Cut(name, ".."); several {
		for i := number(from); i <= number(to); i++ {
			p.arrive(fmt.Sprint(i), []string{fmt.Sprint(i)})
			p.do()
		}
		return
	}
	name, clock, _ := strings.Cut(name, "@")
	if c := p.calls[name]; c != nil && !c.answered {
		p.t.Fatalf("%s: there is a call %s, which is not answered", p.step, name)
	}
	var requests []Request
	for _, key := range keys {
		requests = append(requests, TokenBucket("limit", 1, time.Second).Key(key))
	}
	asked, err := new(Limiter).newCall(verbConsume, about{}, requests, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	c := &played{name: name, ds: asked.demands}
	c.waiter = p.s.arrive(c.ds, pgtype.Timestamptz{Time: time.Unix(int64(number(clock)), 0), Valid: clock != ""}, false, p.now, p.pace)
	if p.calls[name] = c; c.waiter == nil {
		p.places = append(p.places, &place{alone: c})
		p.sent = append(p.sent, name)
	}
}

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

func (p *play) leave(c *played) {
	if c.waiter == nil || c.gone {
		p.t.Fatalf("%s: %s does not wait", p.step, c.name)
	}
	switch left, sent := p.s.leave(c.waiter); {
	case !left:
		p.sent = append(p.sent, "stays")
	case sent:
		p.sent = append(p.sent, "was sent")
		p.answer(c)
	default:
		p.answer(c)
	}
}

var outcomes = map[string]error{
	"back": nil, "timed out": &pgconn.PgError{Code: "55P03"}, "is given up": &pgconn.PgError{Code: "57014"}, "is unreachable": errors.New("no route to host"),
}

// back ends the statement of a call.
func (p *play) back(c *played, what string) {
	what, others, _ := strings.Cut(what, " but ")
	err, known := outcomes[what]
	if code, fails := strings.CutPrefix(what, "fails "); fails {
		err, known = &pgconn.PgError{Code: code}, true
	}
	at := slices.IndexFunc(p.places, func(pl *place) bool {
		return pl.alone == c || pl.flying && c.waiter != nil && pl.b.flight == c.waiter.flight
	})
	if at < 0 || !known {
		p.t.Fatalf("%s: %s is not at the database, or this is no event", p.step, c.name)
	}
	pl, ended := p.places[at], what == "is given up"
	switch {
	case pl.alone != nil:
		pl.alone = nil
		p.answer(c)
		p.s.landedAlone(c.ds, c.waiter != nil && c.waiter.apart, ended, err)
	case ended && !pl.over:
		p.t.Fatalf("%s: callers wait for the statement of %s", p.step, c.name)
	case others != "": // as Coalescer.split does it
		var left []*waiter
		for name := range strings.FieldsSeq(others) {
			left = append(left, p.call(name).waiter)
		}
		pl.b.waiters = slices.DeleteFunc(pl.b.waiters, func(w *waiter) bool { return slices.Contains(left, w) })
		flight := p.landed(pl.b, err, left)
		pl.b.waiters, pl.b.flight, pl.over = append(pl.b.waiters, left...), flight, false
	default: // as Coalescer.flush does it
		p.landed(pl.b, err, nil)
		pl.flying, pl.asks, pl.waits = false, p.now, nil
	}
}

func (p *play) landed(b *batch, err error, others []*waiter) *flight {
	again, flight := p.s.landed(b, err, others)
	if again {
		b.clear()
		return nil
	}
	if b.flight.waiting != callersOf(b) {
		p.t.Errorf("%d callers are told, want %d", b.flight.waiting, callersOf(b))
	}
	for _, w := range b.waiters {
		if c := p.of(w); !w.left {
			p.answer(c)
			if err != nil {
				p.failed = append(p.failed, c.name)
			}
		}
	}
	b.clear()
	return flight
}

func (p *play) answer(c *played) {
	if c.answered {
		p.t.Errorf("%s is answered twice", c.name)
	}
	c.answered = true
}

func (p *play) of(w *waiter) *played {
	for _, c := range p.calls {
		if c.waiter == w {
			return c
		}
	}
	return nil
}

// do does what the schedule says.
func (p *play) do() {
	if p.s.start {
		p.s.start = false
		p.places = append(p.places, &place{b: &batch{}, asks: p.now})
	}
	for _, name := range slices.SortedFunc(maps.Keys(p.calls), func(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) }) {
		c := p.calls[name]
		switch {
		case c.waiter == nil || len(c.waiter.done) == 0:
			continue
		case !c.waiter.direct:
			p.answer(c)
			p.failed = append(p.failed, name)
			if c.waiter.err == nil {
				p.t.Errorf("%s: %s fails without an error", p.step, name)
			}
		default:
			p.places = append(p.places, &place{alone: c})
			p.sent = append(p.sent, name+apartly(c.waiter.apart))
		}
		<-c.waiter.done
	}
	for _, pl := range p.places {
		if pl.flying && !pl.over && pl.b.flight.ctx.Err() != nil {
			pl.over = true
			p.sent = append(p.sent, "cancel")
		}
	}
}

func apartly(apart bool) string {
	if apart {
		return " apart"
	}
	return ""
}

// ask makes a place ask for its next statement.
func (p *play) ask(pl *place) {
	queue := slices.Clone(p.s.queue)
	send, wait := p.s.next(pl.b, p.now, p.pace)
	switch {
	case wait > 0:
		pl.asks, pl.waits = p.now.Add(wait), p.s.queue[slices.IndexFunc(p.s.queue, p.s.ready)]
		p.sent = append(p.sent, "wait "+wait.String())
		return
	case !send:
		pl.b = nil
		for _, w := range queue {
			if w.direct && !w.apart {
				p.checkOrder(queue, w)
			}
		}
		return
	}
	pl.flying, pl.over = true, false
	var names []string
	for _, w := range pl.b.waiters {
		names = append(names, p.of(w).name)
		if !pl.b.apart {
			p.checkOrder(queue, w)
		}
	}
	p.sent = append(p.sent, "["+strings.Join(names, " ")+"]"+apartly(pl.b.apart))
}

// checkOrder checks that a call that was sent from a queue overtakes no other with one of its keys. Calls that are apart may be
// overtaken.
func (p *play) checkOrder(queue []*waiter, w *waiter) {
	for _, earlier := range queue[:slices.Index(queue, w)] {
		if earlier.flight == nil && !p.s.apart(earlier) && anyOf(earlier.ds, func(d *demand) bool { return keySet{d.id(): {}}.has(w.ds) }) {
			p.t.Errorf("%s: %s overtakes %s", p.step, p.of(w).name, p.of(earlier).name)
		}
	}
}

// callersOf is how many callers wait for a statement.
func callersOf(b *batch) (n int) {
	for _, w := range b.waiters {
		if !w.left {
			n++
		}
	}
	return n
}

// check checks what is always true.
func (p *play) check() {
	p.t.Helper()
	busy, asking, aparts := keySet{}, false, 0
	var paced []*waiter
	for _, pl := range p.places {
		keys := keySet{}
		switch {
		case pl.alone != nil:
			keys.add(pl.alone.ds)
			if w := pl.alone.waiter; w != nil && w.apart {
				aparts++
			}
		case pl.flying:
			for _, w := range pl.b.waiters {
				keys.add(w.ds)
			}
			if pl.b.flight.waiting != callersOf(pl.b) {
				p.t.Errorf("a statement counts %d callers, want %d", pl.b.flight.waiting, callersOf(pl.b))
			}
			if pl.b.apart {
				aparts++
			}
		case pl.waits != nil:
			paced = append(paced, pl.waits)
		default:
			asking = true
		}
		for id := range keys {
			if _, twice := busy[id]; twice {
				p.t.Errorf("two statements have the key %s", id.key)
			}
			busy[id] = struct{}{}
		}
	}
	if len(p.places) > maxPlaces || p.s.places != len(p.places) || !asking && !maps.Equal(p.s.busy, busy) || aparts > 1 {
		p.t.Errorf("%d places, of which the schedule counts %d; at the database are %v, it says %v; %d statements are apart", len(p.places), p.s.places, busy, p.s.busy, aparts)
	}
	held := maps.Clone(p.s.claimed)
	clear(p.s.claimed)
	if first := slices.IndexFunc(p.s.queue, p.s.ready); first >= 0 && !asking && len(p.places) < maxPlaces {
		w := p.s.queue[first] // or a later one waits, too, if w waits for the pace, or did until it left
		if len(paced) == 0 || w != paced[0] && slices.Contains(p.s.queue, paced[0]) && (p.s.apart(w) || w.past == afterRefusal) {
			p.t.Errorf("%s: %s could be sent, and a place is free", p.step, p.of(w).name)
		}
	}
	p.s.claimed = held
}
