"""A plan with switches of the program: the values that it foresees apart, and what it says of the others."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.unit.plan.pretended_runs import pretended_run
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import configuration
from zerotune.trial_lib.plan.arm_work import file_word
from zerotune.trial_lib.plan.devices import known_devices, read_devices
from zerotune.trial_lib.plan.planning import Planned, PlanProblem, WantedRun, plan
from zerotune.trial_lib.search.arms import RequestedKnob

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 0},
}
SWITCHES = (
    RequestedKnob("program.--twice", (True, False), coarse=True),
    RequestedKnob("program.--layers", (1, 2), coarse=True),
    RequestedKnob("program.--workers", (0, 4), coarse=True),
    RequestedKnob("program.--kernel", ("relu", "none"), coarse=True),
    RequestedKnob("program.OMP_NUM_THREADS", (1, 2), coarse=True),
    RequestedKnob("program.--fine", (1, 2), coarse=False),
)
TYPED = {"--twice": False, "--layers": None, "--workers": 0, "--kernel": "relu", "OMP_NUM_THREADS": None, "--fine": 1}
PARAMETERS = 10**9


class Foresees:
    """Foresees by hand. `--layers` grows the model, `--twice` its work, and no kernel is called `none`."""

    def __init__(self, seconds: float = 0.0, typed: Mapping[str, Any] | None = None) -> None:
        self.names: list[str] = []
        self._seconds, self._typed = seconds, typed or {}

    def __call__(self, run: WantedRun) -> ForeseenRun:
        self.names.append(run.name)
        config = overwrite_deepspeed_config(BASE, copy.deepcopy(dict(run.overrides)))
        switches = {**self._typed, **config.get("program", {})}
        if switches.get("--kernel") == "none":
            return ForeseenRun(world=run.asked.count, stopped="argument --kernel: invalid choice: 'none'")
        parameters = PARAMETERS * (switches.get("--layers") or switches.get("model.layers") or 1)
        steps = config.get("gradient_accumulation_steps", 1)
        made = pretended_run(config, run.asked.count, config["train_micro_batch_size_per_gpu"], steps, parameters)
        times = 2 if switches.get("--twice") else 1
        operations = tuple(each._replace(flops=times * each.flops) for each in made.operations)
        program = {"switches": {"--layers": 1}}
        return replace(made, operations=operations, program=program, seconds=self._seconds)


def planned(
    foresees: Callable[[WantedRun], ForeseenRun], requests: tuple[RequestedKnob, ...] = SWITCHES, **fields: Any
) -> Planned:
    asked = read_devices(["a100-80gb:8"], [], known_devices())
    given = {"stages": (0, 1), "processes": 2, "requests": requests, "switches": TYPED, **fields}
    return plan(PlanProblem(asked=asked, base_config=BASE, **given), foresees)


def test_each_value_that_changes_the_program_makes_rows_and_the_others_are_named() -> None:
    foresees = Foresees()
    found = planned(foresees)
    rows = {arm.label: arm for arm in found.devices[0].arms if "offload" not in arm.label}
    assert rows.keys() == {
        f"z{stage}{twice}{layers}" for stage in (0, 1) for twice in ("", "-twice") for layers in ("", "-layers=2")
    }
    assert rows["z0"].is_own
    assert rows["z0"].knobs == {"program": {"--twice": False, "--layers": 1}}
    assert rows["z1-twice-layers=2"].ds_config["program"] == {"--twice": True, "--layers": 2}
    speeds = {label: arm.samples_per_s.value for label, arm in rows.items() if arm.samples_per_s is not None}
    assert speeds["z0-twice"] < speeds["z0"]
    assert speeds["z0-layers=2"] < speeds["z0"]
    assert [note.partition(":")[0] for note in found.notes] == [
        "--workers=4 has the rows of --workers=0",
        "--kernel=none cannot be foreseen",
        "OMP_NUM_THREADS stays as typed",
        "--fine stays as typed, because it is a fine switch. With `coarse",
    ]
    # One run for each value, and none of its arms for a value that changes nothing.
    assert sum("workers=4" in name for name in foresees.names) == 1
    assert sum("kernel=none" in name for name in foresees.names) == 1


def test_the_first_run_tells_the_switches_that_were_not_typed() -> None:
    (devices,) = planned(Foresees()).devices
    own = next(arm for arm in devices.arms if arm.is_own)
    assert own.ds_config["program"] == {"--twice": False, "--layers": 1}


def test_a_value_that_does_the_same_as_the_typed_one_leaves_rows_as_typed() -> None:
    layers = (RequestedKnob("program.model.layers", (1, 2), coarse=True),)
    found = planned(Foresees(), requests=layers, switches={"model.layers": None})
    assert found.devices[0].arms
    rows = {arm.label: arm.knobs["program"] for arm in found.devices[0].arms if not arm.is_own}
    assert rows["z1"] == {"model.layers": None}
    assert rows["z1-model.layers=2"] == {"model.layers": 2}
    assert "z1-model.layers=1" not in rows


def test_if_runs_take_long_one_arm_of_each_setting_has_a_second_size_and_no_arm_grows_as_other_switches_do() -> None:
    foresees = Foresees(seconds=60.0)
    found = planned(foresees, requests=SWITCHES[:1], train_batch_size=64)
    larger = [name for name in foresees.names if "-mbs4-" in name]
    assert len(larger) == 2
    assert sum("twice" in name for name in larger) == 1
    for arm in found.devices[0].arms:
        assert arm.most_micro_batch > 4, arm.label


def test_a_switch_that_resizes_the_model_is_not_judged_by_the_typed_one() -> None:
    layers = (RequestedKnob("program.--layers", (1, 64), coarse=True),)
    found = planned(Foresees(seconds=60.0), requests=layers)
    row = next(arm for arm in found.devices[0].arms if arm.label == "z0-layers=64")
    assert row.runs
    assert row.fits < 1e-9


def test_values_that_a_condition_names_stay_though_they_do_the_same() -> None:
    asked = (
        SWITCHES[2],
        RequestedKnob("program.--layers", (1, 2), {"program.--workers": (4,)}, coarse=True),
    )
    found = planned(Foresees(), requests=asked)
    labels = {arm.label for arm in found.devices[0].arms}
    assert {"z1-workers=4-layers=2", "z1"} <= labels
    assert "z1-layers=2" not in labels


def test_the_name_of_a_runs_file_has_no_path_and_is_not_too_long() -> None:
    assert file_word("z3-offload-optimizer") == "z3-offload-optimizer"
    path = file_word("z1-conf/train.yaml:model.loops=1")
    assert "/" not in path
    assert path != file_word("z1-conf_train.yaml_model.loops=1")
    assert len(file_word("z1-" + 300 * "x")) < 200


def test_an_option_that_was_typed_has_rows_without_it_beside_the_users_own() -> None:
    typed = {"--twice": True}
    found = planned(Foresees(typed=typed), requests=SWITCHES[:1], switches=typed)
    rows = {arm.label: arm for arm in found.devices[0].arms if "offload" not in arm.label}
    assert rows.keys() == {"z0", "z0-no-twice", "z1", "z1-no-twice"}
    assert rows["z0"].knobs == {"program": {"--twice": True}}
    assert rows["z0-no-twice"].ds_config["program"] == {"--twice": False}
    assert configuration(rows["z1-no-twice"]).startswith("ZeRO 1 with no --twice, micro-batch")
    assert found.devices[0].best.endswith("-no-twice")


def test_a_request_for_another_layout_is_named_and_left_out() -> None:
    asked = (RequestedKnob("tensor_parallel.autotp_size", (1, 2)), replace(SWITCHES[1], layout="pipeline"))
    found = planned(Foresees(), requests=asked)
    because = "because a plan counts the replicas of one layout."
    assert found.notes == (
        f"tensor_parallel.autotp_size stays as you have it, {because}",
        f"--layers stays as typed, {because}",
    )


def test_a_compiled_model_has_rows_though_it_runs_as_it_is_written() -> None:
    asked = (RequestedKnob("program.--torch_compile", (True, False), coarse=True),)
    (devices,) = planned(Foresees(), requests=asked, switches={"--torch_compile": False}).devices
    rows = {arm.label: arm for arm in devices.arms if "offload" not in arm.label}
    assert rows.keys() == {f"z{stage}{word}" for stage in (0, 1) for word in ("", "-torch-compile")}
    plain, compiled = (rows[label].samples_per_s for label in ("z1", "z1-torch-compile"))
    assert plain is not None
    assert compiled is not None
    assert compiled.value >= plain.value


def lengths(tokens: Any, *values: int) -> list[str]:
    """The notes on lengths of a plan that varies `--layers`. `tokens` has those of a run by its switches and size."""

    def foresee(run: WantedRun) -> ForeseenRun:
        made = Foresees()(run)
        layers = run.overrides.get("program", {}).get("--layers") or 1
        return replace(made, tokens=tokens(layers, made))

    asked = read_devices(["a100-80gb:8"], [], known_devices())
    requests = (RequestedKnob("program.--layers", values, coarse=True),)
    given = {"stages": (0, 1), "requests": requests, "switches": {"--layers": None}}
    found = plan(PlanProblem(asked=asked, base_config=BASE, **given), foresee)
    return [note for note in found.notes if note.startswith("Samples differ in length")]


def test_samples_whose_length_a_switch_sets_do_not_differ_in_length() -> None:
    assert lengths(lambda layers, run: 512 * layers, 1, 2) == []
    (said,) = lengths(lambda layers, run: 512 * layers + 100 * run.micro_batch, 1, 2)
    assert "have 612 to 712 tokens" in said or "have 712 to 812 tokens" in said


def test_a_run_that_stopped_says_nothing_of_lengths() -> None:
    def stops_late(run: WantedRun) -> ForeseenRun:
        made = Foresees()(run)
        if made.micro_batch == 2:
            return replace(made, tokens=512)
        stopped.append(run.name)
        return replace(made, tokens=4, stopped="argument --layers: too large")

    stopped: list[str] = []
    found = planned(stops_late, requests=())
    assert stopped
    assert not [note for note in found.notes if note.startswith("Samples differ in length")]
