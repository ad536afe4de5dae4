"""The numbers of a decoder by which its layouts are foreseen. Pure."""

import re
from dataclasses import dataclass
from functools import cached_property

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun

_ALIKE = 0.1  # the share by which the parameters may differ from those of such a decoder
LAYER, SPARSE, EMBEDDING, HEAD, LOSS = "layer", "sparse layer", "embedding", "head", "loss"
"""The parts of a decoder. A sparse layer has experts."""


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A decoder whose feed-forward layers are gated, with or without experts."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # of a layer without experts
    vocabulary: int
    tokens: int  # of a sample
    head_size: int = 0  # 0 if the heads share the width
    experts: int = 0  # of a sparse layer
    chosen: int = 0  # experts that compute a token
    expert_ffn: int = 0
    shared_ffn: int = 0  # of a sparse layer's part that computes all tokens
    dense_layers: int = 0  # layers without experts, if others have them
    by_autoep: int = 0  # 1 if DeepSpeed's AutoEP knows the model's experts

    @property
    def of_head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def of_queries(self) -> int:
        return self.heads * self.of_head

    @property
    def of_keys(self) -> int:
        return self.kv_heads * self.of_head

    @cached_property
    def attention(self) -> tuple[int, int]:
        """Parameters of the matrices into and out of attention."""
        return self.hidden * (self.of_queries + 2 * self.of_keys), self.of_queries * self.hidden

    def gated(self, part: str) -> tuple[int, int]:
        """Parameters of the matrices of a layer's feed-forward part that computes all tokens: into it, and out."""
        ffn = self.shared_ffn if part == SPARSE else self.ffn
        return 2 * self.hidden * ffn, self.hidden * ffn

    @property
    def all_experts(self) -> int:
        """Parameters of all experts of a sparse layer."""
        return 3 * self.hidden * self.expert_ffn * self.experts

    @property
    def of_head_matrix(self) -> int:
        return self.vocabulary * self.hidden

    @cached_property
    def layer_parts(self) -> list[str]:
        dense = self.dense_layers if self.experts else self.layers
        return [LAYER] * dense + [SPARSE] * (self.layers - dense)

    def shared_parameters(self, part: str) -> int:
        """Parameters of a layer without its experts."""
        return sum(self.attention) + sum(self.gated(part)) + (self.hidden * self.experts if part == SPARSE else 0)

    def expert_parameters(self, part: str) -> int:
        return self.all_experts if part == SPARSE else 0

    def active(self, part: str) -> int:
        """Parameters of a layer that compute a token."""
        return self.shared_parameters(part) + (3 * self.hidden * self.expert_ffn * self.chosen if part == SPARSE else 0)

    @cached_property
    def of_layers(self) -> int:
        return sum(self.shared_parameters(part) + self.expert_parameters(part) for part in self.layer_parts)

    @cached_property
    def vocabulary_matrices(self) -> int:
        """One if the output layer is the embedding."""
        return 1 if self.parameters - self.of_layers < 1.5 * self.of_head_matrix else 2

    @property
    def counted_parameters(self) -> int:
        return self.of_layers + self.vocabulary_matrices * self.of_head_matrix


def decoder_of(run: ForeseenRun) -> DecoderShape | str:
    """The shape of a run's model, or why formulas do not know it, as a clause."""
    known = run.program.get("decoder") or {}
    if not known or not run.tokens:
        return (
            "the model is no decoder whose `config` has layers, heads, widths and vocabulary, or samples have no tokens"
        )
    shape = DecoderShape(parameters=run.parameters, tokens=run.tokens, **known)
    config, by_code = run.ds_config, str(run.program.get("optimizer") or "")
    optimizer = (by_code.rpartition(".")[2] or str((config.get("optimizer") or {}).get("type"))).lower()
    is_half = any((config.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16"))
    if run.trainable < (1 - _ALIKE) * run.parameters or not is_half or not re.search("adam(w|)$", optimizer):
        return "formulas are for trainings of all weights in 16 bits, with the states of Adam"
    counted = shape.counted_parameters
    if abs(counted / run.parameters - 1) > _ALIKE:
        return (
            f"a decoder with gated feed-forward layers of its widths has {counted:,.0f} parameters, and the model "
            f"{run.parameters:,}"
        )
    return shape
