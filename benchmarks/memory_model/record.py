"""Records the tables of more_programs: each arm of ZeRO at sizes on both sides of the limit, by two real CPU ranks.

python -m benchmarks.memory_model.record NAME ...
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS, TABLES = HERE / "more_programs", HERE / "tables"
# The memory of a slot in MiB, and micro-batch sizes, of the last of which none was expected to fit.
RECORDED = {
    "translator": (540, (4, 16, 40, 56, 72, 96)),
    "segmenter": (520, (4, 16, 32, 48, 64, 88)),
    "recommender": (520, (64, 1024, 3072, 5120, 7168, 10240)),
    "mixer": (560, (2, 8, 18, 28, 38, 52)),
    "ranker": (520, (64, 512, 1024, 1536, 2048, 3072)),
    "listener": (500, (4, 16, 32, 48, 64, 96)),
    "denoiser": (560, (2, 8, 16, 24, 34, 48)),
    "adapted": (500, (8, 24, 48, 72, 96, 144)),
    "pairing": (540, (64, 512, 1024, 1536, 2048, 3072)),
    "speaker": (510, (4, 16, 32, 48, 72, 112)),
    "painter": (510, (4, 16, 32, 48, 72, 112)),
}
HELD_OUT = ("speaker", "painter")
"""No constant of the memory model comes from these."""
_YAML = """
name: {name}
entrypoint: deepspeed train.py --deepspeed_config ds_config.json --model {name}
hyperparameters:
  deepspeed_config: ds_config.json
  overwrite_deepspeed_args:
    gradient_accumulation_steps: 1
resources:
  slots_per_trial: 2
  memory_per_slot: {limit} MiB
search_space:
  zero_optimization.offload_optimizer.device: {{values: [none, cpu], when: {{zero_optimization.stage: [1, 2, 3]}}}}
  zero_optimization.reduce_bucket_size: 1000000
  zero_optimization.overlap_comm: false
  zero_optimization.contiguous_gradients: true
  zero_optimization.stage3_prefetch_bucket_size: 1000000
  zero_optimization.stage3_param_persistence_threshold: 100000
  zero_optimization.reduce_scatter: true
  zero_optimization.round_robin_gradients: false
  zero_optimization.stage3_max_live_parameters: 1000000000
  zero_optimization.sub_group_size: 1000000000
"""


@contextmanager
def experiment_of(name: str) -> Iterator[Path]:
    """Yields a file with the experiment of a program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(_YAML.format(name=name, limit=RECORDED[name][0]))
        yield path


def record(name: str) -> None:
    with experiment_of(name) as path:
        words = [path, PROGRAMS, "-o", TABLES / f"{name}.jsonl", "--repeats", "1", "--end-profile-step", "6", "-b"]
        words += map(str, RECORDED[name][1])
        subprocess.run([sys.executable, "-m", "benchmarks.replay.record", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=RECORDED)
    TABLES.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        record(name)


if __name__ == "__main__":
    main()
