package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// One bad row keeps an operator from no command: what cannot be shown as it is is bounded or left out. Checks refuse such rows, but those
// of a table that was restored or copied may be missing.
func TestOneBadRowBlindsNoCommand(t *testing.T) {
	midnight := ratelimit.Start(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	w := newPublished(t, ratelimit.TokenBucket("signUps", 10, time.Hour), ratelimit.FixedWindow("window", 10, time.Hour, midnight), ratelimit.Slots("seats", 2))
	w.sql("SELECT ratelimit.hold('seats', 'acme', 'a', ttl => '1 hour')")
	w.sql("SELECT ratelimit.consume('signUps', 'acme'), ratelimit.consume('window', 'acme')")
	w.sql(`DO $$ DECLARE c record; BEGIN
		FOR c IN SELECT conrelid::regclass AS t, conname FROM pg_constraint WHERE contype = 'c' AND connamespace = 'ratelimit'::regnamespace
		LOOP EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.t, c.conname); END LOOP; END $$`)
	const maxInt = "9223372036854775807"
	for _, rows := range [][]string{
		{
			"INSERT INTO ratelimit.limits VALUES ('signUps', 'far', 0, 1, 1, '290000-01-01'), ('signUps', 'NaN', 0, 1, 'NaN', now()), ('signUps', 'Infinity', 0, 1, 'Infinity', now()), ('signUps', '-Infinity', 0, 1, '-Infinity', now())",
			"INSERT INTO ratelimit.limits VALUES ('signUps', 'ahead', 0, 1, 1, 'infinity'), ('signUps', 'past', 0, 2, 1, '-infinity'), ('signUps', 'past', 1, 2, 1, now()), ('window', 'ahead', 0, 1, 1, 'infinity'), ('window', '', 0, 1, 1, '-infinity')",
		},
		{
			"INSERT INTO ratelimit.usage VALUES ('signUps', 'infinity', 1, 1, 1, 1, 1, 1), ('signUps', '-infinity', 1, 1, 1, 1, 1, 1), ('signUps', '290000-01-01', 1, 1, 1, 1, 1, 1)",
			"INSERT INTO ratelimit.usage VALUES ('signUps', date_trunc('minute', now()), " + maxInt + ", " + maxInt + ", " + maxInt + ", 'NaN', 'Infinity', 1), ('signUps', date_trunc('minute', now()) - interval '1 minute', " + maxInt + ", " + maxInt + ", 1, 1, 1, 1)",
		},
		{
			"INSERT INTO ratelimit.denials VALUES ('signUps', 'infinity', 'acme', 1, 1, now()), ('signUps', '290000-01-01', 'acme', 1, 1, '290000-01-01')",
			"INSERT INTO ratelimit.denials VALUES ('signUps', date_trunc('hour', now(), 'UTC'), 'acme', " + maxInt + ", 'NaN', 'infinity'), ('signUps', date_trunc('hour', now(), 'UTC') - interval '1 hour', 'acme', " + maxInt + ", 'Infinity', '-infinity')",
		},
		{
			"INSERT INTO ratelimit.overrides (name, key, effect, rate, made_at) VALUES ('signUps', 'acme', 'numbers', 5, 'infinity'), ('signUps', NULL, 'numbers', 5, '-infinity'), ('window', 'acme', 'block', NULL, '290000-01-01')",
			"INSERT INTO ratelimit.overrides (name, key, effect, removed_at, removed_by, removed_as) VALUES ('signUps', 'acme', 'block', 'infinity', 'x', NULL), ('signUps', 'acme', 'block', '-infinity', NULL, 'x'), ('signUps', 'acme', 'block', '290000-01-01', NULL, NULL)",
			"INSERT INTO ratelimit.overrides (name, key, effect, until) VALUES ('signUps', 'b', 'block', 'infinity'), ('signUps', 'c', 'block', '-infinity'), ('signUps', 'd', 'block', '290000-01-01')",
			"INSERT INTO ratelimit.overrides (name, key, effect, reason, made_by) VALUES ('signUps', 'e', 'nonsense', repeat('x', 5000), repeat('x', 5000))",
			"INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, max_reserved, added) VALUES ('signUps', 'f', 'numbers', 'NaN', 'Infinity', '-Infinity', 'NaN')",
		},
		{
			"INSERT INTO ratelimit.definitions SELECT 'other', name, 'x', 'nonsense', 'NaN', '-1 hour', 'Infinity', 'NaN', 'infinity', -1, 'Nowhere', '-infinity', NULL, false, 'infinity' FROM ratelimit.definitions WHERE name = 'signUps'",
			"UPDATE ratelimit.definitions SET published_at = 'infinity' WHERE program <> 'other'",
			"UPDATE ratelimit.definitions SET published_at = '290000-01-01', first_at = '-infinity', alive_until = 'infinity'",
			"UPDATE ratelimit.definitions SET start = 'infinity' WHERE name = 'window'",
			"UPDATE ratelimit.definitions SET capacity = NULL",
		},
		{
			"INSERT INTO ratelimit.holds VALUES ('signUps', 'acme', 'a', 'held', 'tokens', NULL, 'NaN', 'infinity', 0, 1, 'infinity'), ('signUps', 'acme', 'b', 'held', 'x', NULL, 'Infinity', '-infinity', 0, 1, '-infinity')",
			"INSERT INTO ratelimit.holds VALUES ('signUps', 'acme', '', 'held', 'slots', gen_random_uuid(), '-Infinity', '290000-01-01', 0, 1, '290000-01-01'), ('signUps', '', repeat('x', 1000), 'held', 'slots', NULL, 1e300, now(), 0, 1, now())",
		},
	} {
		for _, row := range rows {
			w.sql(row)
		}
		for _, command := range []string{
			"limits", "limits --count", "keys signUps", "keys signUps --all", "keys signUps --denied", "keys window --all", "show signUps acme", "show signUps", "show signUps far",
			"show signUps NaN", "show signUps ahead", "show signUps past", "show window ahead", "show window", "show signUps f", "show window acme", "keys seats --all", "show seats acme", "show seats b", "show seats", "holds signUps", "holds signUps acme", "overrides", "overrides --all", "overrides signUps --all", "locks", "migrate status",
		} {
			for _, format := range [][]string{nil, {"--json"}} {
				if r := w.run(append(strings.Fields(command), format...)...); r.code != exitOK && r.code != exitNothing {
					t.Errorf("with %.150q\n%s", rows, r)
				}
			}
		}
	}
}

// A row whose ts is infinite is listed first, with what to do. The others are listed as ever.
func TestABrokenRowIsShown(t *testing.T) {
	w := newPublished(t, ratelimit.FixedWindow("window", 10, 1000*time.Hour))
	w.sql("SELECT ratelimit.consume('window', 'acme', count => 10)")
	w.sql("INSERT INTO ratelimit.limits VALUES ('window', 'bad key', 0, 1, 3, 'infinity')")
	w.run("keys", "window").wants(t, exitOK, "bad key +not known +it is reset", "acme +0 ", "by txlimit reset window 'bad key'\n")
	list := parse[keyList](t, w.run("keys", "window", "--json")).Keys
	if len(list) != 2 || list[0].Key != "bad key" || list[0].Remaining != nil || list[0].Unknown == nil || !*list[0].Denied || list[0].RetryAt != nil {
		t.Errorf("%+v", list)
	}
	w.run("show", "window", "bad key").wants(t, exitOK, "balance +not known: its row is broken", "denied +yes, until it is reset")
	if k := parse[keyDetails](t, w.run("show", "window", "bad key", "--json")); k.Unknown == nil || k.Remaining != nil || !*k.Denied {
		t.Errorf("%+v", k)
	}
	w.run("sweep").wants(t, exitOK, "window +0")
	w.run("reset", "window", "bad key", "--yes").wants(t, exitOK, "full again")
	w.sql("SELECT ratelimit.consume('window', 'bad key')")
}

// What a command prints as a key without quotes is the key: it can be copied into another command, or into SQL.
func TestPrintedKeysAreTheKeys(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 10, 1000*time.Hour))
	keys := []string{
		`CORP\ann`, `a"b`, `a\"b`, `a\\b`, `\`, `\x1b`, `\u001b[31m`, `\n`, `'`, `a'b`, "`a`", `auth0|ann`, `$(x)`, `é漢😀`, `a b`, `a,b`, `--json`, `-`, `(every key)`, `#1`,
		`"`, `""`, `"quoted"`, ` a`, "a ", "a\tb", "a\nb", "a\x1b[31m", "a\u202eb", "a\u009bb", "\u00a0", "a\u200b", "\u00e9",
	}
	for _, key := range keys {
		w.sql("SELECT ratelimit.consume('l', $1, count => 2), ratelimit.override('l', $1, capacity => 20, forever => true)", key)
		w.sql("INSERT INTO ratelimit.denials VALUES ('l', date_trunc('hour', now(), 'UTC'), $1, 1, 1, now())", key)
	}
	cell := regexp.MustCompile(`  +`)
	for _, list := range []struct {
		args   []string
		column int
	}{{[]string{"keys", "l", "--all", "--limit", "0"}, 0}, {[]string{"keys", "l", "--denied", "--limit", "0"}, 0}, {[]string{"overrides", "l", "--limit", "0"}, 2}} {
		var printed []string
		for line := range strings.Lines(w.run(list.args...).out) {
			if cells := cell.Split(strings.TrimRight(line, "\n"), -1); len(cells) > list.column+1 {
				printed = append(printed, cells[list.column])
			}
		}
		for _, key := range keys {
			quoted := key == `(every key)` && list.column == 2 || strings.HasPrefix(key, `"`) || strings.TrimSpace(key) != key || strings.ContainsFunc(key, func(r rune) bool { return !strconv.IsPrint(r) })
			want := key
			if quoted {
				want = strconv.Quote(key)
			}
			if !slices.Contains(printed, want) {
				t.Errorf("txlimit %q prints no %s in\n%s", list.args, want, strings.Join(printed, "\n"))
			}
		}
	}
	for _, key := range keys {
		r := w.run("show", "l", "--", key)
		r.wants(t, exitOK, "balance +8(\\.0*[1-9]*)? of 20")
		line, _, _ := strings.Cut(r.out[strings.Index(r.out, "\nkey ")+len("\nkey "):], "\n")
		shown := strings.TrimLeft(line, " ")
		if strings.HasPrefix(shown, `"`) {
			if text, err := strconv.Unquote(shown); err != nil || text != key {
				t.Errorf("%q is shown as %s", key, shown)
			}
			continue
		}
		w.run("show", "l", "--", shown).wants(t, exitOK, "balance +8(\\.0*[1-9]*)? of 20")
		if shown != key {
			t.Errorf("%q is shown as %s", key, shown)
		}
	}
}

// What was seen is released, and nothing that came under the same id after it.
func TestAReleaseEndsWhatWasSeen(t *testing.T) {
	w := newPublished(t, ratelimit.Slots("renders", 1))
	const hold = "SELECT ratelimit.hold('renders', 'acme', 'job', ttl => '1 hour')"
	w.sql(hold)
	asked := 0
	w.change = func(a *app) {
		a.terminal = true
		a.stdin = reads(func(p []byte) (int, error) {
			asked++
			w.sql("SELECT ratelimit.release('renders', 'acme', 'job', who => 'x')")
			w.sql(hold)
			return copy(p, "y\n"), nil
		})
	}
	w.run("release", "renders", "acme", "job").wants(t, exitNothing, "The hold job of renders acme has ended meanwhile")
	w.change = nil
	if l := parse[holdList](t, w.run("holds", "renders", "--json")); len(l.Holds) != 1 || asked != 1 {
		t.Errorf("asked %d times: %+v", asked, l)
	}
	w.run("release", "renders", "acme", "job", "--yes").wants(t, exitOK, "released job of renders acme")
	w.run("holds", "renders").wants(t, exitNothing, "Nobody holds anything")
	w.run("release", "renders", "acme", "job", "--yes", "--reason", strings.Repeat("x", maxReleaseReason+1)).wants(t, exitUsage, "--reason has 3801 bytes, more than 3800")
	w.sql(hold)
	w.run("release", "renders", "acme", "job", "--yes", "--reason", strings.Repeat("x", maxReleaseReason)).wants(t, exitOK)
	w.sql(hold)
	w.sql("UPDATE ratelimit.holds SET state = 'settled'")
	w.run("holds", "renders").wants(t, exitNothing, "Nobody holds anything")
	w.run("release", "renders", "acme", "job", "--yes").wants(t, exitNothing, "renders acme has no hold job")
}

// reads is a reader.
type reads func(p []byte) (int, error)

func (r reads) Read(p []byte) (int, error) { return r(p) }

// A reset is in the history of its key, with who did it and why, and in force nowhere.
func TestAResetIsInTheHistory(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 10, 1000*time.Hour))
	w.sql("SELECT ratelimit.consume('l', 'k', count => 9), ratelimit.consume('l', global => true)")
	w.run("reset", "l", "k", "--yes", "--reason", "their loop is mended", "--who", "bea").wants(t, exitOK, "l k is full again")
	w.run("reset", "l", "k", "--yes").wants(t, exitNothing, "it was full already")
	w.run("reset", "l", "--yes").wants(t, exitOK, "full again")
	w.run("overrides").wants(t, exitNothing, "No overrides are in force")
	w.run("overrides", "--all").wants(t, exitOK, `l +k +reset +- +bea \(as \S+\) +\S+ \S+ +their loop is mended`, `l +\(no key\) +reset +- +ann`)
	list := parse[overrideList](t, w.run("overrides", "l", "--all", "--json")).Overrides
	if len(list) != 2 || list[1].Effect != "reset" || list[1].State != "done" || list[1].MadeBy != "bea" || list[1].Until != nil || list[0].Key != nil {
		t.Errorf("%+v", list)
	}
	w.run("show", "l", "k").wants(t, exitOK, "balance +10 of 10", "reset +- +bea")
	w.run("limits").wants(t, exitOK, "l +\\S+ +token bucket.* 0 +0 +-")
	w.run("restore", "l", "k").wants(t, exitNothing, "no such override is in force")
}

// Texts that the columns do not take are mistakes of the command line: nothing is sent.
func TestLongReasonsAndNames(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 10, time.Hour))
	for _, command := range []string{"block l k --forever", "unlimited l k --forever", "override l k --rate 2 --forever", "override l --rate 2 --yes --forever"} {
		for flag, text := range map[string]string{"reason": strings.Repeat("é", 2048) + "x", "who": strings.Repeat("é", 128)} {
			w.run(append(strings.Fields(command), "--"+flag, text)...).wants(t, exitUsage, fmt.Sprintf("--%s has %d bytes, more than (4096|255)", flag, len(text)))
			w.run(append(strings.Fields(command), "--"+flag, "a\xff")...).wants(t, exitUsage, "--"+flag+" is not valid UTF-8")
		}
	}
	w.run("reset", "l", "k", "--yes", "--reason", strings.Repeat("x", 4097)).wants(t, exitUsage, "--reason has 4097 bytes, more than 4096")
	for _, command := range []string{"restore l k", "unblock l k", "restore l --yes"} {
		w.run(append(strings.Fields(command), "--who", strings.Repeat("x", 256))...).wants(t, exitUsage, "--who has 256 bytes, more than 255")
	}
	w.run("overrides", "--all").wants(t, exitNothing, "there were none")
	w.run("block", "l", "k", "--reason", strings.Repeat("é", 2048), "--who", strings.Repeat("x", 255), "--forever").wants(t, exitOK, "block for l k")
	w.run("unblock", "l", "k", "--who", strings.Repeat("x", 255)).wants(t, exitOK, "ended 1 override")
}
