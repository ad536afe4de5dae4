"""Each metric of a trial against a figure that was come by in another way."""

import dataclasses
import statistics
import threading
from pathlib import Path

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose

SHORT = StepWindow(start_step=2, end_step=4, max_steps=3)


def completed(result):
    assert result.outcome == "completed", result.reason
    return result.metrics


@pytest.mark.alone
def test_latency_counts_optimizer_steps_and_the_loading_of_their_data(trials):
    for accumulation in (1, 3):
        metrics = completed(trials.run("slow_data.py", micro_batch=2, accumulation=accumulation, window=SHORT))
        loading = 0.02 * accumulation
        assert loading < metrics["latency"] < 2.5 * loading
        assert metrics["throughput"] == pytest.approx(2 * accumulation / metrics["latency"])


@pytest.mark.alone
def test_the_parts_of_a_step_leave_out_the_loading_of_data(trials):
    metrics = completed(trials.run("slow_data.py", accumulation=3, window=SHORT))
    parts = [metrics[part] for part in ("forward", "backward", "step")]
    assert all(part > 0 for part in parts)
    assert sum(parts) < metrics["latency"] - 0.05


@pytest.mark.long
@pytest.mark.alone
def test_the_parts_of_a_step_make_up_most_of_it_where_data_cost_nothing(trials):
    result = trials.run("transformer.py", micro_batch=4, window=StepWindow(start_step=3, end_step=8, max_steps=6))
    metrics = completed(result)
    parts = metrics["forward"] + metrics["backward"] + metrics["step"]
    assert 0.8 * metrics["latency"] < parts <= 1.02 * metrics["latency"]
    assert metrics["backward"] > metrics["forward"]


@pytest.mark.long
def test_the_parts_of_a_pipelines_step_are_measured(trials):
    metrics = completed(trials.run("pipeline.py", "--width", "128", slots=2, accumulation=4, window=SHORT))
    assert all(0 < metrics[part] < metrics["latency"] for part in ("forward", "backward", "step"))


def test_throughput_counts_all_ranks(trials):
    metrics = completed(trials.run("slow_data.py", micro_batch=4, accumulation=2, slots=2, window=SHORT))
    assert metrics["throughput"] == pytest.approx(4 * 2 * 2 / metrics["latency"])


def test_steps_of_one_batch_are_measured_where_the_program_changes_it(trials):
    window = StepWindow(3, 5, max_steps=12, max_seconds=60, relative_error=0.0)
    result = trials.run("changes_batch.py", micro_batch=2, window=window)
    metrics = completed(result)
    # Doubled after steps 4, 8 and 12: of the first batch two steps count, of the second all four, which are enough.
    assert (metrics["measured_steps"], len(result.step_times)) == (4, 4)
    assert metrics["throughput"] == pytest.approx(2 * 2 / metrics["latency"])
    assert result.note == "The program changes its batch as it trains. It was measured at a global batch of 4."


def test_the_submitted_trial_counts_samples_as_its_rivals_do(trials):
    """What arrives counts, as the profile has found out: this program leaves its engine at 4 and feeds 8."""
    plan = trials.plan("ignores_batch.py", micro_batch=4, window=SHORT, purpose=Purpose.SUBMITTED)
    result = trials.start(dataclasses.replace(plan, as_typed=True)).result()
    assert completed(result)["throughput"] == pytest.approx(8 / result.metrics["latency"])
    assert result.micro_batch_arrived == 8


@pytest.mark.long
def test_a_pipelines_ranks_share_their_samples(trials):
    metrics = completed(trials.run("pipeline.py", micro_batch=3, accumulation=4, slots=2, window=SHORT))
    assert metrics["throughput"] == pytest.approx(3 * 4 / metrics["latency"])


def test_tokens_per_second_follow_from_the_length_of_a_sample(trials):
    metrics = completed(trials.run("transformer.py", "--length", "48", window=SHORT))
    assert metrics["tokens_per_second"] == pytest.approx(48 * metrics["throughput"])


def test_a_batch_without_tokens_has_no_tokens_per_second(trials):
    assert "tokens_per_second" not in completed(trials.run("plain.py", window=SHORT))


def test_the_losses_are_those_of_the_first_and_the_last_counted_step(trials):
    # The n-th micro-batch's loss is n; a step's is that of its last micro-batch.
    metrics = completed(trials.run("known_losses.py", accumulation=2, window=StepWindow(3, 5, max_steps=3)))
    assert (metrics["loss_first"], metrics["loss_last"]) == (6.0, 10.0)


@pytest.mark.parametrize(
    "window", [StepWindow(2, 4, max_steps=3), pytest.param(StepWindow(4, 4, max_steps=1), marks=pytest.mark.long)]
)
def test_steps_are_counted_from_the_first_to_the_last_that_were_asked_for(trials, window):
    result = trials.run("known_losses.py", window=window)
    assert completed(result)["loss_first"] == window.start_step
    assert len(result.step_times) == window.min_steps == result.metrics["measured_steps"]


@pytest.mark.alone
def test_more_steps_are_measured_while_their_times_vary(trials):
    result = trials.run("slow_data.py", "--varies", "1", window=StepWindow(max_steps=30, max_seconds=60))
    metrics = completed(result)
    assert len(result.step_times) > 12
    assert metrics["latency"] == pytest.approx(statistics.fmean(result.step_times))
    assert metrics["latency_spread"] == pytest.approx(statistics.stdev(result.step_times))
    assert metrics["latency_spread"] > 0.005


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 4])
def test_a_program_that_waits_for_workers_pays_the_mean_of_their_bursts(trials, workers):
    result = trials.run("slow_loader.py", "--workers", str(workers), micro_batch=16)
    metrics = completed(result)
    # Each worker takes 10 ms for a sample, and all of them do so at a time.
    assert len(result.step_times) >= workers
    assert metrics["throughput"] == pytest.approx(100 * workers, rel=0.25)


@pytest.mark.alone
def test_a_measurement_ends_after_its_seconds(trials):
    window = StepWindow(max_steps=1000, max_seconds=0.4, relative_error=0.0)
    result = trials.run("slow_data.py", window=window)
    assert completed(result)
    assert 0.4 <= sum(result.step_times) < 1.0


def test_a_script_that_ignores_the_micro_batch_is_invalid_and_told_how_to_follow_it(trials):
    result = trials.run("ignores_batch.py", micro_batch=4)
    assert result.outcome == "invalid"
    assert "batches of 8" in result.reason
    assert "micro-batch of 4" in result.reason
    assert "arg_mappings: {train_micro_batch_size_per_gpu: --batch_size}" in result.reason
    assert result.micro_batch_arrived == 8


def test_a_script_whose_own_batch_is_the_one_asked_for_completes(trials):
    assert completed(trials.run("ignores_batch.py", "--batch_size", "4", micro_batch=4, window=SHORT))


def test_a_loss_that_is_not_finite_is_diverged(trials):
    result = trials.run("nan_loss.py")
    assert result.outcome == "diverged"
    assert "not finite" in result.reason
    assert result.metrics == {}


def test_peak_memory_is_what_the_kernel_shows_from_outside(trials):
    running = trials.start(trials.plan("memory_use.py", micro_batch=8, window=StepWindow(3, 8, max_steps=6)))
    running.wait_for("pid ")
    (pid,) = running.pids()
    seen = 0
    while (now := _own_high_water_mark(pid)) is not None:
        seen = max(seen, now)
    result = running.result()
    assert completed(result)
    assert result.memory.peak[0] == pytest.approx(seen, rel=0.01)
    # 8 samples of 8 MiB each, on top of what the engine itself needs.
    assert result.memory.peak[0] - result.memory.after_initialize[0] > 64 * 2**20


def _own_high_water_mark(pid):
    """Returns the most that a process had, without the pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    kib = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM:", "RssFile:"))}
    return (int(kib["VmHWM"]) - int(kib["RssFile"])) * 1024 if kib else None


@pytest.mark.parametrize(
    ("stage", "slots"),
    [(1, 1), (3, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 2), (3, 1)))],
)
def test_the_profile_counts_parameters_once(trials, stage, slots):
    window = StepWindow(1, 1, max_steps=1)
    result = trials.run(
        "transformer.py", "--trains", "head", zero={"stage": stage}, slots=slots, purpose=Purpose.PROFILE, window=window
    )
    assert completed(result)
    block = 12 * 128**2 + (3 + 1 + 4 + 1) * 128 + 4 * 128
    assert result.profile.trainable_num_params == 384 * 128
    assert result.profile.num_params == 2 * 384 * 128 + 64 * 128 + 3 * block
    assert result.profile.data_parallel_size == slots
    assert not result.profile.pipeline_parallel


def test_the_profile_of_a_pipeline_counts_its_stages_together(trials):
    window = StepWindow(1, 1, max_steps=1)
    result = trials.run("pipeline.py", slots=2, accumulation=4, purpose=Purpose.PROFILE, window=window)
    assert completed(result)
    assert result.profile.num_params == 25 * 32 + 4 * 32**2 + 33 * 8
    assert result.profile.data_parallel_size == 1
    assert result.profile.pipeline_parallel


def test_saved_activations_are_those_of_one_sample(trials):
    window = StepWindow(1, 1, max_steps=1)
    one, four = (
        trials.run("plain.py", micro_batch=size, purpose=Purpose.PROFILE, window=window).profile.activation_mem_per_gpu
        for size in (1, 4)
    )
    # The input, and the output of the ReLU, in 4 bytes each.
    assert one == four == 4 * (24 + 64)


@pytest.mark.long
def test_a_pipelines_activations_are_those_of_one_micro_batch(trials):
    window = StepWindow(1, 1, max_steps=1)
    one, four = (
        trials.run("pipeline.py", slots=2, accumulation=steps, purpose=Purpose.PROFILE, window=window)
        for steps in (1, 4)
    )
    assert one.profile.activation_mem_per_gpu == four.profile.activation_mem_per_gpu > 0


def test_two_views_of_a_sample_are_one_sample(trials):
    metrics = completed(trials.run("two_forwards.py", micro_batch=4, window=SHORT))
    assert metrics["throughput"] == pytest.approx(4 / metrics["latency"])


def test_the_first_engine_is_the_one_that_is_measured(trials):
    result = trials.run("two_engines.py", micro_batch=4, window=SHORT)
    assert completed(result)["throughput"] == pytest.approx(4 / result.metrics["latency"])
    assert len(result.step_times) == 3


def test_a_loss_whose_own_backward_is_called_is_measured_too(trials):
    metrics = completed(trials.run("torch_style.py", accumulation=2, window=SHORT))
    assert 0 < metrics["backward"] < metrics["latency"]
    assert 0 < metrics["loss_first"] < 10


def test_outputs_that_a_program_gives_their_gradient_are_no_loss(trials):
    result = trials.run("torch_style.py", "--through", "outputs", accumulation=2, window=SHORT)
    assert "loss_first" not in completed(result)
    assert result.losses == []


@pytest.mark.parametrize(
    "how", ["return", *(pytest.param(how, marks=pytest.mark.long) for how in ("destroy", "exit 0"))]
)
def test_a_program_that_ends_by_itself_after_enough_steps_is_measured(trials, how):
    window = StepWindow(3, 5, max_steps=1000, max_seconds=60, relative_error=0.0)
    result = trials.run("ends.py", "--how", how, "--steps", "9", slots=2, window=window)
    assert completed(result)["measured_steps"] == 7


def test_a_function_bound_by_its_name_is_watched_and_a_dictionary_is_merged(trials):
    result = trials.run("from_import.py", config_flag="--config", micro_batch=3, window=SHORT)
    assert completed(result)["throughput"] == pytest.approx(3 / result.metrics["latency"])


def test_a_function_that_a_primed_library_has_bound_is_watched(trials, warm_starter):
    warm_starter.prime(["trainer_library"])
    assert completed(trials.run("uses_library.py", window=SHORT))


def test_trials_beside_each_other_do_not_disturb_each_others_counts(trials):
    both = [trials.start(trials.plan("known_losses.py", window=StepWindow(2, 4, max_steps=3))) for _ in range(2)]
    assert [completed(running.result())["loss_last"] for running in both] == [4.0, 4.0]
    assert threading.active_count() < 20


def test_a_step_that_was_skipped_does_not_count(trials):
    metrics = completed(trials.run("skipped_steps.py", zero={"stage": 1}, window=StepWindow(3, 5, max_steps=3)))
    assert (metrics["loss_first"], metrics["loss_last"]) == (4.0, 8.0)


def test_a_training_that_skips_all_its_steps_is_diverged(trials):
    result = trials.run("skipped_steps.py", "--skips", "all", zero={"stage": 1})
    assert result.outcome == "diverged"
    assert "in a row were skipped" in result.reason
