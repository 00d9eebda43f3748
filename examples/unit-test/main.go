// Unit-test is a small service whose unit tests need no database: each member may invite two people a day. main_test.go
// tests the limit and the rollback in memory. This file does the same on Postgres.
//
//	go test ./examples/unit-test
//	go run ./examples/unit-test
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var invite = ratelimit.TokenBucket("invite", 2, 24*time.Hour)

// Service invites people. In production, DB is a *pgxpool.Pool and Invitations is a table. In unit tests, both are in memory.
type Service struct {
	Limits      ratelimit.Limiter
	DB          DB
	Invitations Invitations
}

// DB begins transactions.
type DB interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Invitations stores invitations, in the caller's transaction.
type Invitations interface {
	Add(ctx context.Context, tx pgx.Tx, from, to string) error
}

// Invite stores an invitation, if the member may send one. An invitation that is not stored costs nothing.
func (s *Service) Invite(ctx context.Context, from, to string) error {
	return s.Limits.InTx(ctx, s.DB, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := s.Limits.Consume(ctx, tx, invite.Key(from)); err != nil {
			return err
		}
		return s.Invitations.Add(ctx, tx, from, to)
	})
}

// ErrInvited is the error for a person who is already invited.
var ErrInvited = errors.New("invited already")

// table is the Invitations of production.
type table struct{}

func (table) Add(ctx context.Context, tx pgx.Tx, from, to string) error {
	tag, err := tx.Exec(ctx, `INSERT INTO invitations ("from", "to") VALUES ($1, $2) ON CONFLICT DO NOTHING`, from, to)
	if err == nil && tag.RowsAffected() == 0 {
		return ErrInvited
	}
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, `CREATE TABLE invitations ("from" text, "to" text PRIMARY KEY)`); err != nil {
		return err
	}
	service := &Service{DB: pool, Invitations: table{}}
	for _, to := range []string{"bob", "bob", "cid", "dan"} {
		err := service.Invite(ctx, "ann", to)
		switch {
		case errors.Is(err, ratelimit.ErrDenied):
			fmt.Printf("ann invites %s: denied until the next token\n", to)
		case errors.Is(err, ErrInvited):
			fmt.Printf("ann invites %s: %v\n", to, err)
		case err != nil:
			return err
		default:
			fmt.Printf("ann invites %s\n", to)
		}
	}
	return nil
}
