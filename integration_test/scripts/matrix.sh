#!/usr/bin/env bash
# Runs the integration suite on every supported version of PostgreSQL, or on those in MATRIX ("14 18"), two at a time. AREAS="verbs sql"
# are areas for tests.sh. Without it, all tests run.
set -euo pipefail
. "$(dirname "$0")/versions.sh"
cd "$(dirname "$0")/.."
run=$(scripts/tests.sh ${AREAS-})
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go test -vet=off -c -o "$work/suite" .

versions=${MATRIX:-14 15 16 17 18}
for version in $versions; do
	while (($(jobs -rp | wc -l) >= 2)); do sleep 0.2; done
	bin=$(binaries "$version") || continue
	TXLIMIT_TEST_LADDER=binaries TXLIMIT_TEST_POSTGRES_BIN=$bin "$work/suite" -test.short -test.timeout 5h -test.run "$run" >"$work/$version" 2>&1 && touch "$work/$version.passed" &
done
wait
failed=()
for version in $versions; do
	echo "== PostgreSQL $version"
	cat "$work/$version" || true
	[ -e "$work/$version.passed" ] || failed+=("$version")
done
if ((${#failed[@]})); then
	echo "the suite failed on PostgreSQL ${failed[*]}" >&2
	exit 1
fi
