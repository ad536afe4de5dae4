"""Small models of several kinds, with data that a sample's number decides, however a batch is cut."""

import torch
import torch.nn.functional as F
from torch import nn

FEATURES, CLASSES, TOKENS, LENGTH = 24, 8, 61, 12


class Vectors(nn.Module):
    """Learns from vectors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, numbers: list[int], data_seed: int) -> torch.Tensor:
        draws = [torch.Generator().manual_seed(data_seed * 100_003 + number) for number in numbers]
        inputs = torch.stack([torch.randn(FEATURES, generator=each) for each in draws])
        labels = inputs[:, :CLASSES].argmax(-1)
        dtype = next(self.parameters()).dtype
        return F.cross_entropy(self.inner(inputs.to(dtype)).float(), labels)


class Texts(nn.Module):
    """Learns the next token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, numbers: list[int], data_seed: int) -> torch.Tensor:
        draws = [torch.Generator().manual_seed(data_seed * 100_003 + number) for number in numbers]
        # Frequent and rare tokens, as in a language
        tokens = torch.stack([(TOKENS * torch.rand(LENGTH + 1, generator=each) ** 3).long() for each in draws])
        outputs = self.inner(tokens[:, :-1]).float()
        return F.cross_entropy(outputs.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1))


class Masked(nn.Module):
    """Learns some tokens of each text, few or many: a mean over those of a micro-batch, whatever text they are of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, numbers: list[int], data_seed: int) -> torch.Tensor:
        draws = [torch.Generator().manual_seed(data_seed * 100_003 + number) for number in numbers]
        tokens = torch.stack([(TOKENS * torch.rand(LENGTH + 1, generator=each) ** 3).long() for each in draws])
        shares = [0.1 + 0.9 * torch.rand(1, generator=each) ** 2 for each in draws]
        counts = torch.stack([torch.rand(LENGTH, generator=each) for each in draws]) < torch.stack(shares)
        counts[:, 0] = True
        outputs = self.inner(tokens[:, :-1]).float()
        return F.cross_entropy(outputs[counts], tokens[:, 1:][counts])


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.mlp(self.norm_2(x)))


class Decoder(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.cell, self.head = (
            nn.Embedding(TOKENS, width),
            nn.GRUCell(width, width),
            nn.Linear(width, TOKENS),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state, outputs = torch.zeros(tokens.shape[0], self.head.in_features, dtype=self.head.weight.dtype), []
        for each in self.tokens(tokens).unbind(1):
            state = self.cell(each, state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 16, 5, padding=2), nn.Conv1d(16, 16, 5, padding=2)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16 * FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.second(F.relu(self.first(inputs[:, None]))))
        return self.head(F.silu(found).flatten(1))


class Adapted(nn.Module):
    """A frozen model with low-rank adapters that begin at zero, as LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(FEATURES, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES)])
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(each.in_features, 4, bias=False) for each in self.base)
        self.up = nn.ModuleList(nn.Linear(4, each.out_features, bias=False) for each in self.base)
        for each in self.up:
            nn.init.zeros_(each.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, base in enumerate(self.base):
            x = base(x) + self.up[place](self.down[place](x))
            x = torch.tanh(x) if place < 2 else x
        return x


class Mixture(nn.Module):
    """Soft experts behind a gate, without a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        return sum(gates[:, place, None] * each(x) for place, each in enumerate(self.experts))


def perceptron() -> nn.Module:
    layers = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    return Vectors(nn.Sequential(*layers))


class Encoder(nn.Module):
    """Attends in both directions, and classifies the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(3, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.rows(x.unflatten(1, (-1, 3)))).mean(1))


class Residual(nn.Module):
    """Deep, with root mean square norms and without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(FEATURES, 48, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(48), nn.Linear(48, 96, bias=False), nn.SiLU(), nn.Linear(96, 48, bias=False))
            for _ in range(8)
        )
        self.head = nn.Linear(48, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Autoencoder(nn.Module):
    """Learns its own inputs by the square of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {
                "encoder": nn.Sequential(nn.Linear(FEATURES, 32), nn.ELU(), nn.Linear(32, 6)),
                "decoder": nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, FEATURES)),
            }
        )

    def forward(self, numbers: list[int], data_seed: int) -> torch.Tensor:
        draws = [torch.Generator().manual_seed(data_seed * 100_003 + number) for number in numbers]
        inputs = torch.stack([torch.randn(FEATURES, generator=each) for each in draws])
        found = self.inner["decoder"](self.inner["encoder"](inputs.to(next(self.parameters()).dtype)))
        return F.mse_loss(found.float(), inputs)


class Gated(nn.Module):
    """Gated linear units over a text, mixed by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 32)
        self.mixers = nn.ModuleList(nn.Conv1d(32, 64, 3) for _ in range(3))
        self.head = nn.Linear(32, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens).transpose(1, 2)
        for mixer in self.mixers:
            x = x + F.glu(mixer(F.pad(x, (2, 0))), dim=1)
        return self.head(x.transpose(1, 2))


class Towers(nn.Module):
    """Two towers that meet in a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(FEATURES // 2, 40), nn.LeakyReLU(), nn.Linear(40, 16))
        self.right = nn.Sequential(nn.Linear(FEATURES // 2, 40), nn.Softplus(), nn.Linear(40, 16))
        self.meet = nn.Bilinear(16, 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return self.meet(self.left(left), self.right(right))


class Sets(nn.Module):
    """Sums what it makes of the parts of an input, whatever their order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 64), nn.Mish(), nn.LayerNorm(64), nn.Linear(64, 64))
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(64, 32), nn.Hardswish(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.parts(x.unflatten(1, (-1, 4))).sum(1))


class Mixer(nn.Module):
    """Mixes places and features of a text by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 24)
        self.places = nn.ModuleList(nn.Linear(LENGTH, LENGTH) for _ in range(3))
        self.features = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))
        self.head = nn.Linear(24, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for place, feature, norm in zip(self.places, self.features, self.norms, strict=True):
            x = x + place(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + feature(x)
        return self.head(x)


MODELS = {
    "perceptron": perceptron,
    "decoder": lambda: Texts(Decoder()),
    "decoder with dropout": lambda: Texts(Decoder(dropout=0.1)),
    "recurrent": lambda: Texts(Recurrent()),
    "convolutions": lambda: Vectors(Convolutions()),
    "adapters": lambda: Vectors(Adapted()),
    "mixture": lambda: Vectors(Mixture()),
    "tied decoder, deep": lambda: Texts(Decoder(width=64, layers=6, tied=True)),
    "encoder": lambda: Vectors(Encoder()),
    "residual": lambda: Vectors(Residual()),
    "autoencoder": Autoencoder,
    "gated": lambda: Texts(Gated()),
    "two towers": lambda: Vectors(Towers()),
    "sets": lambda: Vectors(Sets()),
    "slow mixer": lambda: Texts(Mixer()),
    "masked decoder": lambda: Masked(Decoder()),
    "masked recurrent": lambda: Masked(Recurrent()),
    "masked mixer": lambda: Masked(Mixer()),
}
