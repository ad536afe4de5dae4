import json

import pytest

from trial_lib.measure.batch_source import BatchSource


def reason(folder, arguments=(), environment=None, configuration=None):
    return BatchSource(list(arguments), environment or {}, folder).ignored_batch_reason(1, 8, configuration)


def test_both_sizes_are_named(tmp_path):
    assert "batches of 8 to an engine that was set to a micro-batch of 1" in reason(tmp_path)


@pytest.mark.parametrize(
    "flag", ["--batch-size", "--batch_size", "-b", "--bs", "--train-bsz", "--mbs", "--perDeviceBatch"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_flag_with_the_size_that_came_is_the_one_to_map(tmp_path, flag, joined):
    arguments = [f"{flag}=8"] if joined else [flag, "8"]
    written = reason(tmp_path, ["--epochs", "3", *arguments, "--name", "x"])
    assert f"--map train_micro_batch_size_per_gpu={flag} " in written
    assert ("If -b 8" in written) == (flag == "-b")


def test_a_flag_named_for_the_batch_comes_before_one_that_has_the_same_value(tmp_path):
    assert "={flag} ".format(flag="--batch") in reason(tmp_path, ["--layers", "8", "--batch", "8"])


def test_a_flag_comes_before_a_variable_and_that_before_a_file(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8}))
    variables = {"BATCH_SIZE": "8", "OMP_NUM_THREADS": "8"}
    assert "=--batch-size " in reason(tmp_path, ["--batch-size", "8"], variables)
    assert "Its environment has BATCH_SIZE=8" in reason(tmp_path, [], variables)
    assert "ds.json has train_micro_batch_size_per_gpu 8" in reason(tmp_path, [], {"OMP_NUM_THREADS": "8"})


def test_what_is_no_configuration_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_text("{torn")
    (tmp_path / "b.json").write_text("[8]")
    (tmp_path / "c.json").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8}))
    assert "deep/ds.json has" in reason(tmp_path)


def test_a_size_in_the_codes_own_configuration_is_told(tmp_path):
    written = reason(tmp_path, ["--layers", "8"], configuration={"train_micro_batch_size_per_gpu": 8})
    assert "The configuration in the code has" in written


def test_where_nothing_fits_all_ways_are_named(tmp_path):
    written = reason(tmp_path, ["--batch-size", "9"], {"BATCH": "9"}, {"train_micro_batch_size_per_gpu": "auto"})
    for way in ("engine.train_micro_batch_size_per_gpu()", "JSON file", "--map", "arg_mappings", "use more data"):
        assert way in written
