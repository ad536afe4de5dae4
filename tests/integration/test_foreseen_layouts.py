"""Formulas for layouts beside foreseen runs of DeepSpeed: the same transfers, and what a layer keeps."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from foreseen_fixtures import PROGRAMS

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.decoder import DecoderShape, decoder_of
from zerotune.trial_lib.plan.device_memory import live_bytes
from zerotune.trial_lib.plan.devices import COLLECTIVES, Cluster, known_devices
from zerotune.trial_lib.plan.laid_out import Writing
from zerotune.trial_lib.plan.layouts import as_typed
from zerotune.trial_lib.plan.step_time import kind_of, step_of

TWO = Cluster(device=known_devices()["h100-80gb"], per_host=2)
TRAINING = """
import argparse, deepspeed, torch
from transformers import LlamaConfig, LlamaForCausalLM
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8)
config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2048, use_cache=False)
model = LlamaForCausalLM(config)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    tokens = torch.ones(4, 256, dtype=torch.long, device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
"""


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def _shape(run: ForeseenRun) -> DecoderShape:
    shape = decoder_of(run)
    assert isinstance(shape, DecoderShape), shape
    return shape


def _transfers(run: ForeseenRun) -> dict[tuple[str, str], float]:
    """Bytes that groups carry in the last forward and backward pass, by kind. Losses and norms are small."""
    found: dict[tuple[str, str], float] = {}
    for stretch in step_of(run).last:
        moved = dict.fromkeys(COLLECTIVES, 0.0)
        for each in stretch.operations:
            if kind_of(each) in COLLECTIVES and each.ranks > 1 and each.moved > 1e5:
                moved[kind_of(each)] += each.moved
        found |= {(stretch.moment, kind): sum_ for kind, sum_ in moved.items() if sum_ and stretch.moment != "update"}
    return found


@pytest.mark.parametrize(
    "config",
    [
        _config(2),
        pytest.param(_config(1), marks=pytest.mark.long),
        pytest.param(_config(3), marks=pytest.mark.long),
    ],
    ids=["stage 2", "stage 1", "stage 3"],
)
def test_formulas_count_the_transfers_of_deepspeed(
    foresee_text: Callable[[str, Mapping[str, Any]], ForeseenRun], config: dict[str, Any]
) -> None:
    run = foresee_text(TRAINING, config)
    assert run.stopped == ""
    said = as_typed(run, _shape(run), TWO)
    assert said.tensor == 1
    assert _transfers(said.as_run()) == pytest.approx(_transfers(run), rel=0.05)


def test_formulas_count_the_transfers_of_autotp_and_what_a_divided_layer_keeps_after_a_run_of_the_whole(
    foresee_text: Callable[[str, Mapping[str, Any]], ForeseenRun],
) -> None:
    whole = foresee_text(TRAINING, _config(1))
    writing = Writing.of(whole, as_typed(whole, _shape(whole), TWO))
    run = foresee_text(TRAINING, _config(1, tensor_parallel={"autotp_size": 2}))
    alone = as_typed(run, _shape(run), TWO)
    assert alone.tensor == 2
    assert _transfers(alone.as_run()) == pytest.approx(_transfers(run), rel=0.05)
    said = as_typed(run, _shape(run), TWO, writing)
    found = Writing.of(run, said)
    assert found.forward == pytest.approx(writing.forward, rel=0.1)
    assert found.kept == pytest.approx(1.0, rel=0.05)
    (forward, *_) = [each for each in live_bytes(run).moments if each.name == "forward"]
    kept = sum(map(sum, map(said.kept_by, said.by_stage[0]))) + said.kept_of_logits
    assert kept == pytest.approx(forward.at_end - forward.at_begin, rel=0.05)


def test_the_exchanges_of_ulysses_are_counted(foresee_text: Callable[[str, Mapping[str, Any]], ForeseenRun]) -> None:
    text = (PROGRAMS / "layouts" / "sequences.py").read_text()
    text = text.replace('"--sequence-ranks", type=int, default=1', '"--sequence-ranks", type=int, default=2')
    run = foresee_text(text, {**_config(1), "train_micro_batch_size_per_gpu": 2})
    assert (run.stopped, run.sequence_ranks) == ("", 2)
    for stretch in step_of(run).last:
        exchanged = [each.moved for each in stretch.operations if kind_of(each) == "all_to_all" and each.moved > 16]
        # Queries, keys, values and results of two layers: 16 tokens of 32 numbers in 16 bits. Losses have 16 bytes.
        assert exchanged == [2 * 16 // 2 * 32 * 2] * 4 * 2 * (stretch.moment in ("forward", "backward"))
