//go:build ignore

// This program writes the generated files of this directory. With -check, it says whether it would change any.
package main

import (
	"flag"
	"log"

	"github.com/txlimit/txlimit/internal/migrationgen"
)

func main() {
	log.SetFlags(0)
	check := flag.Bool("check", false, "change nothing, and fail if something is out of date")
	flag.Parse()
	do := migrationgen.Write
	if *check {
		do = migrationgen.Check
	}
	if err := do("."); err != nil {
		log.Fatal(err)
	}
}
