import timeit

import pytest

from zerotune.trial_lib.training.deepspeed_trial import HOOKS, Callbacks, PyTorchCallback
from zerotune.trial_lib.training.distributed import InvalidTrialError

CALLS = {
    "on_trial_startup": (0, None),
    "on_training_start": (),
    "on_training_end": (),
    "on_training_epoch_start": (1,),
    "on_training_epoch_end": (1,),
    "on_training_workload_end": ({"loss": 1.0}, [{"loss": 1.0}]),
    "on_validation_start": (),
    "on_validation_epoch_start": (),
    "on_validation_epoch_end": ([{"loss": 1.0}],),
    "on_validation_end": ({"loss": 1.0},),
    "on_checkpoint_load_start": ({"batch": 1},),
    "on_checkpoint_save_start": ({"batch": 1},),
    "on_checkpoint_write_end": ("folder",),
    "on_checkpoint_end": ("folder",),
    "on_checkpoint_upload_end": ("name",),
    "on_trial_shutdown": (),
}


def recording(hook, seen, label):
    def record(self, *args):
        seen.append((label, *args))

    return type("Recording", (PyTorchCallback,), {hook: record})()


class Counter(PyTorchCallback):
    def __init__(self):
        self.count = 0

    def on_training_start(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_determineds_hooks_are_there():
    assert set(HOOKS) == set(CALLS)


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_is_called_with_its_arguments_in_the_order_of_the_callbacks(hook):
    seen = []
    callbacks = Callbacks({name: recording(hook, seen, name) for name in ("z", "a", "m")})
    callbacks.call(hook, *CALLS[hook])
    assert seen == [(name, *CALLS[hook]) for name in ("z", "a", "m")]


@pytest.mark.parametrize("hook", CALLS)
def test_every_hook_of_a_callback_does_nothing_unless_it_is_overridden(hook):
    assert getattr(PyTorchCallback(), hook)(*CALLS[hook]) is None
    callbacks = Callbacks({"a": PyTorchCallback()})
    callbacks.call(hook, *CALLS[hook])
    assert not callbacks.is_overridden(hook)


def test_an_overridden_hook_is_known():
    callbacks = Callbacks({"plain": PyTorchCallback(), "counter": Counter()})
    assert callbacks.is_overridden("on_training_start")
    assert not callbacks.is_overridden("on_training_end")


def test_a_hook_may_be_inherited_or_set_on_the_instance():
    seen = []
    inherited = type("Derived", (Counter,), {})()
    patched = PyTorchCallback()
    patched.on_training_start = lambda: seen.append("patched")
    Callbacks({"inherited": inherited, "patched": patched}).call("on_training_start")
    assert inherited.count == 1
    assert seen == ["patched"]


def test_a_hook_that_nobody_overrides_costs_next_to_nothing():
    callbacks = Callbacks({str(index): PyTorchCallback() for index in range(100)})
    best = min(timeit.repeat(lambda: callbacks.call("on_training_epoch_start", 1), number=1000, repeat=10)) / 1000
    assert best < 2e-6


def test_an_epoch_starts_with_its_number_or_without():
    seen = []

    class Old(PyTorchCallback):
        def on_training_epoch_start(self):
            seen.append("old")

    class New(PyTorchCallback):
        def on_training_epoch_start(self, epoch_idx):
            seen.append(epoch_idx)

    class Optional(PyTorchCallback):
        def on_training_epoch_start(self, epoch_idx=None):
            seen.append(epoch_idx)

    Callbacks({"old": Old(), "new": New(), "optional": Optional()}).call("on_training_epoch_start", 7)
    assert seen == ["old", 7, 7]


def test_a_failure_in_a_hook_comes_as_it_is():
    class Failing(PyTorchCallback):
        def on_training_start(self):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        Callbacks({"failing": Failing()}).call("on_training_start")


# -- states ------------------------------------------------------------------------------------------------------


def test_states_go_into_a_checkpoint_by_name_and_come_back():
    counter = Counter()
    counter.count = 3
    states = Callbacks({"counter": counter, "plain": PyTorchCallback()}).state_dict()
    assert states == {"counter": {"count": 3}, "plain": {}}
    again = Counter()
    Callbacks({"plain": PyTorchCallback(), "counter": again}).load_state_dict(states)
    assert again.count == 3


def test_a_callback_that_is_new_or_gone_since_the_checkpoint_is_no_error():
    new = Counter()
    Callbacks({"new": new}).load_state_dict({"gone": {"count": 5}})
    assert new.count == 0


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "named"), [([Counter()], "a list"), (None, "a NoneType"), (Counter(), "a Counter")]
)
def test_something_else_than_a_dict_of_callbacks_is_refused(returned, named):
    with pytest.raises(InvalidTrialError, match=f"build_callbacks returned {named}: .* a dict of callbacks by name"):
        Callbacks(returned)


def test_what_is_no_callback_is_refused_by_name():
    with pytest.raises(InvalidTrialError, match=r'returned a function as "early": .* PyTorchCallback'):
        Callbacks({"ok": Counter(), "early": lambda: None})


def test_a_class_instead_of_an_instance_is_refused():
    with pytest.raises(InvalidTrialError, match=r'the class Counter as "count": give an instance, Counter\(\.\.\.\)'):
        Callbacks({"count": Counter})


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(InvalidTrialError, match="under 1: names have to be strings"):
        Callbacks({1: Counter()})


def test_a_hook_that_does_not_take_its_arguments_is_refused_before_the_training():
    class Wrong(PyTorchCallback):
        def on_validation_end(self):
            pass

    with pytest.raises(InvalidTrialError, match=r'"wrong" defines on_validation_end\(\), but .* with \(metrics\)'):
        Callbacks({"wrong": Wrong()})
