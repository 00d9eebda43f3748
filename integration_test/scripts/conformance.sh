#!/usr/bin/env bash
# Says what works on a server: on that of URL, or else on servers that it starts: TABLES="plain partitioned distributed" on the installed
# version, and a plain table on the versions in MATRIX ("14 18"). ARGS are flags of the command.
set -euo pipefail
. "$(dirname "$0")/versions.sh"
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go build -o "$work/conformance" ./integration_test/conformance
go build -o "$work/txlimit" ./cmd/txlimit
if [ -n "${URL-}" ]; then
	# shellcheck disable=SC2086
	"$work/conformance" -tool "$work/txlimit" ${ARGS-} -url "$URL"
	exit
fi

go build -o "$work/withpostgres" ./internal/postgres/cmd/withpostgres
servers=()
on() { # NAME FILE... (EXCEPT: cases that are refused there); two servers at a time, since cases wait
	while (($(jobs -rp | wc -l) >= 2)); do sleep 0.2; done
	servers+=("$1")
	local at=$work/${#servers[@]}
	shift
	cat "$@" </dev/null >"$at.sql"
	# shellcheck disable=SC2016,SC2086
	"$work/withpostgres" -migrated -f "$at.sql" -- sh -c '"$0" "$@" -url "$TXLIMIT_DATABASE_URL"' "$work/conformance" -strict -except "${EXCEPT-}" -tool "$work/txlimit" ${ARGS--short} >"$at.out" 2>"$at.progress" && touch "$at.passed" &
}
for table in ${TABLES-plain partitioned distributed}; do
	case $table in
	plain) on "a plain table" ;;
	distributed) EXCEPT='^(Hold|Once|During)' on "a $table table" "integration_test/harness/testdata/$table.sql" ;;
	*) on "a $table table" "integration_test/harness/testdata/$table.sql" ;;
	esac
done
for version in ${MATRIX-14 18}; do
	bin=$(binaries "$version")
	TXLIMIT_TEST_LADDER=binaries TXLIMIT_TEST_POSTGRES_BIN=$bin on "PostgreSQL $version"
done
wait
failed=()
for i in "${!servers[@]}"; do
	at=$work/$((i + 1))
	printf '\n== %s\n\n' "${servers[i]}"
	cat "$at.out"
	[ -e "$at.passed" ] || { failed+=("${servers[i]}") && tail -n 5 "$at.progress" >&2; }
done
if ((${#failed[@]})); then
	echo "something is wrong on: ${failed[*]}" >&2
	exit 1
fi
