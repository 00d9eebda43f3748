//go:build ignore

// This program writes the generated files of this directory. With -check, it says whether it would change any. With -hash, it
// writes or checks version.go, by the database that TXLIMIT_DATABASE_URL names, which is migrated.
package main

import (
	"context"
	"flag"
	"log"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/migrationgen"
	"github.com/txlimit/txlimit/migrations"
)

func main() {
	log.SetFlags(0)
	check := flag.Bool("check", false, "change nothing, and fail if something is out of date")
	hash := flag.Bool("hash", false, "version.go, by a database")
	flag.Parse()
	write := migrationgen.Write
	if *check {
		write = migrationgen.Check
	}
	if *hash {
		write = func(dir string) error {
			ctx := context.Background()
			conn, err := pgx.Connect(ctx, os.Getenv("TXLIMIT_DATABASE_URL"))
			if err != nil {
				return err
			}
			defer conn.Close(ctx)
			var s migrations.Schema
			if err := conn.QueryRow(ctx, "SELECT s.version, s.hash FROM ratelimit.schema() AS s").Scan(&s.Version, &s.Hash); err != nil {
				return err
			}
			return migrationgen.WriteVersion(dir, s.Version, s.Hash, *check)
		}
	}
	if err := write("."); err != nil {
		log.Fatal(err)
	}
}
