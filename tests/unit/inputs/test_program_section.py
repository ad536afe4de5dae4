"""The program's switches in `search_space` and by `--vary`: how they are read, and what they are refused for."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.inputs.search_space import check_switches, read_search_space, read_vary, refuse_mapped
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.arms import RequestedKnob

STAGE = "zero_optimization.stage"


def read(program: dict[str, Any], **others: Any) -> dict[str, RequestedKnob]:
    return {request.path: request for request in read_search_space({**others, "program": program})}


def test_a_switch_has_the_values_of_any_knob() -> None:
    found = read({"--gc": [True, False], "conf.yaml:a.workers": {"min": 0, "max": 4, "count": 3}, "OMP": 2})
    assert found["program.--gc"] == RequestedKnob("program.--gc", (True, False), coarse=True)
    assert found["program.conf.yaml:a.workers"].values == (0, 2, 4)
    assert found["program.OMP"].values == (2,)


def test_a_variable_is_fine_and_anything_else_coarse_unless_it_says_otherwise() -> None:
    program = {
        "--gc": [True, False],
        "OMP": [1, 2],
        "--workers": {"values": [0, 2], "coarse": False},
        "CACHE": {"values": ["a", "b"], "coarse": True, "changes_mathematics": True},
    }
    found = read(program)
    coarse = {path: request.is_coarse for path, request in found.items()}
    assert coarse == {
        "program.--gc": True,
        "program.OMP": False,
        "program.--workers": False,
        "program.CACHE": True,
    }
    assert [path for path, request in found.items() if request.changes_mathematics] == ["program.CACHE"]


def test_conditions_go_both_ways_between_deepspeeds_settings_and_coarse_switches() -> None:
    found = read(
        {"--gc": {"values": [True, False], "when": {STAGE: [2, 3]}}, "OMP": {"values": [1, 2], "when": {"--gc": True}}},
        **{"zero_optimization.overlap_comm": {"values": [True, False], "when": {"program.--gc": [False]}}},
    )
    assert found["program.--gc"].when == {STAGE: (2, 3)}
    assert found["program.OMP"].when == {"program.--gc": (True,)}
    assert found["zero_optimization.overlap_comm"].when == {"program.--gc": (False,)}


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ([1], "expected a mapping"),
        ({"two words": [1]}, '"two words" is no place in a command'),
        ({"--a-b": [1], "--a_b": [2]}, "--a_b is varied twice"),
        ({"--a": []}, "--a has no values"),
        ({"--a": [None]}, "--a has no value but that as typed"),
        ({"--a": [[1, 2]]}, "a value is one word"),
        ({"--a": {"values": [1], "coarse": 1}}, "coarse: expected true or false"),
        ({"--a": {"values": [1], "mathematics": True}}, 'unknown key "mathematics"'),
        ({"--a": {"values": [1], "when": {"--b": [1]}}}, "--b is not varied"),
        ({"--a": {"values": [1], "when": {"OMP": [1]}}, "OMP": [1, 2]}, "--a cannot depend on OMP"),
        ({"--a": {"coarse": True}}, "--a has neither values nor a range"),
        ({"--a": ["relu", "relu"]}, "--a has relu twice"),
        ({"--a": [1, "1"]}, "--a has 1 twice"),
        ({"--a": {"values": [True, False, True]}}, "--a has true twice"),
        ({"--a": [1, None, None]}, "--a has its value as typed twice"),
        ({"--a": {"values": [1, 2], "when": {"--b": [3]}}, "--b": [1, 2]}, "--b is never 3"),
    ],
)
def test_mistakes_are_told(program: Any, what: str) -> None:
    with pytest.raises(InputError) as refused:
        read_search_space({"program": program})
    assert what in str(refused.value)


@pytest.mark.parametrize("said", [{"min": 0, "max": 10**9, "count": 1_000_000}, list(range(101))])
def test_more_values_than_a_search_can_try_are_refused_before_they_are_made(said: Any) -> None:
    count = said["count"] if isinstance(said, dict) else len(said)
    with pytest.raises(InputError) as refused:
        read({"OWN": said})
    assert refused.value.what == f"OWN has {count} values, and a search can try 100."
    assert refused.value.remedy == "Name fewer, or write a range with a smaller `count`."
    assert len(read({"OWN": {"min": 0, "max": 10**9, "count": 100}})["program.OWN"].values) == 100


def test_coarse_switches_have_no_more_combinations_than_a_search_can_try() -> None:
    program: dict[str, Any] = {"--x": list(range(11)), "--y": list(range(10)), "OWN": list(range(100))}
    with pytest.raises(InputError) as refused:
        read(program)
    assert refused.value.what == "--x, --y have 110 combinations at each ZeRO stage, and a search can try 100."
    assert "`coarse: false`" in refused.value.remedy
    assert len(read({**program, "--y": {"values": list(range(10)), "coarse": False}})) == 3


def test_a_condition_may_name_the_value_that_was_typed_if_that_is_tried() -> None:
    found = read({"--a": {"values": [1, 2], "when": {"--b": [3]}}, "--b": [None, 1], "--c": [True, "true", 1, 1.0]})
    assert found["program.--a"].when == {"program.--b": (3,)}
    assert found["program.--c"].values == (True, "true", 1, 1.0)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("--gc=true,False", [True, False]),
        ("--attn=sdpa, eager", ["sdpa", "eager"]),
        ("--gc='true','false'", ["true", "false"]),
        ("trainer.compile=True,False", ["True", "False"]),
        ("OMP=1,2", [1, 2]),
        ("--lr=0.5,1e-3,007", [0.5, "1e-3", "007"]),
        ('CONF="a:1,b:2",', ["a:1,b:2"]),
        ("trainer.devices=[0],'[0,1]'", ["[0]", "[0,1]"]),
        ("CONF=,expandable_segments:True", [None, "expandable_segments:True"]),
        ("CONF=null,''", [None, ""]),
        ("--a=b=c", ["b=c"]),
        ("OMP={values: [1, 2], coarse: true}", {"values": [1, 2], "coarse": True}),
    ],
)
def test_vary_says_the_same_in_one_word(word: str, values: Any) -> None:
    place = word.partition("=")[0]
    (found,) = read_vary([word]).values()
    assert repr(found) == repr(values)
    assert read({place: found}).keys() == {f"program.{place}"}


@pytest.mark.parametrize(
    ("words", "where", "what"),
    [
        (["--gc"], "--vary --gc", "--gc has no values"),
        (["--gc='true"], "--vary --gc='true", "open quote"),
        (["--gc={values: ["], "--vary --gc={values: [", "not valid YAML"),
        (["--gc={1: 2}"], "--vary --gc={1: 2}", "a key is text, this one 1 is of type int"),
        (["--gc={true,false}"], "--vary --gc={true,false}", "a key is text"),
        (["--gc={values: [1], when: {1: 1}}"], "--vary --gc={values: [1], when: {1: 1}}", "a key is text"),
        (["--gc={values: 1, values: 2}"], "--vary --gc={values: 1, values: 2}", 'the key "values" occurs twice'),
        (["--gc=[true,false]"], "--vary --gc=[true,false]", "[true has a bracket without its other half"),
        (["--gc={values: [2026-11-27, 1]}"], "--vary --gc", "2026-11-27 (a date) is no text"),
        (["--gc={values: [.nan, 1]}"], "--vary --gc", "the number nan is no text"),
        (["--gc={min: 1}"], "--vary --gc", "the range of --gc has no max"),
        ([""], "--vary ", '"" is no place in a command'),
        (["--gc={values: [1], fine: true}"], "--vary --gc", 'unknown key "fine"'),
        (["--gc=1", "--gc=2"], "--vary --gc=2", "varied twice"),
        (["--gc=1,2,1"], "--vary --gc", "--gc has 1 twice"),
        (["a b=1"], "--vary a b=1", "no place"),
    ],
)
def test_mistakes_of_vary_name_it(words: list[str], where: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        read_vary(words)
    assert (refused.value.where, what in refused.value.what) == (where, True)


def check(place: str, command: str = "deepspeed --num_gpus 2 train.py --deepspeed_config ds.json -b 4 a=1") -> None:
    entrypoint = parse_entrypoint(command, shell={"own": "1"})
    requests = read_search_space({"program": {place: [1, 2]}})
    check_switches(requests, entrypoint, {"own": "1"}, {"train_micro_batch_size_per_gpu": "-b"}, Path())


def test_what_the_command_may_have_is_accepted() -> None:
    for place in ("--gc", "a", "trainer.a", "own", "OMP_NUM_THREADS", "argv:4", "++zero_optimization.stage"):
        check(place)


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("-b", "the search itself chooses the batch"),
        ("--deepspeed_config", "names the DeepSpeed configuration"),
        ("--num_gpus", "an option of the launcher"),
        ("RANK", "ZeroTune itself sets RANK"),
        ("--local-rank", "ZeroTune itself sets --local-rank"),
        ("zero_optimization.stage", "a setting of DeepSpeed, which a search varies without this"),
        ("other", "the command has no argument other=..."),
        ("argv:9", "there is no word 9"),
        ("conf.yaml:a.b", "no argument of the program is conf.yaml"),
    ],
)
def test_what_names_nothing_in_the_command_or_what_is_zerotunes_is_refused(place: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        check(place)
    assert what in str(refused.value)
    assert refused.value.where == place


def test_a_trial_class_has_variables_alone() -> None:
    check("OMP", "model_def:Trial")
    with pytest.raises(InputError, match="a trial class, which has no command line"):
        check("--gc", "model_def:Trial")


def test_an_option_that_the_program_was_seen_to_take_its_batch_from_is_refused() -> None:
    found = {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}
    with pytest.raises(InputError, match="the search itself chooses the batch"):
        refuse_mapped(["--per-device-train-batch-size"], found)
    refuse_mapped(["--gc"], found)
