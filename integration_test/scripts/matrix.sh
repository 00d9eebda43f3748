#!/usr/bin/env bash
# Runs the integration suite on every supported version of PostgreSQL, or on those in MATRIX ("14 18"), two at a time. AREAS="verbs sql"
# are areas for tests.sh. Without it, all tests run.
set -euo pipefail
. "$(dirname "$0")/versions.sh"
cd "$(dirname "$0")/../.."
read -r run packages < <(integration_test/scripts/tests.sh ${AREAS-})
[ -n "$packages" ]
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086
go test -vet=off -c -o "$work/" $packages

versions=${MATRIX:-14 15 16 17 18}
for version in $versions; do
	while (($(jobs -rp | wc -l) >= 2)); do sleep 0.2; done
	bin=$(binaries "$version") || continue
	(
		passed=yes
		for package in $packages; do
			echo "= $package" && cd "$package" || exit
			TXLIMIT_TEST_LADDER=binaries TXLIMIT_TEST_POSTGRES_BIN=$bin "$work/$(basename "$package").test" -test.short -test.timeout 5h -test.run "$run" || passed=
			cd - >/dev/null
		done
		[ -z "$passed" ] || touch "$work/$version.passed"
	) >"$work/$version" 2>&1 &
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
