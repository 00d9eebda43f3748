package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// BuiltTool is the path of txlimit, which is built once for all tests. removeTool removes it.
var BuiltTool = sync.OnceValues(func() (binary string, err error) {
	dir, err := os.MkdirTemp("", "txlimit-tool-")
	if err != nil {
		return "", err
	}
	toolDir = dir
	binary = filepath.Join(dir, "txlimit")
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/txlimit").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return binary, nil
})

var toolDir string

func removeTool() error {
	if toolDir == "" {
		return nil
	}
	return os.RemoveAll(toolDir)
}
