#!/usr/bin/env bash
# Prints a directory with a small Debian 13, with PostgreSQL 17 and PgBouncer 1.24. The first run makes it. It is for
# machines that cannot pull an image and whose own Debian has an older PgBouncer. Its bin/pgbouncer-outside runs outside it.
# Needs debootstrap and root.
set -euo pipefail
. "$(dirname "$0")/cache.sh"
tree=$cache/debian-trixie
if [ ! -d "$tree" ]; then
	if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
		echo "making a Debian needs root, and debootstrap" >&2
		exit 1
	fi
	work=$(mktemp -d "$cache/debian-XXXXXX")
	trap 'rm -rf "$work"' EXIT
	echo "making a Debian in $tree" >&2
	if ! debootstrap --variant=minbase --include=postgresql,pgbouncer trixie "$work/tree" >"$work/log" 2>&1; then
		tail -n 20 "$work/log" >&2
		exit 1
	fi
	rm -rf "$work"/tree/var/cache/apt/archives/*.deb "$work"/tree/var/lib/postgresql/*
	cat >"$work/tree/bin/pgbouncer-outside" <<-'END'
		#!/bin/sh
		tree=$(dirname "$(readlink -f "$0")")/../..
		exec "$tree"/lib*/ld-linux-*.so.* --library-path "$(echo "$tree"/usr/lib/*-linux-*)" "$tree/usr/sbin/pgbouncer" "$@"
	END
	chmod 755 "$work/tree/bin/pgbouncer-outside"
	[ -d "$tree" ] || mv "$work/tree" "$tree" # it is there if somebody else has made the same meanwhile
fi
echo "$tree"
