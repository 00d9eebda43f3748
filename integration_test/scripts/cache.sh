# Sets cache, the directory for downloads. As root, servers run as another user, who cannot read root's home.
if [ -n "${XDG_CACHE_HOME:-}" ]; then cache=$XDG_CACHE_HOME/txlimit
elif [ "$(id -u)" = 0 ]; then cache=/var/cache/txlimit
else cache=$HOME/.cache/txlimit; fi
(umask 022 && mkdir -p "$cache")
