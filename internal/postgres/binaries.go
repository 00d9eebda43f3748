package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// installed are the directories outside PATH in which packages install server
// binaries. Debian and Homebrew keep several versions side by side, and Debian
// has none of them in PATH.
var installed = []string{
	"/usr/lib/postgresql/*/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
}

// startBinaries runs a throwaway cluster with the server binaries of this machine.
func startBinaries(ctx context.Context) (*Server, error) {
	bin, err := findBinaries(installed)
	if err != nil {
		return nil, err
	}
	return startCluster(ctx, bin, "throwaway cluster from "+bin)
}

func findBinaries(patterns []string) (string, error) {
	if bin := os.Getenv(envBin); bin != "" {
		bin, err := filepath.Abs(bin) // the server starts in another directory
		if err != nil {
			return "", err
		}
		if !holdsServer(bin) {
			return "", fmt.Errorf("%s is %s, and that directory does not hold the programs initdb and postgres", envBin, bin)
		}
		return bin, nil
	}

	if initdb, err := exec.LookPath("initdb"); err == nil {
		// The program in PATH may be a link into a directory with all programs.
		if target, err := filepath.EvalSymlinks(initdb); err == nil {
			if bin, err := filepath.Abs(filepath.Dir(target)); err == nil && holdsServer(bin) {
				return bin, nil
			}
		}
	}
	for _, pattern := range patterns {
		dirs, _ := filepath.Glob(pattern) // fails only for a malformed pattern
		slices.SortStableFunc(dirs, func(a, b string) int { return cmp.Compare(versionOf(b), versionOf(a)) })
		for _, dir := range dirs {
			if holdsServer(dir) {
				return dir, nil
			}
		}
	}
	return "", errors.New("no initdb and postgres in PATH, /usr/lib/postgresql or Homebrew; install a PostgreSQL server " +
		"(apt-get install postgresql, brew install postgresql), or set " + envBin + " to the directory of its programs")
}

// holdsServer reports whether dir has the two programs that a cluster needs.
func holdsServer(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return false
		}
	}
	return true
}

var versionInPath = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// versionOf returns 17 for /usr/lib/postgresql/17/bin or .../postgresql@17/bin,
// and 0 for a directory without a number.
func versionOf(binDir string) float64 {
	v, _ := strconv.ParseFloat(versionInPath.FindString(filepath.Base(filepath.Dir(binDir))), 64)
	return v
}
