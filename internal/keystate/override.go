package keystate

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Override is a row of ratelimit.overrides. The tool prints it as JSON.
type Override struct {
	ID          int64      `json:"id"`
	Limit       string     `json:"limit"`
	Key         *string    `json:"key"` // nil: every key
	Effect      string     `json:"effect"`
	Rate        *float64   `json:"rate"`
	Capacity    *float64   `json:"capacity"`
	MaxReserved *float64   `json:"maxReserved"`
	Until       *time.Time `json:"until"` // nil: for good
	Reason      string     `json:"reason"`
	MadeBy      string     `json:"madeBy"`
	MadeAs      string     `json:"madeAs"` // the role that was logged in
	MadeAt      time.Time  `json:"madeAt"`
	Added       *float64   `json:"added"`
	RemovedBy   *string    `json:"removedBy"`
	RemovedAs   *string    `json:"removedAs"`
	RemovedAt   *time.Time `json:"removedAt"`
	State       string     `json:"state"` // one of those below
}

// The states of an override.
const (
	StateInForce = "in force"
	StateExpired = "expired"
	StateRemoved = "removed"
	StateDone    = "done" // of a reset, and of a release
)

// The effects of an override.
const (
	EffectNumbers   = "numbers"
	EffectBlock     = "block"
	EffectUnlimited = "unlimited"
	EffectReset     = "reset" // only in the history, as release
)

var overrideColumns = `SELECT o.id, o.name, o.key, o.effect, o.rate, o.capacity, o.max_reserved,
	CASE WHEN isfinite(o.until) THEN ` + ShownTime("o.until") + ` END, o.reason, o.made_by, o.made_as,
	` + ShownTime("o.made_at") + `, o.added, o.removed_by, o.removed_as,
	CASE WHEN o.removed_at IS NOT NULL THEN ` + ShownTime("o.removed_at") + ` END,
	CASE WHEN o.removed_at IS NOT NULL THEN 'removed' WHEN o.effect IN ('reset', 'release') THEN 'done' WHEN o.until <= clock_timestamp() THEN 'expired' ELSE 'in force' END `

// InForce reads the overrides in force for some keys (the empty key is none) and for every key or, with nil, all of a limit; without a name, those of all
// limits. They are in the order in which they decide: those of a key, and then those of every key; of each, blocks first, and then the newest.
// most: at most so many of single keys, and as many of every key; 0: all.
func InForce(ctx context.Context, db Querier, name *string, keys []string, at time.Time, most int) ([]Override, error) {
	return collect(ctx, db, override, overrideColumns+`FROM ratelimit._in_force($1::text, $2::text[], $3::timestamptz, nullif($4::bigint, 0)) AS o`, name, keys, at, most)
}

// History reads overrides, in force or not, by what comes after FROM ratelimit.overrides AS o.
func History(ctx context.Context, db Querier, from string, args ...any) ([]Override, error) {
	return collect(ctx, db, override, overrideColumns+"FROM "+from, args...)
}

// KeyHistory reads the newest overrides that were for a key (nil: of none), or for every key: of each, those that are over last or are in force.
func KeyHistory(ctx context.Context, db Querier, name string, key *string, most int) ([]Override, error) {
	const last = " ORDER BY greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) DESC LIMIT $3)"
	return History(ctx, db, `((SELECT o.* FROM ratelimit.overrides AS o WHERE o.name = $1 AND o.key = $2`+last+`
		UNION ALL (SELECT o.* FROM ratelimit.overrides AS o WHERE o.name = $1 AND o.key IS NULL`+last+`) AS o
		ORDER BY o.made_at DESC, o.id DESC LIMIT $3`, name, key, most)
}

func override(row pgx.CollectableRow) (Override, error) {
	o, err := pgx.RowToStructByPos[Override](row)
	o.MadeAt = o.MadeAt.UTC()
	for _, t := range []*time.Time{o.Until, o.RemovedAt} {
		if t != nil {
			*t = t.UTC()
		}
	}
	return o, err
}
