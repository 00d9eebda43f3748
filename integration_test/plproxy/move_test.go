package plproxy_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// keyOn returns a key of a server.
func keyOn(t *testing.T, db *pgxpool.Pool, server int) string {
	t.Helper()
	for i := range 10_000 {
		key := fmt.Sprint("k", i)
		if _, s := slotOf(t, db, key); s == server {
			return key
		}
	}
	t.Fatalf("no key is on server %d", server)
	return ""
}

func mustSQL(t *testing.T, url, sql string) {
	t.Helper()
	if err := execSQL(t.Context(), url, sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// TestAnUnfinishedMove has a move fail after each of its steps. Until it is finished, no other target gets the slot, nor the source again.
func TestAnUnfinishedMove(t *testing.T) {
	c := newOwn(t, 3)
	db := pool(t, c.proxy.URL(), 4)
	key := keyOn(t, db, 0)
	slot, _ := slotOf(t, db, key)
	l := &ratelimit.Limiter{}
	granted := 0
	var receipt ratelimit.Receipt
	take := func(want string) {
		t.Helper()
		result, err := l.Consume(t.Context(), db, tight.Key(key).Count(5))
		if err == nil {
			granted += 5
			receipt = result.Receipt()
		}
		if state(err) != want {
			t.Fatalf("consume: %v, want %q", err, want)
		}
	}
	move := func(server int) error {
		return execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, $2)", []int{slot}, server)
	}
	const no = "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'it fails here'; END $$; CREATE TRIGGER no BEFORE "
	take("")
	raised := scan(t, db, "SELECT ratelimit_override('tight', $1, capacity => $2)", key, 2.0*tightCapacity)
	from := 0
	for i, fails := range []struct {
		at, make string
		goes     bool // calls go on
	}{
		{c.partitions[0].URL(), no + "DELETE ON rate_limit_slots EXECUTE FUNCTION no()", true},              // leave
		{c.partitions[2].URL(), no + "INSERT ON rate_limit_slots EXECUTE FUNCTION no()", false},             // enter
		{c.proxy.URL(), no + "UPDATE ON rate_limit_moves EXECUTE FUNCTION no()", false},                     // after enter
		{c.partitions[0].URL(), no + "DELETE ON rate_limits_left FOR EACH ROW EXECUTE FUNCTION no()", true}, // forget
		{c.proxy.URL(), no + "DELETE ON rate_limit_moves FOR EACH ROW EXECUTE FUNCTION no()", true},         // after forget
	} {
		to, other := (from+1)%3, (from+2)%3
		mustSQL(t, fails.at, fails.make)
		if err := move(to); err == nil || !strings.Contains(err.Error(), "it fails here") {
			t.Fatalf("move %d: %v, want a failure", i, err)
		}
		mustSQL(t, fails.at, "DROP FUNCTION no CASCADE")
		if fails.goes {
			take("")
		} else {
			take("RL004")
			// These insert no row, so the target's guard does not see them.
			if _, err := l.Refund(t.Context(), db, receipt, tight.Key(key).Count(1)); state(err) != "RL004" {
				t.Errorf("refund: %v, want RL004", err)
			}
			if err := l.Reset(t.Context(), db, tight.Key(key)); state(err) != "RL004" {
				t.Errorf("reset: %v, want RL004", err)
			}
			if err := execSQL(t.Context(), c.proxy.URL(), "SELECT ratelimit_add($1, $2)", raised, tightCapacity); state(err) != "RL004" {
				t.Errorf("add: %v, want RL004", err)
			}
		}
		for _, server := range []int{other, from} {
			if err := move(server); state(err) != "55000" || !strings.Contains(err.Error(), fmt.Sprintf("to server %d is not finished", to)) {
				t.Errorf("move %d, then to server %d: %v, want a refusal that names server %d", i, server, err, to)
			}
		}
		if !fails.goes {
			take("RL004")
		}
		if err := move(to); err != nil {
			t.Fatalf("move %d again: %v", i, err)
		}
		from = to
		if _, server := slotOf(t, db, key); server != to {
			t.Fatalf("the slot is on server %d, want %d", server, to)
		}
		if left := balance(t, l, db, tight.Key(key)).Remaining; int(left+0.5) != tightCapacity-granted {
			t.Errorf("move %d: %v remain, after %d granted of %d", i, left, granted, tightCapacity)
		}
		for i, p := range c.partitions {
			if strays, left := strays(t, p); strays > 0 || left > 0 {
				t.Errorf("partition %d has %d rows of other slots, and %d that it has not forgotten", i, strays, left)
			}
		}
	}
	take("")
	if n := scan(t, db, "SELECT count(*) FROM rate_limit_moves"); n != 0 || granted != tightCapacity {
		t.Errorf("%d moves are unfinished, %d granted", n, granted)
	}

	// A target that is gone for good: the page's commands bring the slot back.
	gone := c.partitions[(from+1)%3]
	mustSQL(t, gone.URL(), no+"INSERT ON rate_limit_slots EXECUTE FUNCTION no()")
	if err := move((from + 1) % 3); err == nil {
		t.Fatal("a move to a server that fails succeeded")
	}
	source, proxy := bringBack(t)
	named := strings.NewReplacer("'{7}'", fmt.Sprintf("'{%d}'", slot), "slot = 7", fmt.Sprintf("slot = %d", slot), "servers[8] = 0", fmt.Sprintf("servers[%d] = %d", slot+1, from))
	mustSQL(t, c.partitions[from].URL(), named.Replace(source))
	mustSQL(t, c.proxy.URL(), named.Replace(proxy))
	if left := balance(t, l, db, tight.Key(key)).Remaining; left > 0.1 {
		t.Errorf("back at the source: %v remain", left)
	}
	if _, err := l.Consume(t.Context(), db, wide.Key(key)); err != nil {
		t.Errorf("a first use, back at the source: %v", err)
	}
}

// TestMovesAtOnce moves the same slots to two servers, from many sessions at once.
func TestMovesAtOnce(t *testing.T) {
	c := newOwn(t, 3)
	db := pool(t, c.proxy.URL(), 4)
	key := keyOn(t, db, 0)
	slot, _ := slotOf(t, db, key)
	l := &ratelimit.Limiter{}
	for i := range 5 {
		if _, err := l.Consume(t.Context(), db, tight.Key(key).Count(5)); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for j := range 6 {
			all.Go(func() {
				err := execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, $2)", []int{slot}, j%3)
				if err != nil && state(err) != "55000" {
					t.Errorf("round %d, to server %d: %v", i, j%3, err)
				}
			})
		}
		all.Wait()
		if n := scan(t, db, "SELECT count(*) FROM rate_limit_moves"); n != 0 {
			t.Errorf("round %d: %d moves are unfinished", i, n)
		}
		if left := balance(t, l, db, tight.Key(key)).Remaining; int(left+0.5) != tightCapacity-5*(i+1) {
			t.Errorf("round %d: %v remain", i, left)
		}
	}
	for i, p := range c.partitions {
		if strays, left := strays(t, p); strays > 0 || left > 0 {
			t.Errorf("partition %d has %d rows of other slots, and %d that it has not forgotten", i, strays, left)
		}
	}
}

// TestAMoveNeedsReadCommitted: in an older snapshot, a source would leave behind what calls have just committed.
func TestAMoveNeedsReadCommitted(t *testing.T) {
	c := newOwn(t, 2)
	db := pool(t, c.proxy.URL(), 4)
	key := keyOn(t, db, 0)
	slot, _ := slotOf(t, db, key)
	for _, p := range []string{c.proxy.URL(), c.partitions[0].URL(), c.partitions[1].URL()} {
		mustSQL(t, p, "ALTER DATABASE postgres SET default_transaction_isolation = 'repeatable read'")
		if err := execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, 1)", []int{slot}); state(err) != "RL003" {
			t.Errorf("%v, want RL003", err)
		}
		mustSQL(t, p, "ALTER DATABASE postgres RESET default_transaction_isolation")
	}
	if err := execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, 1)", []int{slot}); err != nil {
		t.Error(err)
	}
}

// bringBack returns the commands of docs/plproxy.md for the source and for the proxy, when a target is gone for good.
func bringBack(t *testing.T) (source, proxy string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/plproxy.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```sql\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 2 {
		t.Fatalf("the page has %d blocks of SQL", len(blocks))
	}
	return blocks[0][1], blocks[1][1]
}

// What cannot be meant is refused before anything is changed.
func TestMovesAndServersThatCannotBeMeant(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 1)
	for _, statement := range []string{
		"CALL ratelimit_move_slots('{256}', 0)", "CALL ratelimit_move_slots('{-1}', 0)", "CALL ratelimit_move_slots('{}', 0)", "CALL ratelimit_move_slots(NULL, 0)",
		"CALL ratelimit_move_slots('{1,NULL}', 0)", "CALL ratelimit_move_slots('{1}', 99)", "CALL ratelimit_move_slots('{1}', NULL)",
		"SELECT ratelimit_add_servers('{}')", "SELECT ratelimit_add_servers(NULL)", "SELECT ratelimit_add_servers('{NULL}')",
		// Every role can read the options of a foreign server, in which these would be.
		"SELECT ratelimit_add_servers(ARRAY['host=10.0.0.1 password=secret'])", "SELECT ratelimit_add_servers(ARRAY['host=10.0.0.1', 'password = ''secret'' host=10.0.0.2'])",
		"SELECT ratelimit_add_servers(ARRAY['host=''10.0.0.1''password=secret'])", "SELECT ratelimit_add_servers(ARRAY['host=10.0.0.1 sslpassword=secret'])",
		"SELECT ratelimit_add_servers(ARRAY['scram_client_key=secret'])", "SELECT ratelimit_add_servers(ARRAY['postgres://u:secret@10.0.0.1/limits'])",
	} {
		if _, err := db.Exec(t.Context(), statement); state(err) != "22023" || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want 22023", statement, err)
		}
	}
}
