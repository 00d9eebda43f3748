//go:build ignore

// This program prints schema.sql: the Up part of every migration, in order, without goose's annotations.
package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	files, err := filepath.Glob("0*.sql") // sorted
	if err != nil || len(files) == 0 {
		log.Fatalf("no migrations here: %v", err)
	}
	fmt.Print("-- Code generated from the goose migrations by `make generate`; DO NOT EDIT.\n" +
		"--\n-- For psql and other tools: psql -1 -v ON_ERROR_STOP=1 -f schema.sql\n")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			log.Fatal(err)
		}
		up, _, found := strings.Cut(string(text), "-- +goose Down")
		if !found {
			log.Fatalf("%s has no Down part", file)
		}
		fmt.Printf("\n-- %s\n", file)
		for line := range strings.Lines(up) {
			if !strings.HasPrefix(line, "-- +goose") {
				fmt.Print(line)
			}
		}
	}
}
