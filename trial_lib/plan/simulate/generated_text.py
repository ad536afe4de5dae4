"""Text that a program generates while it trains, in a foreseen run.

Nobody knows which tokens a model would choose, nor at which it would end. So each text gets as long as the program lets
it, and then consists of one token that ends nothing. The program can read it, and score it.
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.plan.simulate.known_numbers import keep, known_numbers
from trial_lib.rank.patching import when_imported

_SPECIAL = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")


def install() -> None:
    """Replaces the functions of transformers. Call it once, before the program runs."""
    texts = _Texts()
    when_imported("transformers.generation.stopping_criteria", texts.follow_criteria)
    when_imported("transformers.generation.utils", texts.follow_generation)


class _Texts:
    """Ends the texts in the making, and gives them their tokens."""

    def __init__(self) -> None:
        self._tokens = 0
        self._is_long_enough = False

    def follow_criteria(self, module: ModuleType) -> None:
        criteria: Any = module.StoppingCriteriaList
        original = criteria.__call__

        @functools.wraps(original)
        def check(these: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            limits = [limit for each in these if (limit := getattr(each, "max_length", None)) is not None]
            self._tokens = input_ids.shape[-1]
            self._is_long_enough = any(self._tokens >= limit for limit in limits)
            return original(these, input_ids, *args, **kwargs)

        criteria.__call__ = check

    def follow_generation(self, module: ModuleType) -> None:
        mixin: Any = module.GenerationMixin
        goes_on, original = getattr(mixin, "_has_unfinished_sequences", None), mixin.generate
        if goes_on is None:
            # Before transformers 4.38.
            return

        @functools.wraps(goes_on)
        def has_unfinished_sequences(model: Any, *args: Any, **kwargs: Any) -> Any:
            ends, self._is_long_enough = self._is_long_enough, False
            return not ends and goes_on(model, *args, **kwargs)

        @functools.wraps(original)
        def generate(model: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._tokens = 0
            found = original(model, inputs, *args, **kwargs)
            token = _plain_token(model, kwargs, args)
            prompt = inputs if inputs is not None else kwargs.get("input_ids")
            if getattr(model.config, "is_encoder_decoder", False):
                # The encoder has read the prompt, and the texts do not repeat it.
                prompt = None
            if isinstance(found, FakeTensor):
                return self._written(found, token, prompt)
            if isinstance(getattr(found, "sequences", None), FakeTensor):
                found.sequences = self._written(found.sequences, token, prompt)
            return found

        mixin._has_unfinished_sequences, mixin.generate = has_unfinished_sequences, generate

    def _written(self, texts: torch.Tensor, token: int, prompt: Any) -> torch.Tensor:
        # Texts with known tokens. A search by beams has cut them at a length that it asked.
        if texts.shape[-1] < self._tokens:
            texts = texts.new_empty(*texts.shape[:-1], self._tokens)
        if known_numbers(texts) is None:
            real = torch.full(texts.shape, token, dtype=texts.dtype, device="cpu")
            _copy_prompt(real, prompt)
            keep(texts, real)
        return texts


def _plain_token(model: Any, kwargs: Mapping[str, Any], args: Sequence[Any]) -> int:
    settings = [kwargs.get("generation_config"), *args, getattr(model, "generation_config", None), model.config]
    special: set[int] = set()
    for name in _SPECIAL:
        for value in (kwargs.get(name), *(getattr(each, name, None) for each in settings)):
            special.update(value if isinstance(value, Collection) else () if value is None else (value,))
    middle = (getattr(model.config, "vocab_size", None) or 0) // 2
    return next(token for token in itertools.count(middle) if token not in special)


def _copy_prompt(texts: torch.Tensor, prompt: Any) -> None:
    # Writes a known prompt before the generated tokens. Several texts may continue it.
    known = known_numbers(prompt) if isinstance(prompt, FakeTensor) else prompt
    if not isinstance(known, torch.Tensor) or known.dim() != texts.dim() or known.shape[-1] > texts.shape[-1]:
        return
    of_each, rest = divmod(texts.shape[0], max(1, known.shape[0]))
    if not rest:
        texts[:, : known.shape[-1]] = known.repeat_interleave(of_each, dim=0)
