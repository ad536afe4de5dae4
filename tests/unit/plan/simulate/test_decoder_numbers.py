"""The numbers of a decoder that a foreseen run notes, from a model's configuration."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.plan.simulate.engine import decoder_numbers


def configuration(name: str, **settings: Any) -> Any:
    # Here, because every worker imports every file of tests.
    import transformers

    return getattr(transformers, name)(**settings)


def test_a_decoder_has_its_numbers_with_grouped_heads_or_without() -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96}
    grouped = configuration("LlamaConfig", **sizes, num_key_value_heads=2, vocab_size=1000)
    known = {"layers": 4, "hidden": 64, "heads": 8, "ffn": 96, "vocabulary": 1000}
    assert decoder_numbers(SimpleNamespace(config=grouped)) == {**known, "kv_heads": 2, "head_size": 8}
    plain = SimpleNamespace(**sizes, vocab_size=1000)
    assert decoder_numbers(SimpleNamespace(config=plain)) == {**known, "kv_heads": 8}


class _Narrower(dict[str, object]):
    def get(self, model: object) -> object:  # type: ignore[override]
        """As that of transformers since 5.23."""


@pytest.mark.parametrize(("recorded", "is_known"), [({}, 1), (_Narrower(), 0)])
def test_a_mixture_has_the_numbers_of_its_experts(
    recorded: object, is_known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(_CAN_RECORD_REGISTRY=recorded)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", module)

    def of(config: object) -> dict[str, int]:
        names = ("experts", "chosen", "expert_ffn", "shared_ffn", "dense_layers", "by_autoep")
        return {name: decoder_numbers(SimpleNamespace(config=config)).get(name) for name in names}

    each = {"num_experts_per_tok": 2, "num_hidden_layers": 6}
    mixtral = configuration("MixtralConfig", **each, num_local_experts=4, intermediate_size=96)
    known = {"experts": 4, "chosen": 2, "expert_ffn": 96, "shared_ffn": 0, "dense_layers": 0, "by_autoep": is_known}
    assert of(mixtral) == known
    qwen = configuration(
        "Qwen3MoeConfig", **each, num_experts=4, moe_intermediate_size=96, decoder_sparse_step=2, mlp_only_layers=[1]
    )
    assert of(qwen) == {**known, "dense_layers": 4}
    deepseek = configuration(
        "DeepseekV3Config", **each, n_routed_experts=4, moe_intermediate_size=96, n_shared_experts=2
    )
    # DeepSpeed records no scores of its routers.
    assert of(deepseek) == {**known, "shared_ffn": 192, "dense_layers": 3, "by_autoep": 1}


@pytest.mark.parametrize("config", ["T5Config", "GPT2Config", SimpleNamespace(), None, {"layers": 4}])
def test_other_models_have_none(config: object) -> None:
    config = configuration(config) if isinstance(config, str) else config
    assert decoder_numbers(SimpleNamespace(config=config)) == {}
    assert decoder_numbers(object()) == {}
