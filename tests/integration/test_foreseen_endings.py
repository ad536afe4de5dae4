"""How a foreseen run ends that has no steps: with the reason, and where more of it is said."""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun

ForeseeText = Callable[[str, Mapping[str, Any]], ForeseenRun]


def test_a_program_that_ends_itself_leaves_its_log(foresee_text: ForeseeText) -> None:
    stopped = foresee_text("import argparse\nargparse.ArgumentParser().parse_args()", {}).stopped
    said, _, log = stopped.removesuffix(".").partition("; its log is ")
    assert said == "The program ended itself with 2 before its first 2 optimizer steps"
    assert "unrecognized arguments: --deepspeed_config" in Path(log).read_text()


def test_an_op_that_deepspeed_has_for_cuda_alone_is_told_as_such(foresee_text: ForeseeText) -> None:
    load = "from deepspeed.ops.op_builder import RandomLTDBuilder\nRandomLTDBuilder().load()"
    assert "for CUDA alone" in foresee_text(load, {}).stopped


def test_a_model_that_is_saved_and_loaded_is_told_with_its_place(foresee_text: ForeseeText) -> None:
    source = """
from transformers import LlamaConfig, LlamaForCausalLM
m = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
m.save_pretrained("made")
LlamaForCausalLM.from_pretrained("made")
"""
    stopped = foresee_text(source, {}).stopped
    assert stopped.startswith(
        "The program loads the model that it has saved in made, and a foreseen run has no weights"
    )
    assert stopped.endswith("train.py:5.")


def test_the_parameters_of_a_divided_model_are_those_of_the_whole(foresee_text: ForeseeText) -> None:
    source = """
import deepspeed, torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))
model = nn.Sequential(Block(), Block())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
for _ in range(100):
    loss = engine(torch.randn(2, 8, 64, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
"""
    layers = [{"patterns": [".*\\\\.up\\\\.weight$"], "partition_type": "column"}]
    layers += [{"patterns": [".*\\\\.down\\\\.weight$"], "partition_type": "row"}]
    divides = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": layers}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "tensor_parallel": divides}
    run = foresee_text(source, config)
    assert run.stopped == ""
    assert run.replicas == 1
    assert run.parameters == run.trainable == 2 * (2 * 64 + 2 * 64 * 256)


LOADS = """
import time
import deepspeed, torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
class Samples(Dataset):
    def __len__(self):
        return {samples}
    def __getitem__(self, index):
        time.sleep(0.2 if index in first else 0.0)
        return torch.ones(8)
first = set()
m = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=m, model_parameters=m.parameters(), config="ds_config.json")
samples = Samples()
sampler = DistributedSampler(samples, shuffle=False)
first.update(list(sampler)[:4])
for _ in range(20):
    for x in DataLoader(samples, batch_size=4, sampler=sampler):
        engine.backward(engine(x.to(engine.device)).square().mean())
        engine.step()
"""
OF_FOUR = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}


def test_the_first_batch_of_a_loader_says_nothing_of_the_others(foresee_text: ForeseeText) -> None:
    run = foresee_text(LOADS.format(samples=64), OF_FOUR)
    assert run.stopped == ""
    assert run.loading_s
    assert max(run.loading_s) < 0.2


def test_workers_load_beside_the_training_at_the_pace_of_all_of_them(foresee_text: ForeseeText) -> None:
    loads = LOADS.replace("batch_size=4,", "batch_size=4, num_workers=2,").replace(
        "0.2 if index in first else 0.0", "0.01"
    )
    run = foresee_text(loads.format(samples=256), OF_FOUR)
    assert run.stopped == ""
    assert run.loads_beside
    # Two workers deliver a batch of four samples in half of the 40 ms that one takes.
    assert run.loading_s[0] == pytest.approx(0.02, rel=0.5)


# A batch of four samples takes 10 ms of the processor.
DISTURBED = LOADS.replace(
    "time.sleep(0.2 if index in first else 0.0)",
    "begins = time.thread_time()\n        while time.thread_time() < begins + 0.0025: pass",
)


def test_loading_is_timed_over_several_batches_without_what_others_take(foresee_text: ForeseeText) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        run = foresee_text(DISTURBED.format(samples=256), OF_FOUR)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert run.stopped == ""
    assert len(run.loading_s) >= 8
    assert statistics.median(run.loading_s) == pytest.approx(0.01, rel=0.5)


BUDGET = """
import torch, deepspeed
m = torch.nn.Embedding(64, 8)
engine, *_ = deepspeed.initialize(model=m, model_parameters=m.parameters(), config="ds_config.json")
rows = [12, 8, 16, 24]
for step in range(20):
    ids = torch.ones(rows[step % 4], 192 // rows[step % 4], dtype=torch.long)
    engine.backward(engine(ids.to(engine.device)).square().mean())
    engine.step()
"""


def test_rows_of_a_token_budget_are_counted(foresee_text: ForeseeText) -> None:
    config = {**OF_FOUR, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    run = foresee_text(BUDGET, config)
    # The second step has the second and the third batch.
    assert (run.stopped, run.program["batch_varies"], run.rows, run.tokens) == ("", True, 12.0, 16)


def test_data_that_are_fewer_than_a_batch_of_each_rank_are_told(foresee_text: ForeseeText) -> None:
    stopped = foresee_text(LOADS.format(samples=6), OF_FOUR).stopped
    assert stopped.startswith("The data set gives each rank 3 samples, which are fewer than a micro-batch of 4 has.")


def test_a_second_step_that_has_no_whole_batch_is_told(foresee_text: ForeseeText) -> None:
    stopped = foresee_text(LOADS.format(samples=10), OF_FOUR).stopped
    assert stopped.startswith(
        "The data set gives each rank 5 samples, so the second step has 1 of the 4 of a micro-batch."
    )


def test_workers_that_load_slowly_are_foreseen_by_their_first_batches(foresee_text: ForeseeText) -> None:
    """The run has ended before any of them has loaded a second one."""
    loads = LOADS.replace("batch_size=4,", "batch_size=4, num_workers=4,").replace(
        "0.2 if index in first else 0.0", "0.2"
    )
    run = foresee_text(loads.format(samples=256), OF_FOUR)
    assert (run.stopped, run.loads_beside) == ("", True)
    assert run.loading_s[0] == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("of_samples", ["Dataset", "IterableDataset"])
def test_a_loader_of_ready_batches_may_have_workers(foresee_text: ForeseeText, of_samples: str) -> None:
    source = f"""
import deepspeed, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Batches({of_samples}):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.zeros(4, 8)
    def __iter__(self):
        yield from (self[index] for index in range(8))
if {of_samples} is Dataset:
    del Batches.__iter__
m = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=m, model_parameters=m.parameters(), config="ds_config.json")
for x in DataLoader(Batches(), batch_size=None, num_workers=1):
    engine.backward(engine(x.to(engine.device)).square().mean())
    engine.step()
"""
    assert foresee_text(source, OF_FOUR).stopped == ""


@pytest.mark.long
def test_a_tokenizer_that_is_saved_and_loaded_goes_on(foresee_text: ForeseeText) -> None:
    source = """
import deepspeed
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
m = LlamaForCausalLM(LlamaConfig(**shape))
m.save_pretrained("made")
words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained("made")
assert AutoTokenizer.from_pretrained("made").unk_token == "[UNK]"
m.config.save_pretrained("made")
LlamaForCausalLM.from_pretrained("made")
"""
    stopped = foresee_text(source, {}).stopped
    assert stopped.startswith(
        "The program loads the model that it has saved in made, and a foreseen run has no weights"
    )
    assert stopped.endswith("train.py:12.")


HOOKS = ["m.weight.register_hook", "m.weight.register_post_accumulate_grad_hook", "m.register_full_backward_hook"]


@pytest.mark.parametrize("register", HOOKS)
def test_an_error_in_a_hook_of_the_backward_pass_is_told(foresee_text: ForeseeText, register: str) -> None:
    source = f"""
import deepspeed, torch
m = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=m, model_parameters=m.parameters(), config="ds_config.json")
def refuses(*given):
    raise AssertionError("it is not mine")
{register}(refuses)
engine.backward(engine(torch.randn(2, 8, device=engine.device)).square().mean())
"""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    stopped = foresee_text(source, config).stopped
    assert stopped.startswith("AssertionError: it is not mine, at ")
    assert stopped.endswith("train.py:6.")
