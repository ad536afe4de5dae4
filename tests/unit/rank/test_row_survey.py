"""Whether the rows of a micro-batch depend on each other, in models and losses as users write them."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize, pad, triplet_margin_loss

from zerotune.trial_lib.messages.measurement import AcrossRows
from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.row_survey import RowSurvey, rounding_of

ROWS, WIDTH, CLASSES, TOKENS = 8, 12, 5, 9


def surveyed(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss_of: Callable[[Any], torch.Tensor] = lambda outputs: outputs,
    per_sample: int = 1,
    dimension: int = 0,
    rounding: float = rounding_of(()),
    **named: Any,
) -> AcrossRows:
    """Looks at one micro-batch of a training step, and trains on it as the program would."""
    engine: Any = SimpleNamespace(module=model)
    survey = RowSurvey(engine, CpuDevice(), rounding, per_sample, dimension, lambda values: values)
    loss = loss_of(survey.forward(model, model, inputs, named))
    survey.backward(loss)
    loss.backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)
    return survey.found


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), *layers, nn.ReLU(), nn.Linear(16, CLASSES))


def labelled(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))


class WithLoss(nn.Module):
    """A model that returns its loss, as many do."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] = cross_entropy) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(features), labels)


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )


class AcrossAttention(nn.Module):
    """Attends over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.attention(features, features, features)[0]


class Whitened(nn.Module):
    """Batch statistics of the user's own."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - features.mean(0)) / (features.std(0) + 1e-5)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.BatchNorm1d(16), "BatchNorm1d"),
        (nn.BatchNorm1d(16, track_running_stats=False), "BatchNorm1d"),
        (Whitened(), "Whitened"),
        (nn.Sequential(nn.LayerNorm(16), Whitened(), nn.Dropout(0.3)), "Whitened"),
        (AcrossAttention(), "MultiheadAttention"),
    ],
    ids=["batch norm", "without running statistics", "of the user's own", "with dropout", "attention over samples"],
)
@pytest.mark.parametrize("rows", [2, 3, ROWS])
@pytest.mark.parametrize("where", ["outside", "inside", "inside, bf16"])
def test_a_layer_with_statistics_of_the_batch_is_found(layer: nn.Module, name: str, rows: int, where: str) -> None:
    features, labels = labelled(rows)
    if where == "inside, bf16":
        model, rounding = WithLoss(mlp(copy.deepcopy(layer))).bfloat16(), rounding_of(["bfloat16"])
        found = surveyed(model, (features.bfloat16(), labels), rounding=rounding)
    elif where == "inside":
        found = surveyed(WithLoss(mlp(layer)), (features, labels))
    else:
        found = surveyed(mlp(layer), (features,), lambda outputs: cross_entropy(outputs, labels))
    assert found.kind == "layers"
    assert name in found.names


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_a_norm_of_images_is_found_in_one_image_too(rows: int) -> None:
    labels = torch.randint(0, 5, (rows,))
    model = images(nn.BatchNorm2d(8))
    found = surveyed(model, (torch.randn(rows, 3, 12, 12),), lambda outputs: cross_entropy(outputs, labels))
    assert (found.kind, found.names) == ("layers", ["BatchNorm2d"])


ROW_WISE = {
    "group norm": images(nn.GroupNorm(2, 8)),
    "instance norm": images(nn.InstanceNorm2d(8)),
    "dropout": images(nn.Dropout(0.5), nn.Dropout2d(0.2)),
    "frozen batch norm": images(nn.BatchNorm2d(8).eval()),
    "local response": images(nn.LocalResponseNorm(2)),
}


@pytest.mark.parametrize("name", ROW_WISE)
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_layer_of_rows_alone_is_none(name: str, rows: int, where: str) -> None:
    model, pictures, labels = ROW_WISE[name], torch.randn(rows, 3, 12, 12), torch.randint(0, 5, (rows,))
    if where == "inside":
        found = surveyed(WithLoss(model), (pictures, labels))
    else:
        found = surveyed(model, (pictures,), lambda outputs: cross_entropy(outputs, labels))
    assert found.kind == "", found
    assert found.undecided == "" or (rows == 1 and where == "outside")


def info_nce(embedded: torch.Tensor) -> torch.Tensor:
    one, other = normalize(embedded[:, :2]), normalize(embedded[:, 2:4])
    return cross_entropy(one @ other.T / 0.1, torch.arange(len(embedded)))


def in_batch_triplets(embedded: torch.Tensor) -> torch.Tensor:
    return triplet_margin_loss(embedded, embedded + 0.1, embedded.roll(1, 0), margin=5.0)


def root_mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1.0).square().mean().sqrt()


ACROSS = {"InfoNCE": info_nce, "triplets": in_batch_triplets, "root of a mean": root_mean_square}
ALONE = {
    "cross entropy": lambda outputs: cross_entropy(outputs, torch.arange(len(outputs)) % CLASSES),
    "squares": lambda outputs: mse_loss(outputs, torch.ones_like(outputs)),
    "a sum": lambda outputs: outputs.square().sum(),
    "divided by the batch": lambda outputs: outputs.square().sum() / len(outputs),
    "pairs of each row": lambda outputs: torch.nn.functional.logsigmoid(outputs[:, 0] - outputs[:, 1]).mean(),
    "absolute": lambda outputs: (outputs - 1.0).abs().mean(),
    "linear": lambda outputs: outputs.mean(),
    "per-row roots": lambda outputs: (outputs.square().sum(1) + 1e-3).sqrt().mean(),
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("rows", [2, 3, ROWS])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_loss_across_rows_is_found(name: str, rows: int, where: str) -> None:
    features, labels = labelled(rows)
    if where == "inside":
        found = surveyed(WithLoss(mlp(nn.Dropout(0.2)), lambda outputs, _: ACROSS[name](outputs)), (features, labels))
    else:
        found = surveyed(mlp(nn.Dropout(0.2)), (features,), ACROSS[name])
    assert found.kind == "loss", found


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("rows", [2, 3, ROWS, 64])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_loss_of_rows_alone_is_none(name: str, rows: int, where: str) -> None:
    features, labels = labelled(rows)
    if where == "inside":
        found = surveyed(WithLoss(mlp(nn.Dropout(0.2)), lambda outputs, _: ALONE[name](outputs)), (features, labels))
        assert (found.kind, found.undecided, found.is_outside) == ("", "", False), found
    else:
        found = surveyed(mlp(nn.Dropout(0.2)), (features,), ALONE[name])
        assert found.is_outside
        # A loss without curvature may compare rows or not.
        assert (found.kind, bool(found.undecided)) == ("", name == "absolute"), found


@pytest.mark.parametrize("rows", [2, ROWS])
@pytest.mark.parametrize(("name", "kind"), [*((each, "loss") for each in ACROSS), *((each, "") for each in ALONE)])
def test_a_loss_of_16_bits_is_no_hiding_place(name: str, kind: str, rows: int) -> None:
    model = WithLoss(mlp(nn.Dropout(0.2)), lambda outputs, _: {**ACROSS, **ALONE}[name](outputs)).bfloat16()
    features, labels = labelled(rows)
    found = surveyed(model, (features.bfloat16(), labels), rounding=rounding_of(["bfloat16"]))
    assert (found.kind, found.undecided) == (kind, ""), found


def test_two_forward_passes_of_one_loss_are_looked_at_together() -> None:
    model, features = mlp(nn.Dropout(0.2)), torch.randn(ROWS, WIDTH)

    def kind_of(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
        engine: Any = SimpleNamespace(module=model)
        survey = RowSurvey(engine, CpuDevice(), 1e-4, 1, 0, lambda values: values)
        one, other = (survey.forward(model, model, (features + noise,), {}) for noise in (0.0, 0.1))
        survey.backward(loss_of(one, other))
        assert survey.found.undecided == ""
        return survey.found.kind

    assert kind_of(lambda one, other: cross_entropy(one @ other.T, torch.arange(ROWS))) == "loss"
    assert kind_of(mse_loss) == ""
    assert kind_of(lambda one, other: (1 - torch.cosine_similarity(one, other)).mean()) == ""


@pytest.mark.parametrize("in_blocks", [True, False])
def test_rows_of_one_sample_may_depend_on_each_other(in_blocks: bool) -> None:
    """As the chosen and the rejected answer of a preference trainer, which pass the model together."""
    model, features = mlp(), torch.randn(2 * ROWS, WIDTH)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        chosen, rejected = outputs.chunk(2) if in_blocks else (outputs[::2], outputs[1::2])
        return -torch.nn.functional.logsigmoid((chosen - rejected).sum(1)).mean()

    assert surveyed(model, (features,), loss, per_sample=2).kind == ""
    assert surveyed(model, (features,), lambda outputs: info_nce(outputs), per_sample=2).kind == "loss"


class Tokens(nn.Module):
    """A language model with its loss within, as Hugging Face's, or logits alone."""

    def __init__(self, with_loss: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(31, 16), nn.Sequential(*layers), nn.Linear(16, 31)
        self.with_loss = with_loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embedding(input_ids)))
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        # Perplexity is for people, and in no loss.
        return {"loss": loss, "logits": logits, "perplexity": loss.exp()} if self.with_loss else {"logits": logits}


def texts(lengths: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.stack([pad(torch.randint(1, 31, (length,)), (0, TOKENS - length)) for length in lengths])
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


@pytest.mark.parametrize("lengths", [[9, 3], [9, 3, 5], [4, 9, 2, 6, 7, 5, 9, 3]])
def test_a_mean_over_unequal_numbers_of_tokens_is_called_that(lengths: list[int]) -> None:
    model = Tokens(True, nn.LayerNorm(16), nn.Dropout(0.1))
    found = surveyed(model, (), lambda outputs: outputs["loss"], **texts(lengths))
    assert (found.kind, found.undecided) == ("unequal", ""), found


def test_a_mean_over_equal_numbers_of_tokens_is_none() -> None:
    found = surveyed(Tokens(True, nn.Dropout(0.1)), (), lambda outputs: outputs["loss"] / 4, **texts([TOKENS] * 4))
    assert (found.kind, found.undecided) == ("", "")


def test_a_norm_over_padded_texts_is_more_than_unequal_numbers() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.norm(hidden.transpose(1, 2)).transpose(1, 2)

    found = surveyed(Tokens(True, Turned()), (), lambda outputs: outputs["loss"], **texts([4, 9, 2, 6]))
    assert found.kind == "layers"
    assert "BatchNorm1d" in found.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_s_balancing_loss_is_found_and_its_routing_is_none(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.02,
    )  # fmt: skip
    ids = torch.randint(1, 64, (ROWS, TOKENS))
    for balances in (True, False):
        config.output_router_logits = balances
        model = transformers.MixtralForCausalLM(config).to(dtype).train()
        rounding = rounding_of([str(dtype).removeprefix("torch.")])
        found = surveyed(model, (), lambda outputs: outputs.loss, rounding=rounding, input_ids=ids, labels=ids)
        assert (found.kind, found.undecided) == ("loss" if balances else "", ""), found


@pytest.mark.parametrize("masked", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_masked_outputs_are_no_change(masked: float) -> None:
    class Masked(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.model = mlp(layer)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.model(features)
            return outputs.masked_fill(torch.arange(CLASSES) == 4, masked)

    features, labels = labelled()
    for layer, kind in ((nn.LayerNorm(16), ""), (nn.BatchNorm1d(16), "layers")):
        found = surveyed(Masked(layer), (features,), lambda outputs: cross_entropy(outputs, labels % 4))
        assert (found.kind, found.undecided) == (kind, "")


@pytest.mark.parametrize("dimension", [0, 1])
def test_sequences_may_come_first(dimension: int) -> None:
    model, shape = nn.Linear(16, 16), (TOKENS, ROWS, 16) if dimension else (ROWS, TOKENS, 16)
    for layer, kind in ((nn.LayerNorm(16), ""), (_OverAll(), "layers")):
        whole = nn.Sequential(model, layer)
        found = surveyed(whole, (torch.randn(shape),), lambda outputs: outputs.square().mean(), dimension=dimension)
        assert found.kind == kind, found


class _OverAll(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.std()


def test_nothing_of_the_training_changes() -> None:
    def trained(with_survey: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = images(nn.BatchNorm2d(8), nn.Dropout(0.4))
        model.passes = 0
        model.register_forward_hook(lambda module, *_: setattr(module, "passes", module.passes + 1))
        pictures, labels = torch.randn(6, 3, 12, 12), torch.randint(0, 5, (6,))
        if with_survey:
            surveyed(model, (pictures,), lambda outputs: cross_entropy(outputs, labels))
        else:
            cross_entropy(model(pictures), labels).backward()
        assert model.passes == 1
        return [each.grad for each in model.parameters()] + [*model.buffers(), torch.rand(3)]

    assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))


def test_parameters_that_autocast_has_cast_get_their_gradients() -> None:
    features, labels = labelled()
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        surveyed(model, (features,), lambda outputs: cross_entropy(outputs, labels), rounding=3e-2)
    assert all(each.grad is not None and bool(each.grad.any()) for each in model.parameters())


def test_a_model_that_refuses_other_rows_is_not_decided() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(WIDTH, 1), False

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                raise ValueError("only training\nhere")
            return self.layer(features).mean()

    found = surveyed(Picky(), (torch.randn(ROWS, WIDTH),))
    assert (found.kind, found.undecided) == ("", "ValueError: only training")


def test_outputs_that_cannot_be_made_again_go_on_as_they_are() -> None:
    class Own(tuple[torch.Tensor, ...]):
        __slots__ = ()

        def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> "Own":
            return super().__new__(cls, (one, other))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 4)

        def forward(self, features: torch.Tensor) -> Own:
            return Own(self.layer(features), features)

    found = surveyed(Model(), (torch.randn(ROWS, WIDTH),), lambda outputs: outputs[0].square().mean())
    assert found.kind == ""
    assert found.undecided != ""


def test_numbers_of_rows_stay_where_they_are() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.places = nn.Linear(WIDTH, 4), nn.Embedding(ROWS, 4)

        def forward(self, features: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return self.layer(features) + self.places(places)

    inputs = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    assert surveyed(Numbered(), inputs, lambda outputs: outputs.square().mean()).kind == ""
