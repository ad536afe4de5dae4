"""The numbers of a decoder that a foreseen run notes, from a model's configuration."""

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, T5Config

from zerotune.trial_lib.plan.simulate.engine import decoder_numbers


def test_a_decoder_has_its_numbers_with_grouped_heads_or_without() -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96}
    grouped = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000)
    known = {"layers": 4, "hidden": 64, "heads": 8, "ffn": 96, "vocabulary": 1000}
    assert decoder_numbers(SimpleNamespace(config=grouped)) == {**known, "kv_heads": 2}
    plain = SimpleNamespace(**sizes, vocab_size=1000)
    assert decoder_numbers(SimpleNamespace(config=plain)) == {**known, "kv_heads": 8}


@pytest.mark.parametrize("config", [T5Config(), MixtralConfig(), GPT2Config(), SimpleNamespace(), None, {"layers": 4}])
def test_other_models_have_none(config: object) -> None:
    assert decoder_numbers(SimpleNamespace(config=config)) == {}
    assert decoder_numbers(object()) == {}
