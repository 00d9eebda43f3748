// Projects lets each team have at most 5 projects. A trigger counts them, whoever inserts, moves or deletes: one row or many, from psql or
// from Go. A Go program may ask before it inserts, by a Hold without an end. The example then checks that no team has more than 5, and that
// exactly the projects that exist are counted.
//
//	go run ./examples/projects
package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

// most is how many projects a team has at most.
const most = 5

// projects are slots. Each project that exists holds one, under its id.
var projects = ratelimit.Slots("projects", most)

// schema has the trigger. Everybody locks the teams in one order, so that nobody deadlocks; within a team, what goes makes room for what comes.
const schema = `
CREATE TABLE projects (id text PRIMARY KEY, team text NOT NULL);

CREATE FUNCTION projects_come() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ratelimit.hold_many('projects', p.team, p.ids)
       FROM (SELECT team, array_agg(id) AS ids FROM come GROUP BY team ORDER BY team COLLATE "C") AS p; -- everybody locks in one order, so nobody deadlocks
    RETURN NULL;
END $$;

CREATE FUNCTION projects_go() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ratelimit.release_many('projects', p.team, p.ids)
       FROM (SELECT team, array_agg(id) AS ids FROM gone GROUP BY team ORDER BY team COLLATE "C") AS p;
    RETURN NULL;
END $$;

CREATE FUNCTION projects_move() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    p record;
BEGIN
    FOR p IN
        SELECT team, array_agg(id) FILTER (WHERE NOT comes) AS gone, array_agg(id) FILTER (WHERE comes) AS come
          FROM ((SELECT team, id, false AS comes FROM gone EXCEPT SELECT team, id, false FROM come)
                UNION ALL (SELECT team, id, true FROM come EXCEPT SELECT team, id, true FROM gone)) AS m
         GROUP BY team ORDER BY team COLLATE "C"
    LOOP -- what goes makes room for what comes
        PERFORM ratelimit.release_many('projects', p.team, coalesce(p.gone, '{}'));
        PERFORM ratelimit.hold_many('projects', p.team, coalesce(p.come, '{}'));
    END LOOP;
    RETURN NULL;
END $$;

CREATE TRIGGER come AFTER INSERT ON projects REFERENCING NEW TABLE AS come FOR EACH STATEMENT EXECUTE FUNCTION projects_come();
CREATE TRIGGER go AFTER DELETE ON projects REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION projects_go();
CREATE TRIGGER move AFTER UPDATE ON projects REFERENCING OLD TABLE AS gone NEW TABLE AS come FOR EACH STATEMENT EXECUTE FUNCTION projects_move();
`

// full reports whether SQL said that a team has all its projects, or that it may never have so many.
func full(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (e.Code == "PT429" || strings.Contains(e.Detail, `"reason" : "never"`))
}

// create makes a project from Go. The Hold is the question, with an answer that Go understands; the trigger then holds the same id, and takes nothing.
func create(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool, id, team string) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limits.Hold(ctx, tx, id, ratelimit.Forever, projects.Key(team)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO projects (id, team) VALUES ($1, $2)", id, team)
		return err // which releases the project again
	})
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "projects", Limits: []ratelimit.Limit{projects}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	steps := []func(context.Context, *ratelimit.Limiter, *pgxpool.Pool) error{oneByOne, inBulk, fromGo, atOnce, moved, check}
	for _, step := range steps {
		if err := step(ctx, limits, pool); err != nil {
			return err
		}
	}
	return nil
}

// oneByOne inserts and deletes as a person in psql would.
func oneByOne(ctx context.Context, _ *ratelimit.Limiter, pool *pgxpool.Pool) error {
	created := 0
	for i := range 8 {
		_, err := pool.Exec(ctx, "INSERT INTO projects VALUES ($1, 'red')", fmt.Sprint("red ", i))
		if err == nil {
			created++
		} else if !full(err) {
			return err
		}
	}
	fmt.Printf("red: %d of 8 projects were created, one by one\n", created)
	// What is deleted makes room at once, in the same transaction, too.
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "DELETE FROM projects WHERE id IN ('red 0', 'red 1')")
		if err == nil {
			_, err = tx.Exec(ctx, "INSERT INTO projects VALUES ('red a', 'red'), ('red b', 'red')")
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Println("red: two were deleted, and two others created, in one transaction")
	return nil
}

// inBulk inserts many in one statement: all of them or none.
func inBulk(ctx context.Context, _ *ratelimit.Limiter, pool *pgxpool.Pool) error {
	const insert = "INSERT INTO projects SELECT 'bulk ' || i, CASE WHEN i % 2 = 0 THEN 'green' ELSE 'blue' END FROM generate_series(1, $1::int) AS i"
	if _, err := pool.Exec(ctx, insert, 2*most+1); !full(err) {
		return fmt.Errorf("an INSERT of too many: %w", err)
	}
	if _, err := pool.Exec(ctx, insert, 2*most); err != nil {
		return err
	}
	fmt.Println("green and blue: an INSERT of 11 was refused as a whole, and one of 10 was not")
	_, err := pool.Exec(ctx, "DELETE FROM projects WHERE team = 'blue'")
	return err
}

// fromGo asks before it inserts.
func fromGo(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool) error {
	if err := create(ctx, limits, pool, "from Go", "blue"); err != nil {
		return err
	}
	denial, denied := errors.AsType[*ratelimit.DeniedError](create(ctx, limits, pool, "one more", "green"))
	if !denied {
		return errors.New("green got a sixth project")
	}
	fmt.Printf("green: Go is told %q, %v remain\n", denial.Reason, denial.Remaining)
	// An id that is there already, in another team, fails after its hold. The rollback releases it.
	if err := create(ctx, limits, pool, "red 2", "blue"); err == nil {
		return errors.New("two projects have one id")
	}
	balance, err := limits.Balance(ctx, pool, projects.Key("blue"))
	if err != nil {
		return err
	}
	fmt.Printf("blue: after an INSERT that failed, %v of %d remain\n", balance[0].Remaining, most)
	return nil
}

// atOnce has many sessions create projects of one team at the same time, by SQL and by Go.
func atOnce(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool) error {
	const sessions = 20
	errs := make([]error, sessions)
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			id := fmt.Sprint("yellow ", i)
			if i%2 == 0 {
				errs[i] = create(ctx, limits, pool, id, "yellow")
			} else {
				_, errs[i] = pool.Exec(ctx, "INSERT INTO projects VALUES ($1, 'yellow')", id)
			}
		})
	}
	wg.Wait()
	created := 0
	for _, err := range errs {
		if err == nil {
			created++
		} else if !full(err) && !errors.Is(err, ratelimit.ErrDenied) {
			return err
		}
	}
	fmt.Printf("yellow: %d of %d projects were created, all at once\n", created, sessions)
	return nil
}

// moved has projects change their team.
func moved(ctx context.Context, _ *ratelimit.Limiter, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, "UPDATE projects SET team = 'yellow' WHERE id = 'red 2'"); !full(err) {
		return fmt.Errorf("a move to a full team: %w", err)
	}
	_, err := pool.Exec(ctx, "UPDATE projects SET team = CASE team WHEN 'red' THEN 'yellow' ELSE 'red' END WHERE team IN ('red', 'yellow')")
	if err != nil {
		return err
	}
	fmt.Println("red and yellow: no project can move, but all of them can change places")
	return nil
}

// check compares what is counted with what exists.
func check(ctx context.Context, _ *ratelimit.Limiter, pool *pgxpool.Pool) error {
	rows, err := pool.Query(ctx, `
		SELECT team, count(*), array_agg(id ORDER BY id) = (SELECT array_agg(h.id ORDER BY h.id) FROM ratelimit.holds('projects', team) AS h)
		  FROM projects GROUP BY team ORDER BY team`)
	if err != nil {
		return err
	}
	var team string
	var n, all int
	var same bool
	if _, err := pgx.ForEachRow(rows, []any{&team, &n, &same}, func() error {
		if n > most || !same {
			return fmt.Errorf("%s has %d projects, and they are not those that are counted", team, n)
		}
		all += n
		return nil
	}); err != nil {
		return err
	}
	var held int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM ratelimit.holds").Scan(&held); err != nil {
		return err
	}
	if held != all {
		return fmt.Errorf("%d projects exist, and %d are counted", all, held)
	}
	fmt.Printf("%d projects exist, and exactly these are counted\n", all)
	return nil
}
