"""`python deepy.py train.py -d configs model.yml local.yml`: settings in YAML files, as those of GPT-NeoX.

It hands them over in base64, to DeepSpeed and to the program, and calls DeepSpeed's launcher in this process.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from deepspeed.launcher import runner

OF_DEEPSPEED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "zero_optimization")


def in_base64(settings: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()


script, _, folder, *names = sys.argv[1:]
settings: dict[str, Any] = {}
for name in names:
    settings |= yaml.safe_load(Path(folder, name).read_text())
settings = {key.replace("-", "_"): value for key, value in settings.items()}
of_deepspeed = {key: settings[key] for key in OF_DEEPSPEED}
ranks = str(settings["num_gpus"])
launched = ["--num_gpus", ranks, "--master_port", str(settings["master_port"]), script]
runner.main([*launched, "--deepspeed_config", in_base64(of_deepspeed), "--megatron_config", in_base64(settings)])
