#!/usr/bin/env bash
# Prints a pattern for go test -run, and the packages, with the tests of some areas (see ../README.md): those of a folder, such as ops, or of some
# of its files, such as ops_usage for ops/usage_test.go and ops/usage_*_test.go. Without an area, it has all tests. With -sized, it has those of the
# files whose tests -short makes smaller.
set -euo pipefail
cd "$(dirname "$0")/.."
folders() { printf './integration_test/%s\n' "$@" | xargs -n 1 dirname | awk '!seen[$0]++'; }
all=$(grep -l 'harness\.Main(' -- */main_test.go)
(($#)) || { echo . $(folders $all) && exit; }
names=() of=()
for area in "$@"; do
	case $area in
	-sized) files=($(grep -lE 'harness\.(Sized|SomeOf|Long|Behaviour|OnEveryHandle|Hammer)\(|testing\.Short\(' -- */*_test.go)) ;;
	*_*) files=($(compgen -G "${area/_//}_*test.go" || true)) ;;
	*) files=($(compgen -G "$area/*_test.go" || true)) ;;
	esac
	((${#files[@]})) || { echo "tests.sh: there are no files of $area" >&2 && exit 1; }
	before=${#names[@]}
	names+=($(sed -n 's/^func \(Test[A-Za-z0-9_]*\)(.*/\1/p' "${files[@]}" | grep -vx TestMain || true))
	((${#names[@]} > before)) || { echo "tests.sh: the files of $area have no tests" >&2 && exit 1; }
	of+=("${files[@]}")
done
(IFS='|' && echo "^(${names[*]})\$") | tr '\n' ' '
echo $(folders "${of[@]}")
