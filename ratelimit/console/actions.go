package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/keystate"
	"github.com/txlimit/txlimit/ratelimit"
)

// done says what has been done. The address has only the word, so that no link can put other words on the page.
var done = map[string]string{
	"reset":     "It goes on: its rows are deleted, and a missing row is a full limit.",
	"numbers":   "Overridden. Every program follows within two seconds.",
	"added":     "Overridden, and the difference of the capacities is added.",
	"block":     "Blocked. Every program denies within two seconds.",
	"unlimited": "Unlimited. Every program grants within two seconds.",
	"restore":   "Restored. Every program follows within two seconds.",
	"beside":    "It is in the history. But a block is in force, which denies everything until it ends, or until somebody ends it.",
	"nothing":   "There was nothing in force to end.",
	"released":  "Released: what it held came back, and its holder has lost it.",
	"gone":      "That hold had ended already. Nothing was released.",
	"add":       "The difference of the capacities is added.",
	"unadded": "The override is in force. Nothing was added: the key has no row, and so is full, its capacity is no larger than before, " +
		"or ended overrides have added as much already.",
}

// The bounds of the columns, in bytes.
const (
	maxReason = 4096
	maxWho    = 255
)

const anotherVersion = "This form is of another version of the page. Load the page again."

// form is what a person has filled in. It comes back with the page if it cannot be done.
type form struct {
	Action, Rate, Capacity, MaxReserved, CapacityNow, End, Reason, Effect, ID, Since, Shown string
	Add, Sure                                                                               bool
}

// change does what a form says.
func (c *visit) change(a asked, key string) error {
	v := c.r.PostForm
	f := form{
		Action: v.Get("action"), Rate: strings.TrimSpace(v.Get("rate")), Capacity: strings.TrimSpace(v.Get("capacity")), MaxReserved: strings.TrimSpace(v.Get("max_reserved")),
		CapacityNow: strings.TrimSpace(v.Get("capacity_now")),
		End:         strings.TrimSpace(v.Get("end")), Reason: strings.TrimSpace(v.Get("reason")), Effect: v.Get("effect"), ID: v.Get("id"), Since: v.Get("since"),
		Shown: v.Get("shown"),
		Add:   v.Get("add") != "", Sure: v.Get("sure") != "",
	}
	did, err := c.do(a.name, key, f)
	c.audit(a.name, key, f, did, err)
	if err == nil {
		target := url.Values{"name": {a.name}, "done": {did}}
		if c.r.URL.Path == "/key" {
			target.Set("key", key)
			for field, text := range map[string]string{"rate": a.given.Rate, "capacity": a.given.Capacity, "zone": a.given.Zone, "anchor": a.given.Anchor} {
				if text != "" {
					target.Set(field, text)
				}
			}
		}
		// http.Redirect would make an absolute path of it, without the prefix that was stripped.
		c.w.Header().Set("Location", strings.TrimPrefix(c.r.URL.Path, "/")+"?"+target.Encode())
		c.w.WriteHeader(http.StatusSeeOther)
		return nil
	}
	refused := explain(err)
	if refused.status != http.StatusBadRequest && !refused.partly {
		return err
	}
	a.done = ""
	problem := refused.text
	if refused.partly {
		f = form{} // or the first part would be done again
	} else {
		problem = "Nothing was changed. " + problem
	}
	show := c.showLimit
	if c.r.URL.Path == "/key" {
		show = c.showKey
	}
	if err = show(refused.status, a, f, problem); err != nil && refused.partly {
		return refused // it matters more than why the page cannot be read
	}
	return err
}

// do changes something for a key, or for every key if it is empty, and returns a word of done.
func (c *visit) do(name, key string, f form) (did string, err error) {
	var scope *string
	if key != "" {
		scope = &key
	}
	if !valid(c.who) || len(c.who) > maxWho {
		return "", wrong(fmt.Sprintf("Your name, by which the page knows you, is not valid UTF-8 of at most %d bytes.", maxWho))
	}
	if !valid(f.Reason) {
		return "", wrong("The reason is not valid UTF-8.")
	}
	if len(f.Reason) > maxReason {
		return "", wrong(fmt.Sprintf("The reason has %d bytes, more than %d.", len(f.Reason), maxReason))
	}
	everyKey := c.r.URL.Path == "/limit"
	if scope == nil && (f.Action == "numbers" || f.Action == "block" || f.Action == "unlimited") && !f.Sure {
		return "", wrong("Say that you mean every key of this limit.")
	}
	switch f.Action {
	case "reset":
		if everyKey {
			return "", wrong("A limit goes on key by key.")
		}
		return "reset", c.writing(func(ctx context.Context, tx pgx.Tx) error {
			var deleted int
			err := tx.QueryRow(ctx, "SELECT ratelimit._reset(ARRAY[$1::text], ARRAY[$2::text])", name, key).Scan(&deleted)
			if err == nil && deleted > 0 {
				_, err = tx.Exec(ctx, "SELECT ratelimit._note_reset($1::text, $2::text, $3::text, $4::text)", name, key, f.Reason, c.who)
			}
			return err
		})
	case "release":
		since, err := time.Parse(time.RFC3339Nano, f.Since)
		if everyKey || err != nil || !valid(f.ID) {
			return "", wrong("A hold is released on the page of its key, by its id. Load the page again.")
		}
		var released bool
		err = c.writing(func(ctx context.Context, tx pgx.Tx) (err error) {
			released, err = keystate.Release(ctx, tx, name, key, f.ID, since, f.Reason, &c.who)
			return err
		})
		if !released {
			return "gone", err
		}
		return "released", err
	case "restore":
		return c.restore(name, scope, f)
	case "add":
		id, err := strconv.ParseInt(f.ID, 10, 64)
		if err != nil {
			return "", wrong("The number of the override is missing.")
		}
		before, err := optionalNumber("capacity until now", f.CapacityNow)
		if err != nil {
			return "", err
		}
		return c.add(id, name, before, "add")
	case "numbers", "block", "unlimited":
	default:
		return "", wrong(anotherVersion)
	}
	var now time.Time // of the database, whose clock decides when it ends
	var definitions []definitionRow
	var inForce *overrideRow // until now
	if err := c.read(func(ctx context.Context, tx pgx.Tx) (err error) {
		if now, err = queryNow(ctx, tx); err == nil {
			definitions, err = queryDefinitions(ctx, tx, name)
		}
		if err == nil {
			inForce, _, err = queryOverride(ctx, tx, name, key, now)
		}
		return err
	}); err != nil {
		return "", err
	}
	until, err := parseEnd(f.End, now)
	if err != nil {
		return "", err
	}
	if f.Reason == "" {
		return "", wrong("Give a reason, for those who look at this later.")
	}
	if f.Action != "numbers" {
		var beside bool
		err := c.writing(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT ratelimit."+f.Action+"($1::text, $2::text, $3::timestamptz, $4::text, $5::text, $3::timestamptz IS NULL, false, $2 IS NULL)", name, scope, until, f.Reason, c.who)
			if err == nil && f.Action != "block" {
				beside, err = blocked(ctx, tx, name, key)
			}
			return err
		})
		if beside {
			return "beside", err
		}
		return f.Action, err
	}
	var numbers [4]*float64
	for i, field := range []struct{ what, text string }{
		{"rate", f.Rate}, {"capacity", f.Capacity}, {"most that may be owed", f.MaxReserved}, {"capacity until now", f.CapacityNow},
	} {
		if numbers[i], err = optionalNumber(field.what, field.text); err != nil {
			return "", err
		}
	}
	before := numbers[3]
	if numbers == [4]*float64{3: before} {
		return "", wrong("Give a rate, a capacity, or the most that may be owed.")
	}
	if f.Add {
		if err := canAdd(varies(definitions), inForce, numbers[1], before); err != nil {
			return "", err
		}
	}
	var id int64
	var beside bool
	err = c.writing(func(ctx context.Context, tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "SELECT ratelimit.override($1::text, $2::text, $3::float8, $4::float8, $5::float8, $6::timestamptz, $7::text, $8::text, $6::timestamptz IS NULL, false, $2 IS NULL)", name, scope, numbers[0], numbers[1], numbers[2], until, f.Reason, c.who).Scan(&id)
		if err == nil {
			beside, err = blocked(ctx, tx, name, key)
		}
		return err
	})
	if err != nil || !f.Add {
		if beside {
			return "beside", err
		}
		return "numbers", err
	}
	// ratelimit.add waits until programs know of the override. Should the reader go meanwhile, the difference is added all the same. Should
	// this process die, the page offers to add it.
	did, err = c.add(id, name, before, "added")
	switch {
	case err != nil:
		return "", c.notAdded(id, err)
	case beside:
		return "beside", nil
	}
	return did, nil
}

// restore ends the overrides in force that the form's page has shown. If another one would end, too, it ends none: somebody has decided
// something in the meantime.
func (c *visit) restore(name string, key *string, f form) (did string, err error) {
	ids, ok := parseShown(f.Shown)
	if !ok {
		return "", wrong(anotherVersion)
	}
	var removed int
	err = c.writing(func(ctx context.Context, tx pgx.Tx) error {
		var since time.Time
		if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&since); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, "SELECT ratelimit.restore($1::text, $2::text, $3::text, $4::text, false, $2 IS NULL)", name, key, optional(f.Effect), c.who).Scan(&removed); err != nil || removed == 0 {
			return err
		}
		unseen, err := queryUnseen(ctx, tx, name, key, ids, since)
		if err == nil && unseen != nil {
			return wrong(fmt.Sprintf("Override %d (%s, by %s) is not one of those that you have seen, and would have ended with them. Load the page again, and look at what is in force now.",
				unseen.ID, unseen.Effect, visibly(unseen.MadeBy)))
		}
		return err
	})
	if err == nil && removed == 0 {
		return "nothing", nil
	}
	return "restore", err
}

// blocked reports whether a block decides for a key, or for every key, that has an override of its own.
func blocked(ctx context.Context, tx pgx.Tx, name, key string) (is bool, err error) {
	err = tx.QueryRow(ctx, "SELECT coalesce((SELECT o.effect = 'block' FROM ratelimit._in_force($1::text, ARRAY[$2::text], clock_timestamp()) AS o LIMIT 1), false)", name, key).Scan(&is)
	return is, err
}

// canAdd checks that the new capacity is known, and that until now, before anything is written. The override in force knows it, and may
// contradict the form.
func canAdd(varies bool, inForce *overrideRow, capacity, before *float64) error {
	var known *float64
	if inForce != nil && inForce.Effect == "numbers" {
		known = inForce.Capacity
	}
	switch {
	case known != nil && before != nil && *before < *known:
		return wrong(fmt.Sprintf("The capacity until now is %s by override %d, and not %s.", number(*known), inForce.ID, number(*before)))
	case varies && (capacity == nil || known == nil && before == nil):
		return wrong("The numbers of this key are the program's. To add the difference, give the new capacity and, unless an override has it, the capacity until now.")
	}
	return nil
}

// notAdded says that an override is in force although add failed, so that nobody overrides again.
func (c *visit) notAdded(id int64, err error) error {
	why := explain(err)
	if why.status >= 500 {
		c.log(err)
	}
	text := fmt.Sprintf("The override is in force. It is number %d. ", id)
	if why.partly {
		text += why.text
	} else {
		text += "The difference of the capacities may be missing: " + strings.ToLower(why.title[:1]) + why.title[1:] + ". “Add the difference now” adds it, and never twice."
	}
	return &refusal{status: why.status, title: why.title, text: text, partly: true}
}

// add adds the difference of an override, which must be of this limit. before is the capacity before, if the program alone knows it. did is the
// word for what has been done, if anything was added.
func (c *visit) add(id int64, name string, before *float64, did string) (string, error) {
	var added float64
	err := c.writing(func(ctx context.Context, tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "SELECT ratelimit.add(o.id, $3::float8) FROM ratelimit.overrides AS o WHERE o.id = $1::bigint AND o.name = $2", id, name, before).Scan(&added)
		if errors.Is(err, pgx.ErrNoRows) {
			return wrong("There is no such override.")
		}
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "22023" || pgErr.Code == "55000") { // 55000: not now, since it is paused
			refused := wrong(strings.TrimSpace("Nothing was added to the balance. " + sentence(pgErr.Message) + " " + pgErr.Hint))
			refused.partly = true
			return refused
		}
		return err
	})
	if added == 0 {
		did = "unadded"
	}
	return did, err
}

func wrong(text string) *refusal {
	return &refusal{status: http.StatusBadRequest, title: "That is not possible", text: text}
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// parse reads the numbers of a key of a kind of limit.
func (g givenNumbers) parse(kind string) (*keystate.Given, error) {
	p := keystate.Given{Zone: optional(g.Zone), Anchor: optional(g.Anchor)}
	c := ratelimit.Config{Name: "given", Kind: kind, Zone: g.Zone, Anchor: g.Anchor}
	switch one := 1.0; kind {
	case kindSlots:
		c.Capacity = &one
	case "calendar window":
		c.Rate, c.Period = &one, "1 month"
	default:
		c.Rate, c.Period = &one, "1s"
	}
	for _, field := range []struct {
		what, text string
		to         []**float64
	}{{"rate", g.Rate, []**float64{&p.Rate, &c.Rate}}, {"capacity", g.Capacity, []**float64{&p.Capacity, &c.Capacity}}} {
		n, err := optionalNumber(field.what, strings.TrimSpace(field.text))
		if err != nil {
			return nil, err
		}
		if n == nil {
			continue
		}
		for _, to := range field.to {
			*to = n
		}
	}
	if _, err := c.Limit(); err != nil {
		return nil, wrong(sentence(strings.TrimPrefix(err.Error(), ratelimit.ErrInvalid.Error()+`: limit "given": `)))
	}
	if p == (keystate.Given{}) {
		return nil, nil //nolint:nilnil // nothing is given
	}
	return &p, nil
}

// grouped is a number with commas between groups of three digits. It is never changed.
var grouped = regexp.MustCompile(`^[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?$`)

// parseNumber reads a number such as 2.5, 1000 or 1,000. Any other comma could be a decimal point, and is refused.
func parseNumber(text string) (n float64, ok bool) {
	if grouped.MatchString(text) {
		text = strings.ReplaceAll(text, ",", "")
	}
	n, err := strconv.ParseFloat(text, 64)
	return n, err == nil && !math.IsNaN(n) && !math.IsInf(n, 0)
}

// optionalNumber reads what a field of a form has. It is nil if the field is empty.
func optionalNumber(what, text string) (*float64, error) {
	if text == "" {
		return nil, nil
	}
	n, ok := parseNumber(text)
	if !ok {
		return nil, wrong("The " + what + " is not a number. Write 2.5, 1000 or 1,000.")
	}
	return &n, nil
}

// parseEnd reads the end of an override: "90s", "15m", "2h", "3d", "1w", an instant in UTC such as "2026-07-01 18:00", or "never", which is nil.
func parseEnd(text string, now time.Time) (*time.Time, error) {
	problem := wrong("The end is not understood. Write 15m, 2h, 3d or 1w, an instant such as 2026-07-01 18:00 (UTC), or never.")
	text = strings.ToLower(strings.TrimSpace(text))
	switch text {
	case "":
		return nil, wrong("Say when it ends: 15m, 2h, 3d, an instant in UTC, or never.")
	case "never":
		return nil, nil
	}
	for _, format := range []string{"2006-01-02 15:04", "2006-01-02 15:04:05", "2006-01-02T15:04", time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(format, strings.ToUpper(text)); err == nil {
			if !t.After(now) {
				return nil, wrong("The end has passed. Instants are in UTC.")
			}
			return &t, nil
		}
	}
	for suffix, unit := range map[string]time.Duration{"d": 24 * time.Hour, "w": 7 * 24 * time.Hour} {
		if digits, ok := strings.CutSuffix(text, suffix); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 16)
			if err != nil || n == 0 || n > 36500 {
				return nil, problem
			}
			t := now.Add(time.Duration(n) * unit)
			if unit > 24*time.Hour && n > 5000 {
				return nil, problem
			}
			return &t, nil
		}
	}
	d, err := time.ParseDuration(strings.ReplaceAll(text, " ", ""))
	if err != nil || d <= 0 {
		return nil, problem
	}
	t := now.Add(d)
	return &t, nil
}
