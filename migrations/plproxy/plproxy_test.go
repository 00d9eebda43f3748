package plproxy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/migrations/plproxy"
)

var (
	created  = regexp.MustCompile(`CREATE OR REPLACE (?:FUNCTION|PROCEDURE) /\* TEMPLATE: schema \*/(\w+)`)
	replaced = regexp.MustCompile(`(?m)^        \('(\w+)', '(?:plproxy|plpgsql)', (?:\$\$|no_holds)`)
	ofEngine = regexp.MustCompile(`(?s)CREATE OR REPLACE FUNCTION /\* TEMPLATE: schema \*/(\w+)\(.*?(?:AS \$body\$(.*?)\$body\$;|\bRETURN (.*?);\n)`)
	theTable = regexp.MustCompile(`\b(?:FROM|JOIN|UPDATE|INTO) /\* TEMPLATE: schema \*/rate_limits\b`)
	comment  = regexp.MustCompile(`(?m)--.*$`)
	slotOf   = regexp.MustCompile(`(?s)CREATE OR REPLACE FUNCTION /\* TEMPLATE: schema \*/_plproxy_slot\(.*?;\n`)
)

// refused are functions that read rate_limits and that a proxy has as they are: they are an error there (0A000). They list names and keys in
// order, for the tool and the page, which read the table, too.
// The last four are of holds.
var refused = []string{
	"_ratelimit_stored_keys", "_ratelimit_stored_names",
	"_ratelimit_lock", "_ratelimit_reclaim", "_ratelimit_slots", "_ratelimit_sweep_key",
}

// byOthers read no row by themselves. They take tokens by other functions, in a subtransaction: what was taken on a partition would stay. So
// a proxy refuses to hold, and has the partition decide each.
var byOthers = []string{"_ratelimit_hold", "_ratelimit_each"}

// TestTheProxyReplacesWhatReadsTheTable: each function of the engine that reads or writes rate_limits has a body for a proxy. The rest of it
// is the engine's, so nothing of the engine is written twice.
func TestTheProxyReplacesWhatReadsTheTable(t *testing.T) {
	files, err := filepath.Glob("../engine/*.sql")
	if err != nil || len(files) < 20 {
		t.Fatal(files, err)
	}
	want := slices.Concat(refused, byOthers)
	functions := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range ofEngine.FindAllStringSubmatch(comment.ReplaceAllString(string(text), ""), -1) {
			functions++
			if theTable.MatchString(f[2]+f[3]) && !slices.Contains(want, f[1]) {
				want = append(want, f[1])
			}
		}
	}
	if functions < 80 {
		t.Errorf("only %d functions of the engine were read", functions)
	}
	got := slices.Clone(refused)
	for _, f := range replaced.FindAllStringSubmatch(plproxy.Proxy, -1) {
		got = append(got, f[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if want = slices.Compact(want); !slices.Equal(got, want) {
		t.Errorf("the proxy replaces, or refuses\n%s\nof the engine, want\n%s", strings.Join(got, " "), strings.Join(want, " "))
	}
}

// TestNamesOfTheirOwn: what is not the engine's is called _plproxy_..., but for what an operator calls.
func TestNamesOfTheirOwn(t *testing.T) {
	forOperators := []string{"ratelimit_add_servers", "ratelimit_move_slots"}
	for file, text := range map[string]string{"proxy.sql": plproxy.Proxy, "partition.sql": plproxy.Partition} {
		found := created.FindAllStringSubmatch(text, -1)
		if len(found) < 5 {
			t.Errorf("%s: %d functions", file, len(found))
		}
		for _, f := range found {
			if !strings.HasPrefix(f[1], "_plproxy_") && !slices.Contains(forOperators, f[1]) {
				t.Errorf("%s: %s", file, f[1])
			}
		}
	}
}

// TestSlotsAreTheSame: a key's slot is worked out on the proxy, which routes, and on a partition, which refuses.
func TestSlotsAreTheSame(t *testing.T) {
	proxy, partition := slotOf.FindString(plproxy.Proxy), slotOf.FindString(plproxy.Partition)
	if proxy == "" || proxy != partition {
		t.Errorf("proxy.sql:\n%s\npartition.sql:\n%s", proxy, partition)
	}
}
