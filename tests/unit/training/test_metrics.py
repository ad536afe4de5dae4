import math
import timeit

import numpy as np
import pytest
import torch

from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError
from zerotune.trial_lib.training.metrics import MetricAverager, as_metrics

ALONE = DistributedContext()


def averaged(*batches, strict_keys=False):
    averager = MetricAverager(strict_keys)
    for metrics in batches:
        averager.add(metrics)
    return averager.average(ALONE)


# -- what a batch may return -------------------------------------------------------------------------------------


def test_a_tensor_from_train_batch_is_the_loss():
    loss = torch.tensor(2.0)
    assert as_metrics(loss, "train_batch")["loss"] is loss


@pytest.mark.parametrize("where", ["train_batch", "evaluate_batch"])
@pytest.mark.parametrize("returned", [{"loss": 1.0}, {}])
def test_a_dict_stays(where, returned):
    assert as_metrics(returned, where) is returned


@pytest.mark.parametrize(
    ("returned", "named"),
    [(None, "None"), ((1, 2), "a tuple"), ([1.0], "a list"), (1.5, "a float"), (3, "an int"), ("x", "a str")],
)
def test_anything_else_from_train_batch_is_refused(returned, named):
    with pytest.raises(InvalidTrialError, match=rf"^train_batch returned {named}: .*the loss as a tensor, or a dict"):
        as_metrics(returned, "train_batch")


@pytest.mark.parametrize(
    ("returned", "named"), [(None, "None"), (1.5, "a float"), (torch.zeros(2), r"a tensor of shape \(2,\)")]
)
def test_evaluate_batch_has_to_return_a_dict(returned, named):
    with pytest.raises(InvalidTrialError, match=rf"^evaluate_batch returned {named}: it has to return a dict"):
        as_metrics(returned, "evaluate_batch")


# -- averages ----------------------------------------------------------------------------------------------------


def test_metrics_are_averaged_over_batches():
    assert averaged({"loss": torch.tensor(1.0), "acc": 0.5}, {"loss": torch.tensor(3.0), "acc": 1}) == {
        "loss": 2.0,
        "acc": 0.75,
    }


@pytest.mark.parametrize(
    "scalar",
    [
        3,
        3.0,
        np.float64(3),
        np.float32(3),
        np.int64(3),
        np.array(3),
        np.array([3.0]),
        torch.tensor(3),
        torch.tensor([3.0]),
        torch.tensor([[3.0]]),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.float16),
        torch.tensor(3.0, requires_grad=True) * 1,
    ],
)
def test_every_kind_of_scalar_is_a_metric(scalar):
    assert averaged({"m": scalar}, {"m": scalar}) == {"m": 3.0}


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor])
def test_a_bool_is_a_number(kind):
    assert averaged({"m": kind(True)}, {"m": kind(False)}) == {"m": 0.5}


def test_a_training_metric_is_averaged_over_the_batches_that_had_it():
    assert averaged({"loss": 1.0}, {"loss": 3.0, "d_loss": torch.tensor(5.0)}, {"d_loss": 7.0}) == {
        "loss": 2.0,
        "d_loss": 6.0,
    }


def test_metrics_come_in_the_order_of_their_first_batch():
    assert list(averaged({"b": torch.tensor(1.0), "a": 1.0}, {"c": torch.tensor(1.0)})) == ["b", "a", "c"]


def test_no_batches_have_no_metrics():
    assert averaged() == averaged({}) == averaged(strict_keys=True) == averaged({}, {}, strict_keys=True) == {}


def test_an_average_starts_anew():
    averager = MetricAverager(strict_keys=True)
    averager.add({"a": torch.tensor(1.0), "b": 1.0})
    assert averager.average(ALONE) == {"a": 1.0, "b": 1.0}
    averager.add({"c": 5.0})
    assert averager.average(ALONE) == {"c": 5.0}
    assert averager.average(ALONE) == {}


def test_a_rank_that_does_not_contribute_leaves_nothing_behind():
    averager = MetricAverager()
    averager.add({"loss": 1.0})
    assert averager.average(ALONE, contributes=False) == {}
    averager.add({"loss": 3.0})
    assert averager.average(ALONE) == {"loss": 3.0}


def test_a_loss_that_is_not_finite_is_kept():
    assert math.isnan(averaged({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(math.nan)})["loss"])
    assert averaged({"loss": 1.0}, {"loss": math.inf})["loss"] == math.inf


def test_many_half_precision_losses_are_summed_without_losing_any():
    loss = torch.tensor(1.0, dtype=torch.bfloat16)
    assert averaged(*[{"loss": loss}] * 1000) == {"loss": 1.0}


def test_the_users_tensors_stay_as_they_are_and_may_be_written_again():
    loss = torch.tensor(1.0, dtype=torch.float64)
    averager = MetricAverager()
    averager.add({"loss": loss})
    loss += 1
    averager.add({"loss": loss})
    assert loss.item() == 2.0
    assert averager.average(ALONE) == {"loss": 1.5}


def test_metrics_of_inference_mode_are_averaged():
    with torch.inference_mode():
        losses = [torch.tensor(value, dtype=torch.float64) for value in (1.0, 2.0)]
    assert averaged(*[{"loss": loss} for loss in losses]) == {"loss": 1.5}


def test_a_sum_keeps_no_graph():
    weight = torch.ones(1000, requires_grad=True)
    averager = MetricAverager()
    averager.add({"loss": (weight * weight).sum()})
    assert all(not total.requires_grad for total in averager._tensors.values())


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (torch.zeros(4, 2), r"a tensor of shape \(4, 2\)"),
        (torch.zeros(0), r"a tensor of shape \(0,\)"),
        (torch.tensor(1j), r"a complex tensor of shape \(\)"),
        (np.zeros(3), r"an array of shape \(3,\)"),
        ([1.0, 2.0], "a list"),
        ("high", "a str"),
        (None, "None"),
        (1j, "a complex"),
        ({"a": 1}, "a dict"),
    ],
)
@pytest.mark.parametrize("strict_keys", [False, True])
def test_a_metric_that_is_no_scalar_is_refused_by_name(value, described, strict_keys):
    where = "evaluate_batch" if strict_keys else "train_batch"
    with pytest.raises(InvalidTrialError, match=rf'^{where} returned {described} as the metric "m": .*wrap_reducer'):
        averaged({"m": value}, strict_keys=strict_keys)


def test_a_metric_that_becomes_no_scalar_later_is_refused():
    with pytest.raises(InvalidTrialError, match=r"a tensor of shape \(2,\)"):
        averaged({"m": torch.tensor(1.0)}, {"m": torch.zeros(2)})


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(InvalidTrialError, match="whose name is an int: names have to be strings"):
        averaged({1: 2.0})


def test_validation_metrics_that_differ_between_batches_are_refused():
    with pytest.raises(InvalidTrialError, match=r"in batch 2 than in batch 0 \(missing: acc; new: accuracy\)"):
        averaged({"loss": 1, "acc": 1}, {"acc": 1, "loss": 1}, {"loss": 1, "accuracy": 1}, strict_keys=True)


@pytest.mark.parametrize(
    ("second", "named"),
    [({"loss": 1}, r"\(missing: acc\)"), ({"loss": 1, "acc": 1, "f1": 1}, r"\(new: f1\)"), ({}, "loss")],
)
def test_missing_and_new_validation_metrics_are_named(second, named):
    with pytest.raises(InvalidTrialError, match=f"in batch 1 than in batch 0 .*{named}"):
        averaged({"loss": 1, "acc": 1}, second, strict_keys=True)


def test_a_first_batch_without_metrics_counts_too():
    with pytest.raises(InvalidTrialError, match=r"\(new: loss\)"):
        averaged({}, {"loss": 1}, strict_keys=True)


# -- cost --------------------------------------------------------------------------------------------------------


def test_adding_a_loss_costs_less_than_20_microseconds():
    averager, metrics = MetricAverager(), {"loss": torch.tensor(1.0)}
    # The best of many short repeats: the machine may be busy.
    best = min(timeit.repeat(lambda: averager.add(metrics), number=100, repeat=50)) / 100
    assert best < 20e-6
