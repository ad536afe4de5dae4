"""ZeroTune in an environment of its own tunes a program of another: with which Python, torch and DeepSpeed it was seen.

    python3.12 benchmarks/interpreters/run.py --program python3.10 --torch 2.4.1 --deepspeed 0.16.9 --folder /tmp/seen

makes two environments below the folder, unless they are there: `zt` of the Python that runs this script, with ZeroTune
and what it needs, and `prog` of the program's Python, with torch and DeepSpeed alone. Then it
tunes `examples/hello_deepspeed` with the program's environment active, and adds a line to `--out`. Only the standard
library is imported here, so any Python 3.11 or later runs it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = "import json, sys, importlib.util as u; from importlib.metadata import version as v; print(json.dumps({"
ASKS += "'python': sys.version.split()[0], **{n: v(n) for n in sys.argv[1:] if u.find_spec(n)}}))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=sys.executable, help="the Python of the program's environment")
    parser.add_argument("--torch", required=True)
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "interpreters.jsonl")
    options = parser.parse_args()
    own, program = made(options)
    theirs = asked(program, "torch", "deepspeed", "prefect", "mlflow")
    assert not {"prefect", "mlflow"} & theirs.keys(), "the program's environment has packages of ZeroTune"
    line = {
        "zerotune": asked(own, "prefect", "mlflow", "torch"),
        "program": theirs,
        **tuned(own, program, options.folder),
    }
    print(json.dumps(line, indent=2))
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def made(options: argparse.Namespace) -> tuple[Path, Path]:
    """The folders of the two environments' commands."""
    own, program = options.folder / "zt", options.folder / "prog"
    if not program.exists():
        subprocess.run([options.program, "-m", "venv", program], check=True)
        pip = [program / "bin" / "pip", "install", "-q"]
        old = ["numpy<2"] if options.torch < "2.5" else ["numpy"]
        subprocess.run([*pip, f"torch=={options.torch}", *old, "setuptools", "wheel", "ninja", "packaging"], check=True)
        without_ops = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "--no-build-isolation", f"deepspeed=={options.deepspeed}"], check=True, env=without_ops)
    if not own.exists():
        subprocess.run([sys.executable, "-m", "venv", own], check=True)
    subprocess.run([own / "bin" / "pip", "install", "-q", ROOT], check=True)
    subprocess.run([own / "bin" / "pip", "install", "-q", "--no-deps", "--force-reinstall", ROOT], check=True)
    return own / "bin", program / "bin"


def asked(commands: Path, *packages: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(subprocess.check_output([commands / "python", "-c", ASKS, *packages]))
    return found


def tuned(own: Path, program: Path, folder: Path) -> dict[str, object]:
    """A study of two ranks, the typed configuration being a cautious one."""
    code = folder / "code"
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(ROOT / "examples" / "hello_deepspeed", code)
    command = ["torchrun", "--nproc_per_node=2", "train.py", "--deepspeed_config", "ds_config_cautious.json"]
    answer = subprocess.run(
        [own / "zerotune", "tune", "--json", "--max-trials=4", "--max-minutes=10", "--", *command],
        cwd=code,
        env={**os.environ, "PATH": f"{program}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(program.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(answer.stdout) if answer.stdout.strip() else {}
    print(*answer.stderr.splitlines()[-15:], sep="\n", file=sys.stderr)
    study = next((code / "zerotune-studies").iterdir())
    results = [json.loads(path.read_text()) for path in sorted(study.glob("trials/*/result.json"))]
    return {
        "exit": answer.returncode,
        "outcomes": sorted(each["outcome"] for each in results),
        "gain": told.get("gain"),
        "gain_interval": told.get("gain_interval"),
    }


if __name__ == "__main__":
    main()
