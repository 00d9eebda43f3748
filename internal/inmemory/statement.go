package inmemory

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/decide"
)

// ask answers a statement of package ratelimit, and refuses any other.
func (s *session) ask(sql string, args []any) error {
	if len(args) > 0 {
		if asker, ok := args[0].(decide.Asker); ok {
			if answer, err := s.answer(asker.Question()); answer != nil || err != nil {
				asker.Answered(answer)
				return err
			}
		}
	}
	return refused(sql)
}

// answer answers a question. It returns nil for one that is not known here.
func (s *session) answer(question any) (answer any, err error) {
	switch q := question.(type) {
	case decide.Question:
		return s.decide(q)
	case dbsqlc.SweepParams:
		return dbsqlc.SweepRow{Deleted: pgtype.Int4{Int32: int32(s.sweep(readSweep(q, s.db.now))), Valid: true}}, nil
	case dbsqlc.OverridesParams:
		return s.page(), nil
	case dbsqlc.OverrideParams:
		o := override{ID: ID{Name: q.Name, Key: q.Key.String}, effect: "numbers", rate: q.Rate, capacity: q.Capacity, maxReserved: q.MaxReserved}
		return s.make(o, q.Global, q.Until, q.Lasts)
	case dbsqlc.BlockParams:
		return s.make(override{ID: ID{Name: q.Name, Key: q.Key.String}, effect: "block"}, q.Global, q.Until, q.Lasts)
	case dbsqlc.RestoreParams:
		return s.restore(ID{Name: q.Name, Key: q.Key.String}, q.Global, "numbers", "block")
	case dbsqlc.UnblockParams:
		return s.restore(ID{Name: q.Name, Key: q.Key.String}, q.Global, "block")
	}
	return nil, nil
}

// decide decides a call.
func (s *session) decide(q decide.Question) (answer any, err error) {
	t, now, ds := s.table, s.db.now, q.Demands
	if q.Now.Valid {
		now = algebra.At(q.Now.Time)
	}
	for _, d := range ds {
		s.touch(d.ID)
		switch l := d.Limit; {
		case q.Op == decide.Pause, q.Op == decide.Resume, q.Op == decide.Reset:
			if err := s.checkKeyless(d.ID); err != nil {
				return nil, err
			}
		case l.Windows != nil && (l.Unknown(now) || now < (*l.Windows)[0]):
			return nil, fmt.Errorf("ratelimittest: limit %q: the clock of the program is not the one of this database: "+
				"set Limiter.Clock to the Now of the DB", d.Name)
		}
	}
	s.db.numbers = ds[0].Limit
	a := decide.Answer{Granted: true}
	switch q.Op {
	case decide.Each:
		answers := make([]decide.Answer, len(ds))
		for i, d := range ds {
			if d.Limit.Capacity-d.Count < d.Lowest { // it is never granted: the rows say when other numbers will
				answers[i] = t.Check(ds[i:i+1], now)
			} else {
				answers[i] = t.Consume(ds[i:i+1], false, q.Within, s.level, now)
			}
			answers[i].At = now
		}
		return answers, nil
	case decide.Consume:
		a = t.Consume(ds, q.Reserve, q.Within, s.level, now)
	case decide.Check:
		a = t.Check(ds, now)
	case decide.Take:
		a = t.Take(ds, q.Most, now)
	case decide.Refund:
		a = t.Refund(ds, q.Taken, now)
	case decide.Move:
		t.Move(ds[0], ds[1], ds[1].Lowest, now)
	case decide.Pause:
		a.Until = t.Pause(ds, now+algebra.Micros(q.Lasts.Microseconds()), now)
	case decide.Resume:
		t.Resume(ds, now)
	case decide.Reset:
		t.Reset(ds)
	default:
		return nil, nil
	}
	if a.At = now; q.OrRaise && !a.Granted {
		err = denial(ds)
	}
	return a, err
}

// denial is the error of ratelimit._raise, whose rows are in the answer.
func denial(ds []Demand) error {
	var names []string
	for _, d := range ds {
		if !slices.Contains(names, d.Name) {
			names = append(names, d.Name)
		}
	}
	return &pgconn.PgError{Severity: "ERROR", Code: "PT429", Message: "rate limit exceeded: " + strings.Join(names, ", ")}
}

// row is the end of a statement of package ratelimit, which has its answer.
type row struct{ err error }

func (r row) Scan(dest ...any) error {
	if r.err == nil && len(dest) > 0 {
		return errors.New("ratelimittest: the answer is for package ratelimit only")
	}
	return r.err
}
