//go:build ignore

// This program writes what is generated in this directory, or, with -check, says whether it would change anything.
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
