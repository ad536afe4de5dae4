#!/usr/bin/env bash
# Gathers in benchmarks/gpu/bundle what a bare GPU machine without a network lacks; see README.md.
# usage: benchmarks/gpu/pack.sh [PYTHON]     a Python with pip and torch, of any version; by default this repository's
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${1:-$root/.venv/bin/python}
bundle=$here/bundle
deepspeed=$(sed -n 's/^deepspeed==//p' "$root/constraints.txt")
most=$((64 * 1024 * 1024))

# What a machine with Python 3.12 on 64-bit Linux can install.
target=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --only-binary=:all:)
for glibc in 5 12 17 24 26 27 28 31 34; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 --platform any)

rm -rf "$bundle"
mkdir -p "$bundle/needed"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# resolve NAME REQUIREMENT...: writes to $work/NAME what these come to, less what the machine has already.
resolve() {
    local name=$1
    shift
    "$python" -m pip install -q --dry-run --ignore-installed --target "$work/nowhere" --report "$work/$name.json" \
        "${target[@]}" -c "$root/constraints.txt" "$@"
    "$python" "$here/lacking.py" "$work/$name.json" "$here/already_there.txt" >"$work/$name"
}

# What trials, studies and DeepSpeed need.
resolve needed hjson pydantic platformdirs filelock psutil pyyaml nvidia-ml-py threadpoolctl py-cpuinfo \
    einops msgpack ninja tqdm tabulate
# What the whole command needs besides.
resolve all prefect 'fastapi<0.151' mlflow jinja2 rich click httpx certifi
sort "$work/needed" -o "$work/needed"
sort "$work/all" | comm -23 - "$work/needed" >"$work/whole"

"$python" -m pip download -q --no-deps "${target[@]}" -d "$bundle/needed" -r "$work/needed"
"$python" -m pip download -q --no-deps "${target[@]}" -d "$work/wheels" -r "$work/whole"
# A wheel compresses each of its files by itself; all of them together take half of that.
mkdir "$work/stored"
"$python" "$here/store.py" "$work/stored" "$work"/wheels/*.whl
XZ_OPT=-T0 tar -C "$work/stored" -cJf "$bundle/whole.tar.xz" .
# It has no wheel to download: its sources are built where they are used.
DS_BUILD_OPS=0 "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$bundle/needed" "deepspeed==$deepspeed"
cp "$here/install.sh" "$bundle/"

du -sh "$bundle/needed" "$bundle/whole.tar.xz"
size=$(du -sb "$bundle" | cut -f1)
echo "$bundle: $size bytes"
if ((size > most)); then
    echo "more than $most: leave $bundle/whole.tar.xz behind, and with it what needs the whole command" >&2
    exit 1
fi
