package migrationgen

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Write generates the files in a directory of migrations.
func Write(dir string) error {
	stale, err := outOfDate(dir)
	if err != nil {
		return err
	}
	for name, text := range stale {
		file := filepath.Join(dir, name)
		if text == "" {
			err = os.Remove(file)
		} else {
			err = os.WriteFile(file, []byte(text), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Check fails if Write would change anything.
func Check(dir string) error {
	stale, err := outOfDate(dir)
	if err == nil && len(stale) > 0 {
		err = fmt.Errorf("out of date, run make generate: %s", strings.Join(slices.Sorted(maps.Keys(stale)), ", "))
	}
	return err
}

func outOfDate(dir string) (map[string]string, error) {
	files, err := Files(os.DirFS(dir))
	if err != nil {
		return nil, err
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if string(got) == want {
			delete(files, name)
		}
	}
	return files, nil
}
