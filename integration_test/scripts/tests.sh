#!/usr/bin/env bash
# Prints a pattern for go test -run, with the tests of the files of some areas (see ../README.md): AREA_test.go and AREA_*_test.go, such as
# those of ops, or of ops_usage. Without an area, it has all tests. With -sized, it has those of the files whose tests -short makes smaller.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || { echo . && exit; }
names=()
for area in "$@"; do
	if [ "$area" = -sized ]; then
		files=($(grep -lE 'sized\(|someOf\(|long\(t\)|testing\.Short\(|behaviour\(|onEveryHandle\(' -- *_test.go))
	else
		files=($(compgen -G "${area}_*test.go" || true))
	fi
	((${#files[@]})) || { echo "tests.sh: there are no files ${area}_*test.go" >&2 && exit 1; }
	before=${#names[@]}
	names+=($(sed -n 's/^func \(Test[A-Za-z0-9_]*\)(.*/\1/p' "${files[@]}" | grep -vx TestMain || true))
	((${#names[@]} > before)) || { echo "tests.sh: ${area}_*test.go have no tests" >&2 && exit 1; }
done
(IFS='|' && echo "^(${names[*]})\$")
