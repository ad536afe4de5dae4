"""A training that generates texts, as reinforcement learning from feedback does, foreseen."""

import pytest

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}
TRAINING = """
import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
small = dict(vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=2)
model = {model}
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    prompts = torch.randint(3, 64, (2, 8)).to(engine.device)
    texts = engine.module.generate(prompts, **{how})
    assert not (texts == 1).any()
    {then}
    loss = engine(input_ids=prompts, labels=prompts).loss
    engine.backward(loss)
    engine.step()
"""
LLAMA = (
    "LlamaForCausalLM(LlamaConfig(**small, hidden_size=32, intermediate_size=64, num_hidden_layers=1,"
    " num_attention_heads=4))"
)
T5 = (
    "T5ForConditionalGeneration(T5Config(**small, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,"
    " decoder_start_token_id=0))"
)


@pytest.fixture
def foreseen(foresee_text):
    return lambda model, how, then: foresee_text(TRAINING.format(model=model, how=how, then=then), CONFIG)


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        pytest.param({"max_new_tokens": 4}, 2, marks=pytest.mark.long),
        ({"max_length": 12, "do_sample": True, "top_k": 5, "num_return_sequences": 3}, 6),
        pytest.param({"max_new_tokens": 4, "num_beams": 3}, 2, marks=pytest.mark.long),
    ],
)
def test_a_text_gets_as_long_as_it_may_after_its_prompt(foreseen, how, texts):
    then = (
        f"assert texts.shape == ({texts}, 12); assert texts[0, :8].tolist() == prompts[0].tolist(); "
        "assert len(set(texts[:, 8:].flatten().tolist())) == 1"
    )
    run = foreseen(LLAMA, how, then)
    assert run.stopped == ""
    assert [each for each in run.asks if not each.is_known] == []


@pytest.mark.long
def test_no_token_of_a_text_is_its_end_whoever_says_which_that_is(foreseen):
    how = {"max_new_tokens": 4, "eos_token_id": [32, 33], "pad_token_id": 34}
    assert foreseen(LLAMA, how, "assert set(texts[:, 8:].flatten().tolist()) == {35}").stopped == ""


@pytest.mark.long
def test_the_text_of_a_decoder_has_no_prompt(foreseen):
    assert foreseen(T5, {"max_new_tokens": 9}, "assert texts.shape == (2, 10); texts.tolist()").stopped == ""


def test_scores_of_texts_leave_nothing_unknown(foreseen):
    """A library of such trainings leaves out texts without a score, by their places."""
    then = (
        "ends = (texts == 1).int(); lengths = (ends.cumsum(1) == 0).sum(1); "
        "scores = torch.tensor([float(sum(each.tolist())) for each in texts]).to(engine.device); "
        "values = engine.module(texts).logits.float().mean((1, 2)) * scores; "
        "assert lengths.tolist() == [12, 12] and values[~torch.isnan(values)].shape == (2,)"
    )
    assert foreseen(LLAMA, {"max_new_tokens": 4}, then).stopped == ""
