"""Batches and parameters of the ranks of a tensor-parallel group."""

from types import SimpleNamespace

import torch
from torch import nn

from zerotune.trial_lib.rank.tensor_parallel import (
    digest,
    expert_counts,
    expert_ranks,
    head_counts,
    layer_count,
    parameter_shares,
    tensor_parallel_size,
)

TOKENS = torch.arange(12).reshape(3, 4)


def test_equal_batches_have_one_digest_and_others_another() -> None:
    batch = [(), {"input_ids": TOKENS, "labels": TOKENS}]
    assert digest(batch) == digest([(), {"input_ids": TOKENS.clone(), "labels": TOKENS.clone()}])
    others = [TOKENS.flip(0), TOKENS.roll(1, 1), TOKENS + 1, TOKENS[:2]]
    assert len({digest({"input_ids": other}) for other in (TOKENS, *others)}) == 5


def test_a_batch_without_numbers_is_like_another() -> None:
    assert digest([]) == digest([torch.tensor(float("nan"))]) == 0.0


def test_each_parameter_counts_once_and_those_of_linear_layers_are_known() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    model.head = model[1]  # tied
    model[2].weight.requires_grad = False
    assert parameter_shares(SimpleNamespace(module=model)) == [40 + 15 + 6, 40 + 15 + 3, 15, 0]


def test_a_replica_of_several_ranks_shares_what_it_does_not_divide() -> None:
    engine = SimpleNamespace(module=nn.Sequential(nn.Embedding(10, 4)), autotp_size=lambda: 4)
    assert tensor_parallel_size(engine) == 4
    assert parameter_shares(engine) == [10, 10, 0, 0]


def test_heads_are_those_of_the_model_s_configuration() -> None:
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    assert head_counts(SimpleNamespace(config=config)) == [8, 2]
    assert head_counts(SimpleNamespace(config=SimpleNamespace(text_config=config))) == [8, 2]
    assert head_counts(nn.Linear(1, 1)) == []


def test_the_ranks_of_ulysses_have_copies_of_all_parameters() -> None:
    engine = SimpleNamespace(module=nn.Linear(3, 4), sequence_parallel_size=2)
    assert parameter_shares(engine) == [8, 8, 8, 0]


def test_a_model_without_experts_and_stages_has_none() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert (expert_counts(model), expert_ranks(model), layer_count(model)) == ([], 1, 0)
