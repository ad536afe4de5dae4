"""A plain decoder: GPTs as Megatron has them, Llamas as PyTorch's own trainers have them.

With `compiled` the elementwise parts keep their inputs alone and are computed again, as the partitioner of
torch.compile decides.
"""

import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CHUNKS = 8


class _Again(torch.autograd.Function):
    """A function that keeps its inputs alone, and computes the rest again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradients[0]))
        return None, *(next(found) if each.requires_grad else None for each in inputs)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Attention(nn.Module):
    """Causal attention with fewer heads of keys and values if the row has fewer."""

    def __init__(self, program: Any, divided: Any) -> None:
        super().__init__()
        self.divided = divided
        self.heads, self.kv_heads = program.heads // divided.shards, max(1, program.kv_heads // divided.shards)
        self.width = program.hidden // program.heads
        self.is_eager = program.attention == "eager"
        bias = not program.is_gated
        self.sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        # By operation, it matters which product is kept. PyTorch's trainers have one for each of the three.
        pieces = self.sizes if program.checkpoints_by_operation else [sum(self.sizes)]
        self.qkv = nn.ModuleList(nn.Linear(program.hidden, size, bias=bias) for size in pieces)
        self.out = nn.Linear(self.heads * self.width, program.hidden, bias=bias)
        self.rotates = not program.has_positions
        self.compiled = program.compiled

    def forward(self, x: Tensor) -> Tensor:
        """Returns the attention of (batch, tokens, hidden)."""
        batch, tokens, _ = x.shape
        x = self.divided.entering(x)
        q, k, v = self.qkv[0](x).split(self.sizes, dim=-1) if len(self.qkv) == 1 else (each(x) for each in self.qkv)
        q = q.view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k = k.view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        v = v.view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        if self.rotates:
            q, k = self._rotated(q), self._rotated(k)
        # A rank of a divided sequence needs a head at least.
        copies = max(1, self.divided.sequence // self.kv_heads)
        k, v = (each.repeat_interleave(copies, dim=1) if copies > 1 else each for each in (k, v))
        q, k, v = (self.divided.heads_apart(each) for each in (q, k, v))
        if q.shape[1] != k.shape[1]:
            # PyTorch's trainers copy keys and values for each head of a group.
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        fused = F.scaled_dot_product_attention
        mixed = self._eager(q, k, v) if self.is_eager else fused(q, k, v, is_causal=True)
        mixed = self.divided.heads_together(mixed).transpose(1, 2).reshape(batch, tokens, self.heads * self.width)
        return self.divided.leaving(self.out(mixed))

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.ones(x.shape[-2], half, device=x.device, dtype=x.dtype)

        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * angle - right * angle, right * angle + left * angle), dim=-1)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.width)
        shares = F.dropout(torch.softmax(scores, dim=-1), 0.1, training=self.training)
        return torch.matmul(shares, v)


class FeedForward(nn.Module):
    """The feed-forward part, gated or plain."""

    def __init__(self, program: Any, divided: Any) -> None:
        super().__init__()
        self.is_gated, self.compiled, self.divided = program.is_gated, program.compiled, divided
        bias, ffn = not program.is_gated, program.ffn // divided.shards
        pieces = 2 if self.is_gated and program.checkpoints_by_operation else 1
        width = ffn * (2 if self.is_gated else 1) // pieces
        self.up = nn.ModuleList(nn.Linear(program.hidden, width, bias=bias) for _ in range(pieces))
        self.down = nn.Linear(ffn, program.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output for (batch, tokens, hidden)."""
        x = self.divided.entering(x)
        wide = [each(x) for each in self.up]
        if not self.is_gated:
            return self.divided.leaving(self.down(F.gelu(wide[0])))
        gate, up = wide if len(wide) == 2 else wide[0].chunk(2, dim=-1)
        inner = _Again.apply(_gate, gate, up) if self.compiled else F.silu(gate) * up
        return self.divided.leaving(self.down(inner))


class Norm(nn.Module):
    """A norm: RMS for a gated model, else of mean and variance, which is one kernel.

    PyTorch's trainers write the RMS norm out in 32 bits. A compiled one is a kernel that keeps its input, and others
    have a kernel of their own.
    """

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(program.hidden))
        self.bias = None if program.is_gated else nn.Parameter(torch.zeros(program.hidden))
        self.compiled, self.is_fused = program.compiled, program.has_fused_norm

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed input."""
        if self.is_fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)
        if self.bias is not None:
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)
        return _Again.apply(_rms_norm, x, self.weight) if self.compiled else _rms_norm(x, self.weight)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


class Layer(nn.Module):
    """One layer of the decoder."""

    def __init__(self, program: Any, divided: Any) -> None:
        super().__init__()
        self.first, self.second = Norm(program), Norm(program)
        self.attention, self.feed_forward = Attention(program, divided), FeedForward(program, divided)
        # GPTs of Megatron drop at the end of both parts. Llamas drop nothing.
        self.drop = 0.0 if program.is_gated or program.attention == "fused" else 0.1

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output for (batch, tokens, hidden)."""
        x = x + F.dropout(self.attention(self.first(x)), self.drop, training=self.training and self.drop > 0)
        return x + F.dropout(self.feed_forward(self.second(x)), self.drop, training=self.training and self.drop > 0)


class Decoder(nn.Module):
    """The whole model. Its output is the loss.

    Args:
        program: a `RowProgram`.
        divided: among which ranks matrices and sequences are divided.
    """

    def __init__(self, program: Any, divided: Any) -> None:
        super().__init__()
        self.program, self.divided = program, divided
        vocab = program.vocab // divided.shards
        self.embedding = nn.Embedding(vocab, program.hidden)
        self.positions = nn.Embedding(program.tokens, program.hidden) if program.has_positions else None
        self.layers = nn.ModuleList(Layer(program, divided) for _ in range(program.layers))
        self.norm = Norm(program)
        self.head = nn.Linear(program.hidden, vocab, bias=False)
        if program.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the loss of (batch, tokens) of token numbers."""
        x = self.divided.leaving(self.embedding(input_ids))
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for begin in range(0, len(self.layers), self.program.checkpointed_layers):
            piece = self.layers[begin : begin + self.program.checkpointed_layers]
            number = begin // self.program.checkpointed_layers
            if self.program.checkpoints and number % self.program.checkpoint_every == 0:
                keeps = {"context_fn": _by_operation} if self.program.checkpoints_by_operation else {}
                x = checkpoint(_run, piece, x, use_reentrant=False, **keeps)
            else:
                x = _run(piece, x)
        return self._loss(self.norm(x), input_ids)

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.program.loss == "value head":
            return x.float().mean()
        x = self.divided.entering(x)
        if self.program.loss == "full":
            return _token_loss(self.head(x), labels)
        if self.program.loss == "compiled":
            return _CompiledLoss.apply(self.head(x), labels)
        return loss_in_chunks(x, self.head.weight, labels, keeps_logits=self.program.loss == "chunked")


def loss_in_chunks(x: Tensor, weight: Tensor, labels: Tensor, *, keeps_logits: bool) -> Tensor:
    """Returns the loss of the output layer, a part of the tokens at a time.

    Args:
        x: the last hidden states, (batch, tokens, hidden).
        weight: of the output layer.
        labels: token numbers.
        keeps_logits: whether each part keeps its logits in 16 bits, or computes them again too.
    """
    parts = zip(x.chunk(CHUNKS, dim=1), labels.chunk(CHUNKS, dim=1), strict=True)
    if keeps_logits:
        losses = [_Again.apply(_token_loss, F.linear(part, weight), its) for part, its in parts]
    else:
        losses = [_Again.apply(_head_loss, part, weight, its) for part, its in parts]
    return sum(losses, x.new_zeros(())) / CHUNKS


class _CompiledLoss(torch.autograd.Function):
    """The loss as one kernel for each pass: it reads logits in 16 bits, and its gradient is the next of their size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, logits.new_empty(labels.numel(), dtype=torch.float32))
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class LossInPlace(torch.autograd.Function):
    """The loss as one kernel for each pass. Its gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, logits.new_empty(labels.numel(), dtype=torch.float32))
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None


class _Kept(TorchDispatchMode):
    """Keeps the outputs of attention and of every second product of matrices, or gives them back.

    That is torchtitan's selective recomputation by operation (`SelectiveAC` in its
    torchtitan/distributed/activation_checkpoint.py). Torch's own contexts for it refuse that ZeRO 3 gathers otherwise
    when the operations come again.
    """

    def __init__(self, outputs: deque[Any], *, is_again: bool) -> None:
        super().__init__()
        self.outputs, self.is_again, self.products = outputs, is_again, 0

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        name = str(function)
        is_product = re.match(r"aten\.(mm|addmm|bmm)\.", name) is not None
        self.products += is_product
        if not (self.products % 2 == 1 if is_product else "attention" in name):
            return function(*inputs, **(named or {}))
        if self.is_again:
            return self.outputs.popleft()
        output = function(*inputs, **(named or {}))
        self.outputs.append(output)
        return output


def _by_operation() -> tuple[_Kept, _Kept]:
    """Returns the contexts of the forward pass and of the recomputation."""
    outputs: deque[Any] = deque()
    return _Kept(outputs, is_again=False), _Kept(outputs, is_again=True)


def _head_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _token_loss(F.linear(x, weight), labels)


def _run(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
