package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

const (
	module      = "github.com/txlimit/txlimit"
	unoptimized = "-gcflags=" + module + "/...=-N -l"
)

// compiled is a package's tests, compiled without a mutation, and the archives that they are linked from.
type compiled struct {
	binary   string
	main     string            // the archive of the main package
	archives map[string]string // by import path
	variants map[string]bool   // the import paths that are compiled together with tests
}

// unmutated compiles the tests of a package. It must be called for the first time while there is no mutation.
func (l *lab) unmutated(ctx context.Context, pkg string) (*compiled, error) {
	if c := l.compiled[pkg]; c != nil {
		return c, nil
	}
	c := &compiled{binary: l.path(pkg), archives: map[string]string{}, variants: map[string]bool{}}
	list, err := l.goCommand(ctx, "list", "-test", "-deps", "-export", unoptimized,
		"-f", `{{if .Export}}{{.ImportPath}}|{{.Export}}{{end}}`, "./"+pkg)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(list) {
		name, archive, _ := strings.Cut(strings.TrimSpace(line), "|")
		importPath, _, variant := strings.Cut(name, " [") // p [q.test]: p as the tests of q are linked with it
		if variant || c.archives[importPath] == "" {
			c.archives[importPath], c.variants[importPath] = archive, variant
		}
	}
	c.main = c.archives[path.Join(module, pkg)+".test"]
	if err := l.link(ctx, c, c.binary, "", ""); err != nil {
		return nil, err
	}
	l.compiled[pkg] = c
	return c, nil
}

// binary returns the tests of a package, compiled with the present mutation.
//
// Of a Go file's mutation, the file's package is compiled, and linked with all else as it is without the mutation. (To compile
// whatever imports ratelimit takes eight times as long.) The linker refuses this if the edit changes what the others were
// compiled with, as a constant. Then, and if the tests are in this package, Go compiles what it must.
func (l *lab) binary(ctx context.Context, pkg string) (binary string, err error) {
	c, err := l.unmutated(ctx, pkg)
	if err != nil {
		return "", err
	}
	if l.goFile == "" {
		return c.binary, nil
	}
	folder := path.Dir(l.goFile)
	importPath := path.Join(module, folder)
	binary = l.path(pkg + "_mutant")
	if !c.variants[importPath] {
		archive, err := l.goCommand(ctx, "list", "-export", unoptimized, "-f", "{{.Export}}", "./"+folder)
		if err != nil {
			return "", err
		}
		if c.archives[importPath] == "" {
			return c.binary, nil // it is not part of the tests, which perhaps run it
		}
		err = l.link(ctx, c, binary, importPath, strings.TrimSpace(archive))
		if err == nil || !strings.Contains(err.Error(), "fingerprint mismatch") {
			return binary, err
		}
	}
	_, err = l.goCommand(ctx, "test", "-c", "-vet=off", unoptimized, "-ldflags=-s -w", "-o", binary, "./"+pkg)
	return binary, err
}

// link links the tests, with another archive in place of one package's.
func (l *lab) link(ctx context.Context, c *compiled, binary, instead, archive string) error {
	var config bytes.Buffer
	for of, from := range c.archives {
		if of == instead {
			from = archive
		}
		fmt.Fprintf(&config, "packagefile %s=%s\n", of, from)
	}
	if err := os.WriteFile(binary+".cfg", config.Bytes(), 0o600); err != nil {
		return err
	}
	_, err := l.goCommand(ctx, "tool", "link", "-s", "-w", "-X", "testing.testBinary=1", "-importcfg", binary+".cfg", "-o", binary, c.main)
	return err
}

// path returns where the binary of this name is.
func (l *lab) path(name string) string {
	return filepath.Join(l.dir, strings.ReplaceAll(name, "/", "_")+".test")
}

func (l *lab) goCommand(ctx context.Context, args ...string) (output string, err error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = l.dir, &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go %s: %w:\n%s%s", args[0], err, out.Bytes(), errs.Bytes())
	}
	return out.String(), nil
}
