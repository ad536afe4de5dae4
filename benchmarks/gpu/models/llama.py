"""A Llama-like decoder in torch alone: the model of every stage, at whatever size."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# By which of torch's kernels `--attention` has the scores computed; `sdpa` leaves it to torch.
BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}


@dataclass(frozen=True)
class Shape:
    """What a model is made of; see the options of `train.py`."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    length: int


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns pairs of features by angles that grow with the position (rotary embeddings)."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention_of(kind: str, length: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a causal attention by one kind of kernel.

    Args:
        kind: `sdpa`, one of `BACKENDS`, `flex`, `flash_attn` (the package), or `eager` for products of matrices.
        length: of the sequences.
    """
    if kind == "eager":
        return eager
    if kind == "flash_attn":
        from flash_attn import flash_attn_func

        return lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    if kind == "flex":
        return Flex(length)
    if kind == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[kind])):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return by_backend


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


class Flex:
    """`flex_attention`, compiled, as its documentation wants it; torch has no backward pass of it on a processor."""

    def __init__(self, length: int) -> None:
        self._length, self._mask = length, None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self._mask is None:
            causal = lambda batch, head, row, column: row >= column  # noqa: E731 - as it is documented
            self._mask = create_block_mask(causal, None, None, self._length, self._length, device=q.device.type)
            self._call = torch.compile(flex_attention)
        return self._call(q, k, v, block_mask=self._mask)


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = shape.heads, attend
        self.before, self.between = Norm(shape.hidden), Norm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = self.attend(turned(q, angles), turned(k, angles), v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        inner = self.between(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """Returns the mean loss of the next tokens."""

    def __init__(self, shape: Shape, attention: str = "sdpa") -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        attend = attention_of(attention, shape.length)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        # As Llama is initialised: the loss begins near that of a guess.
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self._width = shape.hidden // shape.heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rates = 1e4 ** (-torch.arange(0, self._width, 2, device=tokens.device) / self._width)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def counted(shape: Shape) -> int:
    """Returns the FLOPs of the forward and backward pass of one sample, by the formula 6N + 12LHQT.

    N are the weights that multiply: all but the table of tokens and the norms.
    """
    block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    weights = shape.layers * block + shape.hidden * shape.vocabulary
    return shape.length * (6 * weights + 12 * shape.layers * shape.hidden * shape.length)
