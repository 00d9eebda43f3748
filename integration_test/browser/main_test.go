// Package browser_test uses the console in a real browser: Chromium, headless, by chromedp. It takes two minutes, and only make console
// runs it. That fails without a Chromium.
package browser_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/txlimit/txlimit/internal/postgres"
)

var (
	server   *postgres.Server
	chromium string // its path
)

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Getenv(storyURL) != "" {
		return program()
	}
	if os.Getenv("TXLIMIT_BROWSER") == "" {
		fmt.Println("the tests in a browser are run by make console")
		return 0
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			chromium = path
			break
		}
	}
	if chromium == "" {
		fmt.Fprintln(os.Stderr, "there is no chromium: apt-get install chromium")
		return 1
	}
	return postgres.RunTests(m, &server)
}
