import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.deepspeed_config.overrides import resolve_batch
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes

SIZES = st.integers(min_value=1, max_value=64)


@given(micro=SIZES, steps=SIZES, replicas=SIZES, missing=st.sets(st.sampled_from(["train", "steps"])))
def test_what_is_missing_follows_from_the_rest(micro: int, steps: int, replicas: int, missing: set[str]) -> None:
    config = {"train_micro_batch_size_per_gpu": micro}
    if "train" not in missing:
        config["train_batch_size"] = micro * steps * replicas
    if "steps" not in missing:
        config["gradient_accumulation_steps"] = steps
    steps = 1 if missing == {"train", "steps"} else steps
    assert resolve_batch(config, replicas) == BatchSizes(micro * steps * replicas, micro, steps)


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}, BatchSizes(8, 4, 1)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}, BatchSizes(8, 4, 1)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, BatchSizes(8, 4, 1)),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
            BatchSizes(16, 4, 2),
        ),
    ],
)
def test_auto_counts_as_missing(config: dict[str, object], batch: BatchSizes) -> None:
    assert resolve_batch(config, 2) == batch


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "train_batch_size(32) != micro(4) * accumulation(3) * replicas(2).",
        ),
        ({"train_batch_size": 1}, "train_batch_size(1) != micro(0) * accumulation(1) * replicas(2)."),
        ({"gradient_accumulation_steps": 2}, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, "neither train_batch_size nor"),
        ({"train_batch_size": 0}, "train_batch_size is 0."),
        ({"train_batch_size": "32"}, "train_batch_size is '32'."),
        ({"train_micro_batch_size_per_gpu": True}, "train_micro_batch_size_per_gpu is True."),
        ({"train_micro_batch_size_per_gpu": 4.0}, "train_micro_batch_size_per_gpu is 4.0."),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_the_whole_equation(config: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as refused:
        resolve_batch(config, 2)
    assert message in refused.value.what
    assert refused.value.where == "the DeepSpeed configuration"
