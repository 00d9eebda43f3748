#!/usr/bin/env bash
# Prints a pattern for go test -run: the tests of the files whose names begin with one of these areas (see ../README.md).
set -euo pipefail
cd "$(dirname "$0")/.."
names=()
for area in "$@"; do
	names+=($(sed -n 's/^func \(Test[A-Za-z0-9_]*\)(.*/\1/p' "$area"_*_test.go))
done
((${#names[@]}))
(IFS='|' && echo "^(${names[*]})\$")
