// Getting-started is the program of docs/getting-started.md. It needs a migrated database in DATABASE_URL.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/txlimit/txlimit/ratelimit"
)

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return send(ctx, tx, os.Args[1], os.Args[2])
	})
	var denied *ratelimit.DeniedError
	switch {
	case err == nil:
		fmt.Println("sent")
	case errors.As(err, &denied):
		fmt.Println("denied, try again in", denied.RetryAfter.Truncate(time.Minute)+time.Minute)
	default:
		fmt.Println("not sent:", err)
	}
}
