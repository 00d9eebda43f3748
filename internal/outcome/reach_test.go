package outcome

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestWhatSaysThatTheDatabaseIsUnreachable(t *testing.T) {
	dial := func(errno syscall.Errno) error {
		return fmt.Errorf("ratelimit: consume: %w", &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)})
	}
	for name, row := range map[string]struct {
		err  error
		want bool
	}{
		"nobody listens":                        {dial(syscall.ECONNREFUSED), true},
		"no socket":                             {dial(syscall.ENOENT), true},
		"no route":                              {dial(syscall.EHOSTUNREACH), true},
		"no such name":                          {&net.OpError{Op: "dial", Err: &net.DNSError{IsNotFound: true}}, true},
		"starting":                              {&pgconn.PgError{Code: "57P03"}, true},
		"no answer of the name server":          {&net.OpError{Op: "dial", Err: &net.DNSError{IsTimeout: true}}, false},
		"no more files here":                    {dial(syscall.EMFILE), false},
		"no more ports here":                    {dial(syscall.EADDRNOTAVAIL), false},
		"one host refuses, one is too slow":     {errors.Join(dial(syscall.ECONNREFUSED), context.DeadlineExceeded), false},
		"one host refuses, one is full":         {errors.Join(dial(syscall.ECONNREFUSED), &pgconn.PgError{Code: "53300"}), false},
		"all hosts refuse":                      {errors.Join(dial(syscall.ECONNREFUSED), dial(syscall.EHOSTUNREACH)), true},
		"one refuses, one resets":               {errors.Join(dial(syscall.ECONNREFUSED), &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}), false},
		"one is not in DNS, one breaks off":     {errors.Join(&net.DNSError{IsNotFound: true}, io.EOF), false},
		"a standby starts, the primary is full": {errors.Join(&pgconn.PgError{Code: "57P03"}, &pgconn.PgError{Code: "53300"}), false},
		"no route for IPv6, no ports for IPv4":  {errors.Join(dial(syscall.ENETUNREACH), dial(syscall.EADDRNOTAVAIL)), false},
		"a broken connection":                   {&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}, false},
		"too many connections":                  {&pgconn.PgError{Code: "53300"}, false},
		"a lock timeout":                        {&pgconn.PgError{Code: "55P03"}, false},
		"no such function":                      {&pgconn.PgError{Code: "42883"}, false},
		"no right":                              {&pgconn.PgError{Code: "42501"}, false},
		"a timeout":                             {context.DeadlineExceeded, false},
		"closed":                                {errors.Join(ratelimit.ErrClosed, dial(syscall.ECONNREFUSED)), false},
	} {
		if got := Unreachable(ratelimit.SQL(nil), row.err); got != row.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
