"""What DeepSpeed says of a configuration becomes a sentence with the key and the remedy."""

from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.refusals import Complaint, Refusal, complaints_in, sentence_of

# DeepSpeed 0.10 to 0.19, whose sections are of pydantic 2.
LISTED = """\
3 validation errors for DeepSpeedZeroConfig
reduce_bucket_size
  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, input_value='2e8', \
input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/int_parsing
offload_param.device
  Input should be 'none', 'cpu' or 'nvme' [type=enum, input_value='gpu', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/enum
stage3_foo
  Extra inputs are not permitted [type=extra_forbidden, input_value=[1, 2], input_type=list]
    For further information visit https://errors.pydantic.dev/2.14/v/extra_forbidden"""
ONE_OF_A_VALIDATOR = """\
1 validation error for DeepSpeedFP16Config
loss_scale
  Value error, fp16.loss_scale must be a number [type=value_error, input_value='big', input_type=str]"""
BATCH = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
REMOVED = (
    "DeepSpeedConfigError: Legacy top-level 'curriculum_learning' has been removed. Use "
    "'data_efficiency.data_sampling.curriculum_learning' instead. See https://example.com/issues/1."
)


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        (
            LISTED,
            [
                Complaint(
                    ("reduce_bucket_size",), "Input should be a valid integer, unable to parse string as an integer"
                ),
                Complaint(("offload_param", "device"), "Input should be 'none', 'cpu' or 'nvme'"),
                Complaint(("stage3_foo",), ""),
            ],
        ),
        (ONE_OF_A_VALIDATOR, [Complaint(("loss_scale",), "Value error, fp16.loss_scale must be a number")]),
        ("Check batch related parameters. train_batch_size is not equal to", []),
        ("", []),
    ],
    ids=["a list", "a validator", "no list", "nothing"],
)
def test_a_list_of_complaints_is_read_key_by_key(text: str, complaints: list[Complaint]) -> None:
    assert complaints_in(text) == complaints


def said_of(keys: list[str], value: Any, said: str = "TypeError: no", what: str | None = None, slots: int = 2) -> str:
    known = ["stage3_prefetch_bucket_size", "stage"]
    return " ".join(sentence_of(Refusal(keys, value, said, what), "DeepSpeed 0.19.8", known, slots))


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            said_of(["zero_optimization.stage3_prefech_bucket_size"], 1, what=""),
            "zero_optimization.stage3_prefech_bucket_size: DeepSpeed 0.19.8 has no such key. "
            'Did you mean "stage3_prefetch_bucket_size"?',
        ),
        (said_of(["fp16.opt_level"], "O2", what=""), "fp16.opt_level: DeepSpeed 0.19.8 has no such key. Remove it."),
        (
            said_of(["zero_optimization.reduce_bucket_size"], "2e8", what="Input should be a valid integer"),
            'zero_optimization.reduce_bucket_size: DeepSpeed 0.19.8 takes no text here, and "2e8" is one. '
            "Write it without quotes: 2e8.",
        ),
        (
            said_of(["wall_clock_breakdown"], "False"),
            'wall_clock_breakdown: DeepSpeed 0.19.8 takes no text here, and "False" is one. '
            "Write it without quotes: false.",
        ),
        (
            said_of(["zero_optimization.stage"], [0, 1], what="Input should be 0, 1, 2 or 3"),
            "zero_optimization.stage: the list [0, 1] is a search space of DeepSpeed's autotuner, and DeepSpeed 0.19.8 "
            "trains with one value. Write one of them, and let ZeroTune try the others: zerotune tune -z 0 -z 1 -- "
            "COMMAND.",
        ),
        (
            said_of(["train_micro_batch_size_per_gpu"], [1, 2]),
            "train_micro_batch_size_per_gpu: the list [1, 2] is a search space of DeepSpeed's autotuner, and DeepSpeed "
            "0.19.8 trains with one value. Write the one to train with. ZeroTune tries other sizes without a list.",
        ),
        (
            said_of(["zero_optimization.overlap_comm"], [True, False]),
            "zero_optimization.overlap_comm: the list [true, false] is a search space of DeepSpeed's autotuner, and "
            "DeepSpeed 0.19.8 trains with one value. Write one of them, and the values to try in an experiment's YAML: "
            "search_space: {zero_optimization.overlap_comm: [true, false]}.",
        ),
        (
            said_of(["zero_optimization.offload_optimizer"], "cpu"),
            'zero_optimization.offload_optimizer: DeepSpeed 0.19.8 takes a section in braces here, and "cpu" is none. '
            'Write {"device": "cpu"}.',
        ),
        (
            said_of(["optimizer"], "AdamW"),
            'optimizer: DeepSpeed 0.19.8 takes a section in braces here, and "AdamW" is none. Write {"type": "AdamW"}.',
        ),
        (
            said_of(["fp16"], True),
            'fp16: DeepSpeed 0.19.8 takes a section in braces here, and true is none. Write {"enabled": true}.',
        ),
        (
            said_of(["curriculum_learning"], {"enabled": True}, REMOVED),
            "curriculum_learning: DeepSpeed 0.19.8 refuses it: Legacy top-level 'curriculum_learning' has been removed."
            " Use 'data_efficiency.data_sampling.curriculum_learning' instead. Remove it.",
        ),
        (
            said_of(["fp16", "bf16"], {"fp16": {}, "bf16": {}}, "AssertionError: not both"),
            "fp16 and bf16: DeepSpeed 0.19.8 refuses them together: AssertionError: not both. Change one of them.",
        ),
        (
            said_of(list(BATCH), BATCH),
            "train_batch_size (7) is not train_micro_batch_size_per_gpu (2) * the replicas, of which 2 slot(s) allow 2 "
            "at most. Change one of them, or leave train_batch_size out: it follows from the others.",
        ),
        (
            said_of(list(BATCH), BATCH, slots=1),
            "train_batch_size (7) is not train_micro_batch_size_per_gpu (2) * the replicas, of which 1 slot(s) allow "
            "one. Change one of them, or leave train_batch_size out: it follows from the others.",
        ),
    ],
)
def test_a_refusal_is_told_with_its_key_and_a_remedy(found: str, sentence: str) -> None:
    assert found == sentence


def test_a_value_with_two_names_is_a_choice_once() -> None:
    text = (
        "1 validation error for DeepSpeedZeroConfig\nstage\n  Input should be 0, 1, 2, 3 or 3 "
        "[type=enum, input_value=4, input_type=int]"
    )
    assert [complaint.what for complaint in complaints_in(text)] == ["Input should be 0, 1, 2 or 3"]
