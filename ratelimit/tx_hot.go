package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/shardpick"
)

// Hot makes [Limiter.InTx] and [Limiter.InSQLTx] queue: transactions on the same hot limit and key wait their turn in
// order of arrival, before they take a connection. The queue belongs to the [Limiter], so use one in the process.
//
// You hold the turn for the whole transaction: keep it short, and consume first, with fn's ctx. Hot consumes nothing.
// Transactions that use the limit without Hot can conflict. Several Hot options add up. If ctx ends while queued, the
// error is ctx's. Invalid requests, and Hot inside the function of another transaction with Hot, are [ErrInvalid].
//
// The role needs UPDATE on the turns' views: ratelimit.grant gives it with 'consume'.
func Hot(requests ...Request) TxOption {
	return txOption(func(o *txOptions) { o.hot, o.begins = append(o.hot, requests...), "Hot" })
}

// turns are the demands that a transaction with these options queues for.
func (o txOptions) turns(ctx context.Context) ([]demand, error) {
	if len(o.hot) == 0 {
		return nil, nil
	}
	if ctx.Value(turnKey{}) != nil {
		return nil, invalidCall(o.hot, "a transaction with Hot inside the function of another one with Hot could wait for itself")
	}
	if err := new(definitions).check(o.hot); err != nil {
		return nil, err
	}
	ds, _, err := demands(verbs[verbReset], o.hot, pgtype.Timestamptz{}) // Reset ignores counts, too
	return ds, err
}

// stripes is the number of views that can be locked.
const stripes = 32

// turn is the lanes that a transaction has queued for. Its context carries it.
type turn []lane

// String names the limits, but no keys, since they may be personal data.
func (t turn) String() string {
	var names []string
	for _, n := range t {
		names = append(names, n.name)
	}
	return strings.Join(slices.Compact(names), ", ")
}

// lane is one place to queue: a limit, a key and, if the limit has shards, one shard.
type lane struct {
	name, key     string
	shard, shards int
}

// stripe is the number of the view that is locked for the lane. The shards of a limit have consecutive views, so that they
// do not share one. All versions of this library must compute the same number.
func (n lane) stripe() int {
	h := fnv.New32a()
	h.Write([]byte(n.name))
	h.Write([]byte{0})
	h.Write([]byte(n.key))
	return int((h.Sum32() + uint32(n.shard)) % stripes)
}

// places is how many transactions may be past the queue. With 2, one runs while the next waits in the database, so no round
// trip lies between them: half a millisecond from the server, 1 place has three quarters of the throughput. With ten
// shards, 1 is as fast or faster, for half the connections.
func (n lane) places() int {
	if n.shards > 1 {
		return 1
	}
	return 2
}

// views are the views to lock for the turn. All transactions lock them in the order of their numbers.
func (t turn) views() []string {
	var numbers []int
	for _, n := range t {
		numbers = append(numbers, n.stripe())
	}
	slices.Sort(numbers)
	var views []string
	for _, number := range slices.Compact(numbers) {
		views = append(views, fmt.Sprintf("ratelimit.turn_%02d", number))
	}
	return views
}

func lockQuery(schema string, views ...string) string {
	// This is the weakest mode that conflicts with itself.
	sql, _ := inschema.Text("lock table "+strings.Join(views, ", ")+" in share update exclusive mode", schema) // inTx has checked the name
	return sql
}

type turnKey struct{}

// hotShard is the shard that the transaction of this context has queued for, if any.
func hotShard(ctx context.Context, limit Limit, key string) (shard int, ok bool) {
	t, _ := ctx.Value(turnKey{}).(turn)
	for _, n := range t {
		if n.name == limit.name && n.key == key && n.shards == limit.shards {
			return n.shard, true
		}
	}
	return 0, false
}

// queues holds the queues of a process, by stripe. Lanes that share a view take turns anyway. In one queue, they hold no
// connections meanwhile, even for many keys of an attacker. The zero value is ready. A queue exists only while a
// transaction is in it.
type queues struct {
	mu       sync.Mutex
	byStripe map[int]*queue
}

type queue struct {
	past    int             // transactions that have passed and not left
	waiting []chan struct{} // in order of arrival; closed when the turn comes
}

// enter waits for a turn on all demands. If err is nil, the caller must call leave when the transaction has ended.
//
// All transactions enter their queues in the same order, each queue once, so none wait in a circle.
func (q *queues) enter(ctx context.Context, hot []demand) (t turn, leave func(), err error) {
	var entered []lane
	leave = func() {
		for _, n := range entered {
			q.leave(n)
		}
	}
	t = q.choose(ctx, hot)
	for i, n := range t {
		if i > 0 && n.stripe() == t[i-1].stripe() {
			continue
		}
		if err := q.wait(ctx, n); err != nil {
			leave()
			return nil, nil, fmt.Errorf("ratelimit: waiting for a turn on limit %q: %w", n.name, err)
		}
		entered = append(entered, n)
	}
	return t, leave, nil
}

// choose picks the lanes, sorted by stripe.
func (q *queues) choose(ctx context.Context, hot []demand) turn {
	q.mu.Lock()
	defer q.mu.Unlock()
	var t turn
	for _, d := range hot {
		n := lane{d.limit.name, d.key, 0, d.limit.shards}
		if n.shards > 1 {
			other := n
			n.shard, other.shard = shardpick.Two(ctx, n.shards)
			if q.length(other) < q.length(n) {
				n = other
			}
		}
		t = append(t, n)
	}
	slices.SortFunc(t, func(a, b lane) int {
		return cmp.Compare(a.stripe(), b.stripe())
	})
	return t
}

// length is how many are in a lane's queue, waiting or past it. q.mu is held.
func (q *queues) length(n lane) int {
	if l := q.byStripe[n.stripe()]; l != nil {
		return l.past + len(l.waiting)
	}
	return 0
}

// wait waits until the lane lets the caller pass, or until ctx ends.
func (q *queues) wait(ctx context.Context, n lane) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stripe := n.stripe()
	q.mu.Lock()
	l := q.byStripe[stripe]
	if l == nil {
		if q.byStripe == nil {
			q.byStripe = map[int]*queue{}
		}
		l = &queue{}
		q.byStripe[stripe] = l
	}
	if l.past < n.places() && len(l.waiting) == 0 {
		l.past++
		q.mu.Unlock()
		return nil
	}
	pass := make(chan struct{})
	l.waiting = append(l.waiting, pass)
	q.mu.Unlock()
	select {
	case <-pass:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	if i := slices.Index(l.waiting, pass); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		q.mu.Unlock()
		return ctx.Err()
	}
	q.mu.Unlock()
	q.leave(n) // the turn came at the same moment
	return ctx.Err()
}

// leave lets the next transaction in the lane's queue pass.
func (q *queues) leave(n lane) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.byStripe[n.stripe()]
	if len(l.waiting) > 0 {
		close(l.waiting[0])
		l.waiting = slices.Delete(l.waiting, 0, 1)
		return
	}
	if l.past--; l.past == 0 {
		delete(q.byStripe, n.stripe())
	}
}
