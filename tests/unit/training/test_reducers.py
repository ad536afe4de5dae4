from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch

from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError
from zerotune.trial_lib.training.metrics import MetricReducer, Reducers

ALONE = DistributedContext()


def mean(values):
    return sum(values) / len(values)


class Mean(MetricReducer):
    """A mean as the documents write it: it keeps a sum and a count."""

    def reset(self):
        self.sum, self.count = 0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    def per_slot_reduce(self):
        return self.sum, self.count

    def cross_slot_reduce(self, per_slot_metrics):
        sums, counts = zip(*per_slot_metrics, strict=True)
        return sum(sums) / sum(counts)


def reduced(function, *values, name="m"):
    reducers = Reducers()
    reducer = reducers.wrap(function, name)
    for value in values:
        reducer.update(value)
    return reducers.reduce(for_training=True, distributed=ALONE)


# -- what reducers do --------------------------------------------------------------------------------------------


def test_a_function_takes_all_values_in_their_order():
    seen = []
    assert reduced(lambda values: seen.append(values) or len(values), 3, "b", (1, 2)) == {"m": 3.0}
    assert seen == [[3, "b", (1, 2)]]


def test_a_reducer_of_the_users_own_is_kept_and_reduced():
    reducers, mine = Reducers(), Mean()
    assert reducers.wrap(mine, name="mean") is mine
    reducers.reset(for_training=True)
    mine.update(1)
    mine.update(4)
    assert reducers.reduce(for_training=True, distributed=ALONE) == {"mean": 2.5}


def test_a_reducer_without_a_name_returns_metrics_by_name():
    assert reduced(lambda values: {"low": min(values), "high": max(values)}, 1, 5, name=None) == {
        "low": 1.0,
        "high": 5.0,
    }


@pytest.mark.parametrize("number", [True, 1, 1.0, np.float32(1), torch.tensor(1), torch.ones(1, dtype=torch.bfloat16)])
def test_every_kind_of_scalar_becomes_a_float(number):
    metrics = reduced(lambda _: number, 1)
    assert metrics == {"m": 1.0}
    assert type(metrics["m"]) is float


def test_any_callable_is_a_function():
    assert reduced(partial(max, key=abs), -3, 2) == {"m": -3.0}


Pair = namedtuple("Pair", "score label")


def test_tensors_in_values_arrive_detached_whatever_contains_them():
    weight = torch.ones(2, requires_grad=True)
    seen = []
    reduced(
        lambda values: seen.extend(values) or 0,
        weight * 2,
        (weight * 3, 1),
        {"x": [weight * 4]},
        Pair(weight * 5, torch.tensor(1)),
    )
    alone, (in_tuple, one), in_dict, pair = seen
    tensors = [alone, in_tuple, in_dict["x"][0], pair.score]
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert (one, pair.label.item()) == (1, 1)


def test_a_value_keeps_no_graph_while_it_waits():
    reducer = Reducers().wrap(mean, "m")
    reducer.update((torch.ones(2, requires_grad=True) * 2, 1))
    assert not reducer.per_slot_reduce()[0][0].requires_grad


@pytest.mark.devices(1, "cuda")
def test_values_of_a_device_wait_in_main_memory():
    reducer = Reducers().wrap(sum, "m")
    for number in range(3):
        reducer.update(torch.full((2,), float(number), device="cuda"))
    values = reducer.per_slot_reduce()
    assert [value.device.type for value in values] == ["cpu"] * 3
    assert [value.tolist() for value in values] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


# -- phases ------------------------------------------------------------------------------------------------------


def test_reducers_serve_the_phases_that_they_are_for():
    reducers = Reducers()
    for name, phases in {
        "both": {},
        "training": {"for_validation": False},
        "validation": {"for_training": False},
    }.items():
        reducers.wrap(len, name, **phases)
    assert reducers.reduce(True, ALONE).keys() == {"both", "training"}
    assert reducers.reduce(False, ALONE).keys() == {"both", "validation"}


def test_a_reset_before_each_phase_keeps_their_values_apart():
    reducers = Reducers()
    both = reducers.wrap(sum, "total")
    reducers.reset(for_training=True)
    both.update(1)
    both.update(2)
    assert reducers.reduce(True, ALONE) == {"total": 3.0}
    reducers.reset(for_training=False)
    both.update(10)
    assert reducers.reduce(False, ALONE) == {"total": 10.0}
    reducers.reset(for_training=True)
    both.update(4)
    assert reducers.reduce(True, ALONE) == {"total": 4.0}


def test_a_reset_leaves_the_other_phases_reducers_alone():
    reducers = Reducers()
    training = reducers.wrap(sum, "training", for_validation=False)
    training.update(1)
    reducers.reset(for_training=False)
    training.update(2)
    assert reducers.reduce(True, ALONE) == {"training": 3.0}


def test_a_rank_that_does_not_contribute_is_not_asked():
    reducers = Reducers()
    reducers.wrap(lambda values: 1 / len(values), "m")
    assert reducers.reduce(True, ALONE, contributes=False) == {}


def test_no_reducers_have_no_metrics():
    assert Reducers().reduce(True, ALONE) == {}


# -- what is refused ---------------------------------------------------------------------------------------------


def wrapping(*arguments, **options):
    reducers = Reducers()
    reducers.wrap(mean, "taken")
    reducers.wrap(*arguments, **options)


def test_a_reducer_for_neither_phase_is_refused():
    with pytest.raises(InvalidTrialError, match='"auc" is for neither training nor validation'):
        wrapping(mean, "auc", for_training=False, for_validation=False)


def test_a_name_twice_is_refused():
    with pytest.raises(InvalidTrialError, match='"taken" is wrapped twice'):
        wrapping(Mean(), "taken")


@pytest.mark.parametrize(("reducer", "described"), [(3, "an int"), ("mean", "a str"), (None, "None")])
def test_what_is_neither_function_nor_reducer_is_refused(reducer, described):
    with pytest.raises(InvalidTrialError, match=f'"auc" is {described}: give a function .* or a MetricReducer'):
        wrapping(reducer, "auc")


def test_a_class_instead_of_an_instance_is_refused():
    with pytest.raises(InvalidTrialError, match=r'"Mean" is a class: give an instance, Mean\(\.\.\.\)'):
        wrapping(Mean)


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(InvalidTrialError, match="has an int for a name"):
        wrapping(mean, 3)


@pytest.mark.parametrize(
    ("returned", "described"),
    [({"a": 1}, "a dict"), (None, "None"), ([1], "a list"), (torch.zeros(2), r"a tensor of shape \(2,\)")],
)
def test_a_named_reducer_has_to_return_one_number(returned, described):
    with pytest.raises(InvalidTrialError, match=f'"auc" returned {described}: with a name it has to return one number'):
        reduced(lambda _: returned, 1, name="auc")


def test_a_reducer_without_a_name_has_to_return_a_dict():
    with pytest.raises(InvalidTrialError, match='"mean" returned a float: without a name it has to return a dict'):
        reduced(mean, 1, name=None)


@pytest.mark.parametrize(("returned", "named"), [({"x": [1]}, "a list as 'x'"), ({3: 1.0}, "a float as 3")])
def test_a_dict_of_something_else_than_numbers_by_name_is_refused(returned, named):
    def per_class(_):
        return returned

    with pytest.raises(InvalidTrialError, match=f'"per_class" returned {named}'):
        reduced(per_class, 1, name=None)


def test_two_reducers_of_one_metric_are_refused():
    reducers = Reducers()
    reducers.wrap(len, "n")
    reducers.wrap(lambda values: {"n": 1}, None)
    with pytest.raises(InvalidTrialError, match='"<lambda>" returned the metric "n", which another reducer'):
        reducers.reduce(True, ALONE)


@pytest.mark.parametrize(
    ("for_training", "batch", "option"),
    [(True, "train_batch", "for_training=False"), (False, "evaluate_batch", "for_validation=False")],
)
def test_a_function_that_fails_for_want_of_values_says_which_batch_gave_none(for_training, batch, option):
    reducers = Reducers()
    reducers.wrap(mean, "mean")
    with pytest.raises(InvalidTrialError, match=f'"mean" failed on an empty list: no {batch} .* wrap it with {option}'):
        reducers.reduce(for_training, ALONE)


def test_a_function_that_takes_an_empty_list_is_given_one():
    assert reduced(len) == {"m": 0.0}


def test_a_failure_of_the_users_own_comes_as_it_is():
    with pytest.raises(ZeroDivisionError):
        reduced(lambda values: 1 / 0, 1)
