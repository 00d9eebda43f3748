package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"

	"github.com/txlimit/txlimit/internal/shardpick"
)

// Hot makes [Limiter.InTx] and [Limiter.InSQLTx] queue: transactions on the same hot limit and key wait their turn in the
// process, before a connection is taken, in order of arrival. The queue is the [Limiter]'s: use one for all of the process.
// Name the limits that many transactions want at once; elsewhere there is nothing to gain. `go run ./bench hot_queue_vs_retry`
// prints what it is worth.
//
// A turn is all of a transaction, wherever in it Consume stands: keep it short, and let Consume come first, which saves BEGIN's
// round trip. Where other statements take their time before the limit, READ COMMITTED without Hot commits more (`go run ./bench
// hot_queue_vs_update`); each that waits holds a connection then.
//
// A row can be held by one transaction at a time, until its commit is on disk. Without the queue, all who want it take a
// connection each to wait on, and at the levels above READ COMMITTED most of them wait in vain and must run again. With it,
// no more than two of a process are past the queue: one that runs, and one whose first statement waits in the database. There
// they take turns with those of other processes. The snapshot is taken when the turn has come, after the one before has
// committed: so transactions that queue for the same limit do not conflict over it. (SERIALIZABLE ones of several processes
// seldom do, if they meet in the last instant of a COMMIT; they run again. now() is when the wait began.) Up to their first
// statements, the functions of both may run at the same time.
//
// How much the requests ask for does not matter, and nothing is consumed: that is for fn to do, with the context that it is
// given. Of a limit with shards, InTx chooses one when it queues, of two at random that with the shorter queue in this
// process, and Consume with fn's context takes from that one. So one transaction of a process runs for each shard. If the
// shard lacks tokens, Consume takes from all of them, and can conflict with the other turns; and so can a key's first use,
// which makes all rows.
//
// The turn ends with the transaction, whatever becomes of it; an attempt that has to run again queues anew. If ctx ends
// before it is there, so does InTx, with an error that matches ctx's. Requests that are wrong in themselves, and InTx with
// Hot inside the function of another with Hot, which could wait for itself, are errors that match [ErrInvalid]. (Inside one
// without, it waits for itself if that has consumed.) Transactions that use the limit without Hot are not in the queue, and can
// conflict with those that are.
//
// Several of this option add up. Without a request there is no queue.
//
// In the database, the turn is a lock on one of the views rate_limits_turn_00 to _31 of package migrations, by LOCK TABLE in
// BEGIN's round trip, or with database/sql, or a db that is not pgx's, in one of its own, before fn. The role needs UPDATE on
// them. The lock belongs to the transaction, so that transaction poolers such as PgBouncer do no harm. Different limits and keys
// may meet on a view; then they take turns. lock_timeout and statement_timeout end the wait there, with their own errors.
func Hot(requests ...Request) TxOption {
	return func(o *txOptions) { o.hot = append(o.hot, requests...) }
}

// turns is what a transaction with these options has to queue for.
func (o txOptions) turns(ctx context.Context) ([]demand, error) {
	if len(o.hot) == 0 {
		return nil, nil
	}
	if ctx.Value(turnKey{}) != nil {
		return nil, fmt.Errorf("%w: a transaction with Hot, in the function of another with Hot, could wait for itself", ErrInvalid)
	}
	return demands(VerbReset, o.hot) // which does not look at how much is asked for, either
}

// stripes is how many views there are to lock.
const stripes = 32

// turn is what a transaction has queued for. Its context carries it.
type turn []lane

// String names the limits, but not the keys, which may be personal data.
func (t turn) String() string {
	var names []string
	for _, n := range t {
		names = append(names, n.name)
	}
	return strings.Join(slices.Compact(names), ", ")
}

// lane is what is queued for: a limit, a key and, if the limit has shards, one of them.
type lane struct {
	name, key     string
	shard, shards int
}

// stripe is the number of the view that is locked for the lane. The shards of a limit lie side by side, so that they do not
// meet. All versions of this library must agree on it.
func (n lane) stripe() int {
	h := fnv.New32a()
	h.Write([]byte(n.name))
	h.Write([]byte{0})
	h.Write([]byte(n.key))
	return int((h.Sum32() + uint32(n.shard)) % stripes)
}

// places is how many transactions may be past the queue: one that runs, and one that waits for it in the database, so that
// no round trip lies between the end of one and the begin of the next. With the server on the same machine 1 and 2 are
// equally fast; with half a millisecond in between, 1 has three quarters of the throughput of 2, and 3 has no more. The
// transactions of other shards fill such pauses: with ten of them 1 is as fast as 2 or faster, for half the connections.
func (n lane) places() int {
	if n.shards > 1 {
		return 1
	}
	return 2
}

// views are those to lock for the turn, in the order of their numbers, which is everybody's.
func (t turn) views() []string {
	var numbers []int
	for _, n := range t {
		numbers = append(numbers, n.stripe())
	}
	slices.Sort(numbers)
	var views []string
	for _, number := range slices.Compact(numbers) {
		views = append(views, fmt.Sprintf("rate_limits_turn_%02d", number))
	}
	return views
}

func lockQuery(views ...string) string {
	// The weakest mode that conflicts with itself.
	return "lock table " + strings.Join(views, ", ") + " in share update exclusive mode"
}

type turnKey struct{}

// hotShard is the shard that the transaction of this context has queued for, if it has.
func hotShard(ctx context.Context, limit Limit, key string) (shard int, ok bool) {
	t, _ := ctx.Value(turnKey{}).(turn)
	for _, n := range t {
		if n.name == limit.name && n.key == key && n.shards == limit.shards {
			return n.shard, true
		}
	}
	return 0, false
}

// queues holds the queues of a process, by stripe: lanes that meet on a view take turns in any case, and here they do not hold
// connections meanwhile, however many keys somebody finds that meet. The zero value is ready. A queue has an entry as long as
// there is somebody in it.
type queues struct {
	mu       sync.Mutex
	byStripe map[int]*queue
}

type queue struct {
	past    int             // how many have been let pass and have not left
	waiting []chan struct{} // in order of arrival; closed when it is their turn
}

// enter waits for a turn on all demands. If it is granted, leave must be called when the transaction has ended.
//
// Queues are entered in everybody's order, each once, so that nobody waits in a circle.
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
			return nil, nil, fmt.Errorf("ratelimit: waiting for a turn on %s: %w", n.name, err)
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

// wait waits until the lane lets us pass, or until ctx is over.
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
	q.leave(n) // we were let pass at the same moment
	return ctx.Err()
}

// leave lets the next one in the lane's queue pass.
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
