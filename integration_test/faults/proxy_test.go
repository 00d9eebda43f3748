package faults_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// proxy is a proxy between clients and a server that behaves like a bad network.
type proxy struct {
	listener net.Listener
	target   atomic.Value // host:port
	gate     sync.RWMutex // nothing passes while it is locked
	decide   func() fate  // called for each message of a client
	armed    atomic.Int32 // the fate of a client's next message
}

// fate is what happens to a message of a client.
type fate int32

const (
	passes       fate = iota
	isLost            // it does not reach the server; both connections are closed
	isCut             // it reaches the server; both connections are closed at once
	losesAnswer       // it reaches the server, which answers; then both connections are closed, and the answer is lost
	neverAnswers      // it reaches the server, whose answers never arrive; no connection is closed
)

// newProxy makes a proxy in front of the server of a config.
func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener}
	p.lead(target)
	p.decide = func() fate { return fate(p.armed.Swap(int32(passes))) }
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go p.link(client)
		}
	}()
	t.Cleanup(func() { listener.Close() })
	return p
}

// lead sets the server for new connections.
func (p *proxy) lead(target string) { p.target.Store(target) }

// dial makes a client connect through the proxy, whatever its URL.
func (p *proxy) dial(c *pgx.ConnConfig) {
	c.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp4", p.listener.Addr().String())
	}
}

// Dial is dial for lib/pq.
func (p *proxy) Dial(_, _ string) (net.Conn, error) {
	return net.Dial("tcp4", p.listener.Addr().String())
}

// DialTimeout is dial for lib/pq.
func (p *proxy) DialTimeout(_, _ string, _ time.Duration) (net.Conn, error) { return p.Dial("", "") }

// next sets the fate of a client's next message.
func (p *proxy) next(f fate) { p.armed.Store(int32(f)) }

func (p *proxy) link(client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp4", p.target.Load().(string))
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	var f atomic.Int32
	go func() {
		defer func() { _ = client.Close() }()
		defer func() { _ = server.Close() }()
		for buf := make([]byte, 1<<16); ; {
			n, err := server.Read(buf)
			p.gate.RLock()
			p.gate.RUnlock() //nolint:staticcheck // the locked section is empty: it waits until the gate is open
			if fate(f.Load()) == neverAnswers && err == nil {
				continue
			}
			if err != nil || fate(f.Load()) == losesAnswer {
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	for buf := make([]byte, 1<<16); ; {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		p.gate.RLock()
		p.gate.RUnlock() //nolint:staticcheck // the locked section is empty: it waits until the gate is open
		if decided := p.decide(); decided == isLost {
			return
		} else if decided != passes {
			f.Store(int32(decided))
		}
		if _, err := server.Write(buf[:n]); err != nil || fate(f.Load()) == isCut {
			return
		}
	}
}
