"""Every key of an experiment's YAML with wrong values: a sentence, and no traceback."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from wrong_values import WRONG, changed, places

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.errors import InputError

DS_CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    "fp16": {"enabled": True, "loss_scale": 0},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.3},
    },
}
EXPERIMENT: dict[str, Any] = {
    "name": "team",
    "description": "a test",
    "labels": ["one"],
    "entrypoint": "deepspeed train.py",
    "hyperparameters": {"deepspeed_config": DS_CONFIG},
    "environment": {"environment_variables": ["A=b"]},
    "resources": {"slots_per_trial": 1, "memory_per_slot": "600 MiB"},
    "records_per_epoch": 100,
    "min_validation_period": {"batches": 10},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 100}, "smaller_is_better": True},
    "scheduling_unit": 100,
    "max_restarts": 0,
}


@pytest.mark.parametrize("key", EXPERIMENT)
def test_a_key_with_a_wrong_value_is_read_or_refused_in_a_sentence(key: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "experiment.yaml"

    def read(document: Any) -> None:
        file.write_text(yaml.safe_dump(document))
        read_experiment(file, tmp_path)

    read(EXPERIMENT)
    for at in places(EXPERIMENT[key]):
        for wrong in WRONG:
            try:
                read({**EXPERIMENT, key: changed(EXPERIMENT[key], at, wrong)})
            except InputError as error:
                said = str(error)
                assert said.count("\n") == 0, said
