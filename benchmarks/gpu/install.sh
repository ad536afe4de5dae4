#!/usr/bin/env bash
# Makes an environment of the bundle beside this file, over a Python that has torch; downloads nothing.
# usage: install.sh FOLDER [PYTHON]     then FOLDER/bin/python benchmarks/gpu/run.py ...
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=$1
python=${2:-python3}

"$python" -c 'import torch' || { echo "$python has no torch: name one that has" >&2; exit 2; }
"$python" -m venv --without-pip "$folder"
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# A venv over a venv sees the system's packages alone. What is installed here comes first, torch and the like from there.
"$python" -c 'import site, sys; print(*[p for p in sys.path if p.endswith(("site-packages", "dist-packages"))], sep="\n")' \
    >"$packages/torch_from_there.pth"
wheels=("$here"/needed/*.whl)
if [ -e "$here/whole.tar.xz" ]; then
    mkdir -p "$folder/whole"
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$here/whole.tar.xz" "$folder/whole"
    wheels+=("$folder"/whole/*.whl)
fi
"$python" -m pip --python "$folder/bin/python" install -q --ignore-installed --no-index --no-deps --no-compile "${wheels[@]}"
rm -rf "$folder/whole"
# Programs that torch's own environment has and DeepSpeed calls, ninja and torchrun.
there=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
for program in ninja torchrun accelerate; do
    if [ ! -e "$folder/bin/$program" ] && [ -e "$there/$program" ]; then ln -s "$there/$program" "$folder/bin/$program"; fi
done
"$folder/bin/python" -c 'import deepspeed, pydantic, torch; print("deepspeed", deepspeed.__version__, "torch", torch.__version__)'
