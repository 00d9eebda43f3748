package main

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
)

// A move that has failed at its last step is repeated. An older move is not.
func TestAMoveIsRepeated(t *testing.T) {
	ctx := t.Context()
	f := &fleet{home: map[string]int{"acme": 0}}
	for range 3 {
		pool, closePool, err := demo.Pool(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := closePool(); err != nil {
				t.Error(err)
			}
		})
		s, err := open(ctx, pool)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.limits.Close(context.WithoutCancel(ctx)) })
		f.servers = append(f.servers, s)
	}
	exec(ctx, t, f.servers[0].Pool, "INSERT INTO tenants VALUES ('acme', true)")
	send := func() {
		t.Helper()
		if err := f.send(ctx, "acme", "ann"); err != nil {
			t.Fatal(err)
		}
	}
	wants := func(server, messages int) {
		t.Helper()
		for i, s := range f.servers {
			var got int
			if err := s.QueryRow(ctx, "SELECT count(*) FROM messages").Scan(&got); err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{true: messages}[i == server]; got != want {
				t.Errorf("server %d has %d messages, want %d", i, got, want)
			}
		}
	}

	send()
	exec(ctx, t, f.servers[0].Pool, `CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk full'; END $$;
		CREATE TRIGGER fail BEFORE DELETE ON tenants FOR EACH ROW EXECUTE FUNCTION fail()`)
	if err := f.move(ctx, "acme", 0, 1); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Fatalf("a move that cannot delete: %v", err)
	}
	send() // on server 1
	exec(ctx, t, f.servers[0].Pool, "DROP TRIGGER fail ON tenants")
	if err := f.move(ctx, "acme", 0, 1); err != nil {
		t.Fatal(err)
	}
	wants(1, 2)

	if err := f.move(ctx, "acme", 1, 2); err != nil {
		t.Fatal(err)
	}
	for _, refused := range [][2]int{{0, 1}, {2, 2}} {
		if err := f.move(ctx, "acme", refused[0], refused[1]); err == nil {
			t.Errorf("the move from %d to %d is repeated", refused[0], refused[1])
		}
	}
	if err := f.move(ctx, "acme", 2, 0); err != nil {
		t.Fatal(err)
	}
	send()
	wants(0, 3)
	for range 20 - 3 { // of 20 for the tenant, and 15 for ann
		if err := f.send(ctx, "acme", "ann"); err != nil {
			break
		}
	}
	wants(0, 15)
}

func exec(ctx context.Context, t *testing.T, server *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := server.Exec(ctx, sql); err != nil {
		t.Fatal(err)
	}
}
