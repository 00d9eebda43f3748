package plproxy_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

var shBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// TestThePage runs the commands of docs/plproxy.md, in order, on new servers. Then it uses what they made, as the page's role.
func TestThePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/plproxy.md")
	if err != nil {
		t.Fatal(err)
	}
	var servers []*postgres.Breakable
	env := append(os.Environ(), "PGUSER=postgres")
	for _, name := range []string{"PROXY", "A", "B", "C", "D"} {
		s, err := postgres.NewBreakable(t.Context(), postgres.BreakableConfig{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		servers = append(servers, s)
		env = append(env, fmt.Sprintf("%s=%s", name, strings.Replace(connection(s), " user=postgres", "", 1)))
	}
	blocks := shBlock.FindAllSubmatch(page, -1)
	if len(blocks) < 6 {
		t.Fatalf("the page has %d blocks of commands", len(blocks))
	}
	url := strings.Replace(servers[0].URL(), "postgres@", "app@", 1)
	db := pool(t, url, 4)
	coalescer := &ratelimit.Coalescer{Pool: db}
	t.Cleanup(coalescer.Close)
	limiter := &ratelimit.Limiter{}
	limit := ratelimit.TokenBucket("page", 5, never)
	for i, block := range blocks {
		cmd := execCommand(t.Context(), env, string(block[1]))
		output, err := cmd.CombinedOutput()
		t.Logf("%s%s", block[1], output)
		if err != nil {
			t.Fatal(err)
		}
		if i < 3 {
			continue
		}
		errs := make(chan error)
		for i := range 30 { // the same keys again after each step, as the role app
			go func() {
				_, err := limiter.Consume(context.WithoutCancel(t.Context()), coalescer, limit.Key(fmt.Sprint(i)))
				errs <- err
			}()
		}
		for range 30 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	}
	for i := range 30 {
		want := 5.0 - float64(len(blocks)-3)
		if left := balance(t, limiter, db, limit.Key(fmt.Sprint(i))).Remaining; left < want || left > want+0.1 {
			t.Errorf("key %d: %v remain, want %v", i, left, want)
		}
	}
}

func execCommand(ctx context.Context, env []string, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "bash", "-euc", script)
	cmd.Dir, cmd.Env = "../..", env
	return cmd
}
