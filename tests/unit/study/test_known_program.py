"""What the program has shown completes what the experiment says of it."""

from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes, ProgramProfile
from zerotune.trial_lib.study.program import (
    KnownProgram,
    completed_config,
    require_sizes,
    require_switchable,
    typed_switches,
)
from zerotune.trial_lib.study.typed_command import read_command

TYPED = ProgramProfile(typed_batch=BatchSizes(32, 8, 2))


def test_auto_is_what_the_engine_had_as_typed() -> None:
    config = {MICRO_BATCH: "auto", ACCUMULATION: "auto", TRAIN_BATCH: "auto", "bf16": {"enabled": "auto"}}
    assert completed_config(config, TYPED) == {
        MICRO_BATCH: 8,
        ACCUMULATION: 2,
        TRAIN_BATCH: 32,
        "bf16": {"enabled": "auto"},
    }


def test_auto_precision_and_buckets_are_what_the_engine_had_as_typed() -> None:
    settled = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 4096},
    }
    zero = {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": zero}
    assert completed_config(config, ProgramProfile(settled=settled)) == {
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        # What differs from stage to stage is the code's to fill in.
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": "auto"},
    }
    own = {"bf16": {"enabled": False}, "zero_optimization": {"stage": 1}}
    assert completed_config(own, ProgramProfile(settled=settled)) == own


def test_what_the_configuration_leaves_out_is_said() -> None:
    assert completed_config({TRAIN_BATCH: 32}, TYPED) == {TRAIN_BATCH: 32, MICRO_BATCH: 8, ACCUMULATION: 2}


def test_a_batch_that_the_code_computes_is_the_engines_and_not_the_file_s() -> None:
    assert completed_config({MICRO_BATCH: 1}, TYPED) == {MICRO_BATCH: 8, ACCUMULATION: 2}


def test_a_configuration_in_the_code_is_the_users_own_without_a_tuning_key() -> None:
    program = ProgramProfile(ds_config={MICRO_BATCH: 2, "autotuning": {"enabled": True}})
    assert completed_config({}, program) == {MICRO_BATCH: 2}


def test_a_mapping_of_the_experiment_goes_before_one_that_was_found() -> None:
    found = ProgramProfile(
        typed_batch=BatchSizes(32, 8, 2), arg_mappings={MICRO_BATCH: "--found", ACCUMULATION: "--steps"}
    )
    known = KnownProgram({MICRO_BATCH: "auto"}, {MICRO_BATCH: "--batch"}).learned(found)
    assert known.arg_mappings == {MICRO_BATCH: "--batch", ACCUMULATION: "--steps"}
    assert known.base_config == {MICRO_BATCH: 8, ACCUMULATION: 2}


def test_a_batch_stands_in_the_code_where_no_flag_sets_it() -> None:
    found = ProgramProfile(batch={MICRO_BATCH: 8})
    assert not KnownProgram().is_batch_in_code
    assert KnownProgram().learned(found).is_batch_in_code
    assert not KnownProgram(arg_mappings={MICRO_BATCH: "--batch"}).learned(found).is_batch_in_code


def test_the_default_of_an_option_that_was_not_typed_is_the_users_value() -> None:
    typed = {"--attention": None, "--compile": False, "--pin": None, "--workers": 4, "OWN": None}
    found = ProgramProfile(switches={"--attention": "sdpa", "--compile": False, "--pin": True, "--workers": 2})
    known = KnownProgram({MICRO_BATCH: 8}, switches=typed).learned(found)
    learned = {"--attention": "sdpa", "--compile": False, "--pin": None, "--workers": 4, "OWN": None}
    assert known.switches == known.base_config["program"] == learned
    # A resumed study learns the same again.
    assert known.learned(found).switches == learned


def test_an_option_that_is_on_by_default_is_not_turned_off_by_leaving_it_out() -> None:
    found = ProgramProfile(switches={"--pin": True, "--compile": False})
    require_switchable({"--pin": True, "--compile": False}, found)
    require_switchable({"--pin": False}, None)
    with pytest.raises(InputError, match="default of this option is true") as refused:
        require_switchable({"--pin": False}, found)
    assert "--vary \"--pin='true','false'\"" in str(refused.value)


def test_the_remedy_for_a_switch_of_a_file_is_in_the_words_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text("entrypoint: deepspeed train.py\nsearch_space:\n  program:\n    --pin: [true, false]\n")
    with pytest.raises(InputError) as refused:
        require_switchable({"--pin": False}, ProgramProfile(switches={"--pin": True}), file)
    assert refused.value.where.startswith(f"{file}:4:")
    assert "`\"--pin\": ['true', 'false']`" in str(refused.value)
    assert "--vary" not in str(refused.value)


def test_a_switch_that_the_program_does_not_take_is_named_where_it_is_varied(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text("entrypoint: deepspeed train.py\nsearch_space:\n  program:\n    --nosuch: [0, 1]\n")
    found = ProgramProfile(refused_options={"--nosuch": "your program has no option --nosuch"})
    with pytest.raises(InputError) as typed:
        require_switchable({}, found)
    assert typed.value.where == "--vary --nosuch"
    with pytest.raises(InputError) as written:
        require_switchable({}, found, file)
    assert written.value.where.startswith(f"{file}:4:")
    file.unlink()
    with pytest.raises(InputError) as gone:
        require_switchable({}, found, file)
    assert gone.value.where == f"{file}: --nosuch"


def test_the_users_own_layout_has_to_be_known() -> None:
    require_sizes({"--stages": "2", "--compile": None}, {"--stages": "pipeline"})
    with pytest.raises(InputError, match="own pipeline layout is not known"):
        require_sizes({"--stages": None}, {"--stages": "pipeline"})


@pytest.mark.parametrize("place", ["model:compile", "--torch_compile"])
def test_trials_that_compile_find_the_compiler_imported(place: str) -> None:
    assert KnownProgram(switches={place: False}).imported_later == ("torch._inductor.compile_fx",)
    assert KnownProgram(switches={"--lr": 0.1}).imported_later == ()


def test_a_trainers_ulysses_has_one_rank_if_its_variable_is_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "PARALLELISM_CONFIG_SP_SIZE"
    monkeypatch.delenv(place, raising=False)
    (tmp_path / "train.py").touch()
    experiment = read_command(["python", "train.py"], {}, tmp_path, None, vary={place: [1, 2]})
    assert typed_switches(experiment, {}) == {place: 1}
    assert typed_switches(experiment, {place: "2"}) == {place: 2}
    assert KnownProgram.of(experiment, {}).layouts == {place: "sequence"}
