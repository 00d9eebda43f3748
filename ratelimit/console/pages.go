package console

import (
	"context"
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/keystate"
)

// layout is what every page has.
type layout struct {
	Title    string
	Root     string // leads to the directory of the pages
	Who      string
	Writable bool
	Now      time.Time
	Refresh  int // seconds until the parts that are alive are fetched again; 0: never
	Done     string
	Problem  string
	Form     form
}

func (c *visit) layout(title string) layout {
	root := "./" + strings.Repeat("../", max(strings.Count(c.r.URL.Path, "/")-1, 0))
	return layout{Title: title, Root: root, Who: visibly(c.who), Writable: c.who != "", Now: time.Now().UTC()}
}

type errorPage struct {
	layout
	Status int
	Text   string
}

type limitsPage struct {
	layout
	Limits         []limitRow
	Search         string
	Span           span
	Spans          []span
	Total          int64
	Granted        int64
	Denied         int64
	First, Last    int
	Page           int
	Previous, Next int
	AnyFailed      bool
	Many           bool // there are more names than are read
}

// limits is the page of all limits.
func (c *visit) limits(a asked) error {
	p := limitsPage{layout: c.layout("Limits"), Search: a.search, Spans: listSpans, Span: pick(listSpans, a.span, 1)}
	p.Refresh = 5
	p.Page = 1
	if n, err := strconv.Atoi(a.page); err == nil && n > 1 && n < 1e6 {
		p.Page = n
	}
	err := c.read(func(ctx context.Context, tx pgx.Tx) (err error) {
		if p.Now, err = queryNow(ctx, tx); err != nil {
			return err
		}
		if p.Limits, err = queryLimits(ctx, tx, p.Span, a.search, (p.Page-1)*limitsPerPage); err != nil || len(p.Limits) == 0 {
			return err
		}
		names := make([]string, len(p.Limits))
		at := make(map[string]int)
		for i, l := range p.Limits {
			names[i], at[l.Name] = l.Name, i
		}
		bins, err := queryBins(ctx, tx, p.Span.since(p.Now), p.Span.Bin, names...)
		if err != nil {
			return err
		}
		byName := make([][]binRow, len(names))
		for _, b := range bins {
			byName[at[b.Name]] = append(byName[at[b.Name]], b)
		}
		for i := range p.Limits {
			p.AnyFailed = p.AnyFailed || p.Limits[i].Failed > 0
			p.Limits[i].Spark = draw(byName[i], p.Span, p.Now)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(p.Limits) > 0 {
		first := p.Limits[0]
		p.Total, p.Granted, p.Denied = first.Total, first.AllGrants, first.AllDenied
		p.First, p.Last = (p.Page-1)*limitsPerPage+1, (p.Page-1)*limitsPerPage+len(p.Limits)
		if p.Page > 1 {
			p.Previous = p.Page - 1
		}
		if int64(p.Last) < p.Total {
			p.Next = p.Page + 1
		}
		p.Many = p.Total >= maxNames
	} else if p.Page > 1 {
		return notFound()
	}
	return c.show(http.StatusOK, "limits", p)
}

type limitPage struct {
	layout
	Name        string
	Search      string
	Span        span
	Spans       []span
	Sum         binRow
	Series      string
	Definitions []definitionRow // first those that count
	Defined     bool            // a definition counts
	Varies      bool            // the keys may have numbers of their own
	Denied      []keyRow
	Found       []keyRow
	More        bool // there are more than were found
	InForce     []overrideRow
	ForEvery    *overrideRow // the one in force for every key
	Shown       shownOverrides
	History     []overrideRow
	HistoryFull bool
	Every       bool // the forms are for every key
	Reach       reach
}

// reach says whom an override of every key does not reach.
type reach struct {
	KeysWith int  // with an override of their own in force
	More     bool // there are more than that
}

func reachOf(inForce []overrideRow) reach {
	r := reach{More: len(inForce) == maxOverrides}
	before := ""
	for _, o := range inForce { // by key
		if o.Key != nil && *o.Key != before {
			r.KeysWith++
			before = *o.Key
		}
	}
	return r
}

// varies reports whether keys of a limit may have numbers of their own. One program that says so is enough.
func varies(definitions []definitionRow) bool {
	return slices.ContainsFunc(definitions, func(d definitionRow) bool { return d.Current && d.Varies })
}

// limit is the page of one limit.
func (c *visit) limit(a asked) error {
	if a.name == "" {
		return notFound()
	}
	if c.r.Method == http.MethodPost {
		return c.change(a, "")
	}
	return c.showLimit(http.StatusOK, a, form{}, "")
}

func (c *visit) showLimit(status int, a asked, f form, problem string) error {
	p := limitPage{layout: c.layout(visibly(a.name)), Name: a.name, Search: a.search, Spans: limitSpans, Span: pick(limitSpans, a.span, 0), Every: true}
	p.Refresh, p.Form, p.Problem, p.Done = 5, f, problem, done[a.done]
	err := c.read(func(ctx context.Context, tx pgx.Tx) (err error) {
		if p.Now, err = queryNow(ctx, tx); err != nil {
			return err
		}
		bins, err := queryBins(ctx, tx, p.Span.since(p.Now), p.Span.Bin, a.name)
		if err != nil {
			return err
		}
		for _, b := range bins {
			p.Sum.Granted += b.Granted
			p.Sum.Denied += b.Denied
			p.Sum.Failed += b.Failed
			p.Sum.Tokens += b.Tokens
			p.Sum.Refunded += b.Refunded
			p.Sum.Waited += b.Waited
		}
		p.Series = series(bins, p.Span, p.Now)
		if p.Definitions, err = queryDefinitions(ctx, tx, a.name); err != nil {
			return err
		}
		p.Defined, p.Varies = len(p.Definitions) > 0 && p.Definitions[0].Counts, varies(p.Definitions)
		if p.InForce, err = queryOverridesInForce(ctx, tx, a.name, p.Now); err != nil {
			return err
		}
		if p.History, err = queryHistory(ctx, tx, a.name); err != nil {
			return err
		}
		p.HistoryFull = len(p.History) == maxOverrides
		p.Reach = reachOf(p.InForce)
		for i := range p.InForce {
			p.InForce[i].Now = p.Now
		}
		if p.ForEvery, p.Shown, err = queryOverride(ctx, tx, a.name, "", p.Now); err != nil {
			return err
		}
		for i := range p.History {
			p.History[i].Now = p.Now
		}
		if len(p.Definitions) == 0 && len(p.History) == 0 && len(bins) == 0 {
			some, err := queryKeys(ctx, tx, a.name, "")
			if err != nil {
				return err
			}
			if len(some) == 0 {
				return &refusal{status: http.StatusNotFound, title: "There is no such limit", text: "Nothing is known of a limit of this name: no program has published it, nothing was counted, and no key has used it."}
			}
		}
		if p.Denied, err = queryDenied(ctx, tx, a.name, p.Now.Add(-p.Span.Length), a.search); err != nil {
			return err
		}
		if a.search != "" {
			if p.Found, err = queryKeys(ctx, tx, a.name, a.search); err != nil {
				return err
			}
			p.More = len(p.Found) == maxKeys
		}
		for i := range p.Denied {
			p.Denied[i].Share = float64(*p.Denied[i].Denied) / float64(*p.Denied[0].Denied)
		}
		if !p.Defined || len(p.Denied)+len(p.Found) == 0 {
			return nil
		}
		var keys []string
		for _, k := range p.Denied {
			keys = append(keys, k.Key)
		}
		for _, k := range p.Found {
			keys = append(keys, k.Key)
		}
		left, err := queryStates(ctx, tx, a.name, keys, p.Now)
		if err != nil {
			return err
		}
		for _, list := range [][]keyRow{p.Denied, p.Found} {
			for i, k := range list {
				list[i].setState(left[k.Key])
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return c.show(status, "limit", p)
}

// usage is the chart of a limit as JSON, for a script that asks every second.
func (c *visit) usage(a asked) error {
	s := pick(limitSpans, a.span, 0)
	var bins []binRow
	var now time.Time
	err := c.read(func(ctx context.Context, tx pgx.Tx) (err error) {
		if now, err = queryNow(ctx, tx); err == nil {
			bins, err = queryBins(ctx, tx, s.since(now), s.Bin, a.name)
		}
		return err
	})
	if err != nil {
		return err
	}
	c.w.Header().Set("Content-Type", "application/json")
	_, err = c.w.Write([]byte(series(bins, s, now)))
	if err != nil {
		return nil //nolint:nilerr // the reader has gone
	}
	return nil
}

// series are the columns of a chart as JSON: seconds since 1970, granted, and denied.
func series(bins []binRow, s span, now time.Time) string {
	n := int(s.Length / s.Bin)
	columns := [3][]int64{make([]int64, n), make([]int64, n), make([]int64, n)}
	for i := range n {
		columns[0][i] = s.since(now).Add(time.Duration(i) * s.Bin).Unix()
	}
	for _, b := range bins {
		if i := int(b.At.Sub(s.since(now)) / s.Bin); i >= 0 && i < n {
			columns[1][i] += b.Granted
			columns[2][i] += b.Denied
		}
	}
	return asJSON(map[string]any{"bin": int(s.Bin.Seconds()), "data": columns})
}

func asJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil { // no number of ours is NaN or infinite
		return "null"
	}
	return string(text)
}

type keyPage struct {
	layout
	Name, Key   string
	Definitions []definitionRow // that programs have now: first those that count
	Balance     *balanceRow     // nil: no program defines the limit
	Varies      bool            // the key may have numbers of its own
	Given       givenNumbers    // the numbers that the reader says are its own
	IsGiven     bool            // there are some, and they are valid
	Level       int             // the balance in percent of the capacity
	Curve       string
	Override    *overrideRow // in force
	Shown       shownOverrides
	Holds       []holdRow
	AllHolds    int64 // those that are not shown, too
	History     []overrideRow
	HistoryFull bool
	Hours       string // the denials by hour
	Denied      int64
	LastDenied  *time.Time
	Every       bool
	Reach       reach
	Keys        int  // of the limit, if no key was asked for
	More        bool // there are more than that
	NoKey       bool // the limit has keys, and no row without one
}

// MoreHolds reports whether there are holds that are not shown.
func (p *keyPage) MoreHolds() bool { return p.AllHolds > int64(len(p.Holds)) }

// key is the page of one key of a limit.
func (c *visit) key(a asked) error {
	if a.name == "" {
		return notFound()
	}
	if c.r.Method == http.MethodPost {
		return c.change(a, a.key)
	}
	return c.showKey(http.StatusOK, a, form{}, "")
}

func (c *visit) showKey(status int, a asked, f form, problem string) error {
	p := keyPage{layout: c.layout(shown(a.key) + " – " + visibly(a.name)), Name: a.name, Key: a.key, Every: a.key == "", Given: a.given}
	p.Refresh, p.Form, p.Problem, p.Done = 2, f, problem, done[a.done]
	err := c.read(func(ctx context.Context, tx pgx.Tx) (err error) {
		if p.Now, err = queryNow(ctx, tx); err != nil {
			return err
		}
		all, err := queryDefinitions(ctx, tx, a.name)
		if err != nil {
			return err
		}
		for _, d := range all {
			if d.Current {
				p.Definitions = append(p.Definitions, d)
			}
		}
		var given *keystate.Given
		if p.Varies = varies(all); p.Varies {
			if given, err = a.given.parse(p.Definitions[0].Kind); err != nil {
				status, p.Problem = http.StatusBadRequest, strings.TrimSpace(p.Problem+" "+explain(err).text)
			}
			p.IsGiven = given != nil
		}
		if len(p.Definitions) > 0 {
			if p.Balance, err = queryBalance(ctx, tx, a.name, a.key, given, p.Now); err != nil {
				return err
			}
		}
		if p.Override, p.Shown, err = queryOverride(ctx, tx, a.name, a.key, p.Now); err != nil {
			return err
		}
		if p.Holds, p.AllHolds, err = queryHolds(ctx, tx, a.name, a.key, p.Now); err != nil {
			return err
		}
		if p.History, err = queryKeyHistory(ctx, tx, a.name, a.key); err != nil {
			return err
		}
		p.HistoryFull = len(p.History) == maxOverrides
		if a.key == "" {
			inForce, err := queryOverridesInForce(ctx, tx, a.name, p.Now)
			if err != nil {
				return err
			}
			p.Reach = reachOf(inForce)
			keys, err := queryKeys(ctx, tx, a.name, "")
			if err != nil {
				return err
			}
			p.Keys, p.More = len(keys), len(keys) == maxKeys
			if p.NoKey = p.Keys > 0 && keys[0].Key != ""; !p.NoKey { // '' is the first of all
				p.Keys = max(p.Keys-1, 0)
			}
		}
		for i := range p.History {
			p.History[i].Now = p.Now
		}
		if p.Override != nil {
			p.Override.Now = p.Now
		}
		hours, err := queryKeyDenials(ctx, tx, a.name, a.key)
		if err != nil {
			return err
		}
		var bins []binRow
		for _, h := range hours {
			bins = append(bins, binRow{At: h.Hour, Denied: h.Denied})
			p.Denied += h.Denied
			p.LastDenied = &h.LastDenied
		}
		if p.Denied > 0 {
			p.Hours = series(bins, span{Length: 48 * time.Hour, Bin: time.Hour}, p.Now)
		}
		return p.drawBalance(ctx, tx, given)
	})
	if err != nil {
		return err
	}
	return c.show(status, "key", &p)
}

// drawBalance computes the curve from the last use until the key is full, or a part of it around now.
func (p *keyPage) drawBalance(ctx context.Context, tx pgx.Tx, given *keystate.Given) error {
	b := p.Balance
	if b == nil || b.Remaining == nil || b.Seconds == nil {
		return nil
	}
	if *b.Capacity > 0 {
		p.Level = int(min(max(100**b.Remaining / *b.Capacity, 0), 100))
	}
	if b.Rate == nil || b.LastUse == nil || p.Override != nil && p.Override.Effect != "numbers" {
		return nil
	}
	const longest = 200 * 365 * 24 * time.Hour
	whole := time.Duration(min(math.Ceil(max(*b.Capacity, 1) / *b.Rate)**b.Seconds*1e9, float64(longest)/2)) // until an empty one is full
	if b.Kind == "token bucket" {
		whole = time.Duration(min(*b.Capacity / *b.Rate * *b.Seconds * 1e9, float64(longest)/2))
	}
	from, to := *b.LastUse, p.Now.Add(whole/4)
	if b.FullAt != nil {
		to = b.FullAt.Add(b.FullAt.Sub(from) / 12)
	}
	if o := p.Override; o != nil && o.Until != nil && o.Until.Before(to) {
		to = *o.Until // then other numbers are in force
	}
	if earliest := p.Now.Add(-whole); from.Before(earliest) {
		from = earliest
	}
	if !to.After(from) || to.Sub(from) > longest || to.Year() > 9000 {
		return nil
	}
	points, err := keystate.Curve(ctx, tx, p.Name, p.Key, p.Now, given, from, to)
	if err != nil || len(points) == 0 {
		return err
	}
	var at, tokens []float64
	for _, point := range points {
		if math.IsInf(point.Remaining, 0) || math.IsNaN(point.Remaining) {
			return nil
		}
		at = append(at, float64(point.At.UnixMicro())/1e6)
		tokens = append(tokens, point.Remaining)
	}
	p.Curve = asJSON(map[string]any{"now": float64(p.Now.UnixMicro()) / 1e6, "capacity": *b.Capacity, "steps": b.Kind != "token bucket", "data": [][]float64{at, tokens}})
	return nil
}
