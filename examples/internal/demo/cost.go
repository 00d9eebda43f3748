package demo

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Cost is what a queue did in some time.
type Cost struct {
	Took    time.Duration
	Jobs    int     // that were run
	Fetched int     // jobs, each time that one was fetched
	Waited  float64 // the longest wait of a small tenant's job, in seconds

	rows, queue int64   // row versions written, of all tables and of the queue's
	wal         float64 // bytes
}

// CostHeader is the line above those of Line.
const CostHeader = "per job, of 20 seconds:   jobs/s  fetched  rows of queue  rows in all  WAL kB   longest wait of a small tenant"

// Line is a line of a table: what one job cost.
func (c Cost) Line(what string) string {
	n := float64(c.Jobs)
	return fmt.Sprintf("%-24s %7.0f  %7.1f  %13.1f  %11.1f  %6.1f   %.2f s",
		what, n/c.Took.Seconds(), float64(c.Fetched)/n, float64(c.queue)/n, float64(c.rows)/n, c.wal/n/1e3, c.Waited)
}

// Costs prepares something, then runs something, and returns what the database wrote in the second: the rows of this database, and WAL of the
// server. Both are on a pool of their own, since a connection reports what it wrote when it is closed, if not before.
func Costs(ctx context.Context, pool *pgxpool.Pool, queue string, prepare, run func(ctx context.Context, own *pgxpool.Pool) error) (Cost, error) {
	if _, err := onOwnPool(ctx, pool, prepare); err != nil {
		return Cost{}, err
	}
	before, err := written(ctx, pool, queue)
	if err != nil {
		return Cost{}, err
	}
	took, err := onOwnPool(ctx, pool, run)
	if err != nil {
		return Cost{}, err
	}
	after, err := written(ctx, pool, queue)
	return Cost{Took: took, rows: after.rows - before.rows, queue: after.queue - before.queue, wal: after.wal - before.wal}, err
}

func onOwnPool(ctx context.Context, pool *pgxpool.Pool, fn func(ctx context.Context, own *pgxpool.Pool) error) (time.Duration, error) {
	own, err := pgxpool.NewWithConfig(ctx, pool.Config())
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = fn(ctx, own)
	took := time.Since(began)
	own.Close()
	time.Sleep(time.Second) // until the server has noticed
	return took, err
}

func written(ctx context.Context, pool *pgxpool.Pool, queue string) (c Cost, err error) {
	err = pool.QueryRow(ctx, `
		SELECT sum(n_tup_ins + n_tup_upd + n_tup_del), sum(n_tup_ins + n_tup_upd + n_tup_del) FILTER (WHERE relname = $1),
		       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8
		  FROM pg_stat_user_tables WHERE schemaname = 'ratelimit'`, queue).Scan(&c.rows, &c.queue, &c.wal)
	return c, err
}
