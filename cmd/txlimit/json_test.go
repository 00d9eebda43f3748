package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
)

// jsonField is a field of an object, as JSON.md has it.
type jsonField struct {
	kind  string // string, number, integer, boolean, instant or an object, without [] and ?
	array bool
	null  bool // it may be
	unset bool // it may be left out
}

// documented reads the table of JSON.md: objects, which commands print or are in others, and their fields.
func documented(t *testing.T) map[string]map[string]jsonField {
	t.Helper()
	text, err := os.ReadFile("JSON.md")
	if err != nil {
		t.Fatal(err)
	}
	objects := map[string]map[string]jsonField{}
	var current []string
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(strings.ReplaceAll(cells[i], "`", ""))
		}
		if len(cells) != 4 || cells[0] == "object" || strings.HasPrefix(cells[0], "--") {
			continue
		}
		if cells[0] != "" {
			current = strings.Split(cells[0], ", ")
			for _, object := range current {
				if objects[object] == nil { // override is a command, too
					objects[object] = map[string]jsonField{}
				}
			}
		}
		for _, object := range current {
			if cells[1] == "" { // the fields of another object
				maps.Copy(objects[object], objects[cells[2]])
				continue
			}
			var f jsonField
			f.kind, f.unset = strings.CutSuffix(cells[2], ", if set")
			f.kind, f.null = strings.CutSuffix(f.kind, "?")
			f.kind, f.array = strings.CutPrefix(f.kind, "[")
			f.kind = strings.TrimSuffix(f.kind, "]")
			for name := range strings.SplitSeq(cells[1], ", ") {
				if _, again := objects[object][name]; again {
					t.Errorf("%s.%s is documented twice", object, name)
				}
				objects[object][name] = f
			}
		}
	}
	return objects
}

// jsonCheck compares what commands print with what is documented.
type jsonCheck struct {
	*testing.T
	objects map[string]map[string]jsonField
	seen    map[string]bool // the fields that had a value
}

func (c *jsonCheck) object(where, object string, v any) {
	c.Helper()
	fields, ok := c.objects[object]
	values, isObject := v.(map[string]any)
	if !ok || !isObject {
		c.Errorf("%s: %T, and documented is the object %q: %v", where, v, object, ok)
		return
	}
	for name := range values {
		if _, ok := fields[name]; !ok {
			c.Errorf("%s.%s is not documented", where, name)
		}
	}
	for name, f := range fields {
		value, there := values[name]
		at := where + "." + name
		switch {
		case !there:
			if !f.unset {
				c.Errorf("%s is missing", at)
			}
		case value == nil:
			if !f.null {
				c.Errorf("%s is null", at)
			}
		case f.array:
			list, ok := value.([]any)
			if !ok {
				c.Errorf("%s is %T, not an array", at, value)
			}
			for _, one := range list {
				c.value(at+"[]", object, name, f.kind, one)
			}
		default:
			c.value(at, object, name, f.kind, value)
		}
	}
}

func (c *jsonCheck) value(at, object, name, kind string, v any) {
	c.Helper()
	c.seen[object+"."+name] = true
	text, isText := v.(string)
	n, isNumber := v.(float64)
	_, isBool := v.(bool)
	ok := true
	switch kind {
	case "string":
		ok = isText
	case "number":
		ok = isNumber
	case "integer":
		ok = isNumber && n == math.Trunc(n)
	case "boolean":
		ok = isBool
	case "instant":
		when, err := time.Parse(time.RFC3339Nano, text)
		ok = isText && err == nil && when.Location() == time.UTC
	default:
		c.object(at, kind, v)
	}
	if !ok {
		c.Errorf("%s is %v, not of the documented type %s", at, v, kind)
	}
}

// printed is a writer that calls a function when something was printed.
type printed struct {
	bytes.Buffer
	then func()
}

func (p *printed) Write(b []byte) (int, error) {
	defer p.then()
	return p.Buffer.Write(b)
}

// TestTheJSONIsAsDocumented runs every command, and compares the fields and their types with the table of JSON.md.
func TestTheJSONIsAsDocumented(t *testing.T) {
	w := newWorld(t)
	objects := documented(t)
	// override is what the command prints, and an object in others.
	command := map[string]jsonField{}
	for _, name := range []string{"override", "addedNow", "keysWithOverrides"} {
		command[name] = objects["override"][name]
		delete(objects["override"], name)
	}
	objects["txlimit override"] = command
	c := &jsonCheck{t, objects, map[string]bool{}}

	run := func(code int, object string, args ...string) {
		t.Helper()
		r := w.run(append(args, "--json")...)
		var v any
		if err := json.Unmarshal([]byte(r.out), &v); err != nil || r.code != code {
			t.Fatalf("%v: %s", err, r)
		}
		c.object(strings.Join(args, " "), object, v)
	}
	run(exitNothing, "migrate status", "migrate", "status")
	run(exitOK, "migrate", "migrate")
	run(exitOK, "migrate", "migrate")
	run(exitOK, "migrate status", "migrate", "status")
	run(exitOK, "migrate down", "migrate", "down", "--yes")
	run(exitNothing, "migrate down", "migrate", "down", "--yes")
	run(exitOK, "migrate up", "migrate", "up")
	run(exitNothing, "limits", "limits")
	run(exitNothing, "sweep", "sweep")

	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 1, 100000*time.Hour, ratelimit.Capacity(5), ratelimit.MaxReserved(3), ratelimit.Shards(2)),
		ratelimit.FixedWindow("window", 2, 100000*time.Hour, ratelimit.Start(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))),
		ratelimit.CalendarWindow("calendar", 3, "year", ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2026-01-31 15:00")),
		ratelimit.TokenBucket("varies", 10, time.Hour, ratelimit.Varies(240*time.Hour)),
		ratelimit.TokenBucket("none", 0, time.Hour),
		ratelimit.Unlimited("unlimited"),
		ratelimit.TokenBucket("logins", 5, time.Hour),
	}
	file := t.TempDir() + "/limits.json"
	configs := make([]ratelimit.Config, len(limits))
	for i, limit := range limits {
		configs[i] = limit.Config()
	}
	content, err := json.Marshal(map[string]any{"program": "api", "limits": configs})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	run(exitOK, "publish", "publish", file, "--check")
	run(exitOK, "publish", "publish", file)
	run(exitOK, "withdraw", "withdraw", "api")
	run(exitNothing, "withdraw", "withdraw", "api")
	run(exitOK, "publish", "publish", file)
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "worker", limits...); err != nil {
		t.Fatal(err)
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "api", append(limits[1:], ratelimit.TokenBucket("bucket", 2, 100000*time.Hour, ratelimit.Capacity(5)))...); err != nil {
		t.Fatal(err)
	}
	w.sql(`INSERT INTO ratelimit.usage VALUES ('bucket', date_trunc('minute', now()), 100, 4711, 0, 100, 0, 0)`)
	w.sql(`INSERT INTO ratelimit.denials SELECT 'bucket', date_trunc('hour', now(), 'UTC'), 'acme', 31, 31, now()`)
	var limiter ratelimit.Limiter
	for _, request := range []ratelimit.Request{limits[0].Key("acme").Count(7), limits[1].Key("acme").Count(2), limits[2].Key("acme").Count(3), limits[3].Key("acme").Count(10)} {
		if _, err := limiter.Charge(t.Context(), w.conn, request); err != nil {
			t.Fatal(err)
		}
	}
	w.sql("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('window', 'old', 0, 1, 0, '2026-01-01')")
	if _, err := limiter.Pause(t.Context(), w.conn, 24*time.Hour, limits[0].Key("paused")); err != nil {
		t.Fatal(err)
	}

	renders := ratelimit.Slots("renders", 1)
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "renderer", renders); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Hold(t.Context(), w.conn, "job", time.Hour, renders.Key("acme")); err != nil {
		t.Fatal(err)
	}

	run(exitOK, "holds", "holds", "renders")
	run(exitNothing, "holds", "holds", "renders", "other")
	run(exitOK, "holds", "holds", "renders", "acme")
	run(exitOK, "limits", "limits", "--count")
	run(exitOK, "keys", "keys", "renders")
	run(exitOK, "show", "show", "renders", "acme")
	run(exitOK, "release", "release", "renders", "acme", "job", "--yes")
	run(exitNothing, "release", "release", "renders", "acme", "job", "--yes")
	run(exitOK, "keys", "keys", "bucket")
	run(exitOK, "keys", "keys", "varies")
	w.sql("SELECT ratelimit.override('varies', 'acme', rate => 1, capacity => 1, until => now() + interval '1 minute')")
	run(exitOK, "keys", "keys", "varies")
	run(exitOK, "show", "show", "varies", "acme")
	w.sql("SELECT ratelimit.restore('varies', 'acme')")
	run(exitNothing, "keys", "keys", "logins")
	run(exitOK, "keys --denied", "keys", "bucket", "--denied")
	run(exitNothing, "keys --denied", "keys", "logins", "--denied")
	for _, args := range [][]string{
		{"bucket", "acme"}, {"bucket", "paused"}, {"bucket"}, {"window", "acme"}, {"window", "other"}, {"calendar", "acme"}, {"calendar", "acme", "--rate", "9"}, {"varies", "acme"}, {"none"}, {"unlimited", "x"},
	} {
		run(exitOK, "show", append([]string{"show"}, args...)...)
	}
	run(exitNothing, "overrides", "overrides")
	run(exitOK, "txlimit override", "override", "bucket", "acme", "--rate", "9", "--capacity", "20", "--max-reserved", "4", "--add", "--for", "1h", "--reason", "r")
	run(exitOK, "txlimit override", "override", "bucket", "--rate", "9", "--yes", "--forever")
	run(exitOK, "keys", "keys", "bucket", "--all")
	run(exitOK, "show", "show", "bucket", "acme")
	run(exitOK, "block", "block", "bucket", "acme", "--forever")
	run(exitOK, "keys", "keys", "bucket")
	run(exitOK, "show", "show", "bucket", "acme")
	run(exitOK, "reset", "reset", "bucket", "acme", "--yes")
	run(exitNothing, "reset", "reset", "bucket", "acme", "--yes")
	run(exitOK, "unlimited", "unlimited", "bucket", "acme", "--until", "2999-01-01")
	run(exitOK, "keys", "keys", "bucket", "--all")
	run(exitOK, "unblock", "unblock", "bucket", "acme")
	run(exitNothing, "unblock", "unblock", "bucket", "acme")
	run(exitOK, "restore", "restore", "bucket", "acme")
	run(exitNothing, "restore", "restore", "calendar", "--yes")
	run(exitOK, "show", "show", "bucket", "acme")
	run(exitOK, "overrides", "overrides")
	run(exitOK, "overrides", "overrides", "--all")
	run(exitOK, "sweep", "sweep")
	run(exitNothing, "locks", "locks", "--old", "1000d")
	w.hang()
	run(exitOK, "locks", "locks", "--old", "1ms")
	log := []string{"replay", "--log", "testdata/messages.csv", "--time", "created_at", "--key", "user_id", "--skip-mistakes"}
	run(exitOK, "replay", append(log, "-c", "1/1h", "-c", "0/1h")...)
	run(exitOK, "replay", append(log, "-c", "10/1h,capacity=1")...)

	// It prints the object, and serves until it is stopped.
	ctx, stop := context.WithCancel(t.Context())
	out := &printed{then: stop}
	w.change = func(a *app) { a.stdout = out }
	if r := w.runWith(ctx, "", "console", "--listen", "127.0.0.1:0", "--write", "--json"); out.Len() == 0 {
		t.Fatal(r)
	}
	w.change = nil
	var served any
	if err := json.Unmarshal(out.Bytes(), &served); err != nil {
		t.Fatal(err)
	}
	c.object("console", "console", served)
	w.sql("ALTER TABLE ratelimit.denials RENAME TO hidden")
	run(exitOK, "show", "show", "window", "acme")
	w.sql("ALTER TABLE ratelimit.hidden RENAME TO denials")

	// Every field had a value, and a name has one type.
	types := map[string]string{}
	for object, fields := range objects {
		for name, f := range fields {
			same := object // block and unlimited print what override does
			if object == "block" || object == "unlimited" {
				same = "txlimit override"
			}
			if !c.seen[same+"."+name] {
				t.Errorf("no command has shown %s.%s", object, name)
			}
			kind := f.kind
			if f.array {
				kind = "[" + kind + "]"
			}
			if types[name] == "" {
				types[name] = kind
			}
			if types[name] != kind {
				t.Errorf("%s is of two types: %s and %s", name, types[name], kind)
			}
		}
	}
	// Every command is documented.
	var walk func(c *cobra.Command, path string)
	walk = func(c *cobra.Command, path string) {
		if c.Name() == "completion" || c.Name() == "help" || path == "migrate sql" { // which prints SQL
			return
		}
		if c.Runnable() && c.HasParent() && objects[path] == nil {
			t.Errorf("the JSON of %q is not documented", path)
		}
		for _, sub := range c.Commands() {
			walk(sub, strings.TrimSpace(path+" "+sub.Name()))
		}
	}
	walk((&app{}).root(), "")
	if types["remaining"] != "number" {
		t.Errorf("the table was not read: %v", types)
	}
}
