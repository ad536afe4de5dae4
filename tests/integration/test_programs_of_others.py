"""Kinds of programs as other people write them, tuned as they type it: `tests/programs/others`."""

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from others_fixtures import Copied, Triple, Tuned, Typed, engine_of, expect_answered, expect_trained_alike, stage_of
from study_fixtures import query

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.folders import OwnCommand
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.read_study import read_study

# The micro-batch, the accumulation and the global batch of two ranks, as each program's user has typed them.
TYPED: dict[str, Triple] = {
    "uneven_shards": (8, 1, 16),
    "hydra_overrides": (8, 2, 32),
    "teacher_and_student": (16, 2, 64),
    "token_budget": (1, 2, 4),
    "ends_by_os_exit": (8, 2, 32),
    "trainer_custom_loss": (4, 2, 16),
    "experts": (16, 1, 32),
    "subcommands": (8, 2, 32),
    "fire_function": (4, 4, 32),
    "launcher_yaml": (4, 2, 16),
    "megatron_flags": (4, 4, 32),
    "autotuner_lists": (2, 2, 8),
    "killed_above": (4, 8, 64),
    "split_batches": (4, 2, 16),
    "named_preset": (4, 2, 16),
    "rlhf_flags": (4, 4, 32),
}
NEEDS = {
    "hydra_overrides": "hydra",
    "fire_function": "fire",
    "trainer_custom_loss": "accelerate",
    "launcher_yaml": "accelerate",
    "autotuner_lists": "accelerate",
    "split_batches": "accelerate",
    "named_preset": "accelerate",
}
# Of the study that `make test` has time for.
SHORT = ("--max-trials", "3")
STUDY = pytest.mark.timeout(600)


def skip_without(name: str) -> None:
    """Skips a test of a program that needs what is not installed."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])


class Desk:
    """Where a user types the commands of these programs."""

    def __init__(self, root: Path, home: Path, server: PrefectServer, store: Path) -> None:
        self._parts = (root, home, server, store)

    def at(self, name: str) -> Typed:
        """Returns a copy of a program's folder."""
        skip_without(name)
        return Typed(name, *self._parts)


@pytest.fixture
def desk(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Desk:
    return Desk(tmp_path, home, server, empty_store)


def typed_words(tuned: Tuned, launcher: str) -> list[str]:
    """Returns the words of the command to train with, the one that starts the ranks."""
    (line,) = (line for line in tuned.best_command.splitlines() if f"{launcher} " in line)
    return shlex.split(line.removeprefix("#"))


def number_behind(words: list[str], option: str) -> int:
    """Returns the number of the one option of a name."""
    places = [place for place, word in enumerate(words) if word == option]
    assert len(places) == 1, words
    return int(words[places[0] + 1])


def number_in(words: list[str], start: str) -> int:
    """Returns the number of the one word that starts so."""
    (word,) = (word for word in words if word.startswith(start))
    return int(word.removeprefix(start))


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("name", TYPED)
def test_the_batch_that_is_typed_is_that_of_the_plain_programs_engine(tmp_path: Path, name: str) -> None:
    skip_without(name)
    assert Copied(name, tmp_path).plain_engine() == TYPED[name]


# A trial of it waits for ten seconds until it is sure that its ranks do.
@pytest.mark.alone
@pytest.mark.timeout(700)
@pytest.mark.long
def test_ranks_whose_shards_do_not_divide_are_measured_within_the_steps_that_all_of_them_have(desk: Desk) -> None:
    tuned = desk.at("uneven_shards").tune(timeout=600)
    expect_answered(tuned, TYPED["uneven_shards"])
    assert "The ranks have different numbers of batches: rank 0 had" in " ".join(
        tuned.document["confirmation"]["notes"]
    )
    # Rank 0 has made them before anything was measured; no trial has made them for itself.
    assert tuned.new == {f"rows/part-{number}.pt" for number in range(5)}
    for result in tuned.results:
        assert result.outcome in (Outcome.COMPLETED, Outcome.OUT_OF_DATA, Outcome.TOO_SLOW), result.reason
    for result in tuned.completed:
        # Three shards of 48 rows against two: more steps than rank 1 has are not counted in the first epoch.
        micro, accumulation, _ = engine_of(result)
        assert len(result.step_times) <= 2 * 48 // (micro * accumulation)


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_overrides_of_hydras_have_the_whole_answer(desk: Desk) -> None:
    tuned = desk.at("hydra_overrides").tune()
    assert "The program has its batch from loop.batch, so trials set it there." in tuned.said
    expect_answered(tuned, TYPED["hydra_overrides"])
    assert len({engine_of(result)[0] for result in tuned.completed}) > 1
    # Of each run Hydra keeps a record in a folder of its own, before the training begins; the losses come after that.
    assert {name.split("/")[0] for name in tuned.new} <= {"runs"}
    assert not [name for name in tuned.new if name.endswith("losses.txt")]
    words = typed_words(tuned, "deepspeed")
    assert number_in(words, "loop.batch=") == engine_of_best(tuned)[0]
    assert "engine=sharded" in words
    # Some of it stands in files of Hydra's that the command does not name.
    expect_trained_alike(tuned)


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_candidates_go_to_the_student_and_the_teacher_keeps_its_own(desk: Desk) -> None:
    tuned = desk.at("teacher_and_student").tune()
    expect_answered(tuned, TYPED["teacher_and_student"])
    for result in tuned.results:
        log = Path(result.logs[0]).read_text()
        assert "teacher 1 1 2\n" in log
        assert "teacher's stage 0\n" in log
        assert f"engine's stage {stage_of(result)}\n" in log
        assert result.micro_batch_arrived in (None, tuned.candidates[result.number].micro_batch_size)
    assert {stage_of(result) for result in tuned.results} == {0, 1, 2, 3}


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_batches_that_are_made_by_a_budget_of_tokens_stay_as_they_are(desk: Desk) -> None:
    tuned = desk.at("token_budget").tune()
    expect_answered(tuned, TYPED["token_budget"])
    assert {candidate.micro_batch_size for candidate in tuned.candidates.values()} == {1}
    assert len(tuned.stages) > 1
    for result in tuned.completed:
        # 384 tokens are 8 sentences of the longest, and far more of the shortest; two such batches of two ranks a step.
        assert result.metrics["throughput"] * result.metrics["latency"] > 4 * 8


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_program_that_ends_by_os_exit_has_been_measured_by_then(desk: Desk) -> None:
    typed = desk.at("ends_by_os_exit")
    (typed.folder / "result.txt").write_text("of a run before\n")
    tuned = typed.tune()
    expect_answered(tuned, TYPED["ends_by_os_exit"])
    assert tuned.new == set()
    assert not [result.reason for result in tuned.results if result.outcome is Outcome.CRASHED]


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_trainer_with_a_loss_of_its_own_keeps_its_arguments_and_each_candidate_alike(desk: Desk) -> None:
    tuned = desk.at("trainer_custom_loss").tune()
    expect_answered(tuned, TYPED["trainer_custom_loss"])
    assert stage_of(tuned.submitted) == 3
    assert {0, 1, 2} <= {stage_of(result) for result in tuned.results}
    for result in tuned.results:
        assert result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW), result.reason
        config = (Path(result.logs[0]).parent / "ds_config.json").read_text()
        assert json.loads(config)["train_batch_size"] == 16
    words = typed_words(tuned, "torchrun")
    micro = number_behind(words, "--per_device_train_batch_size")
    accumulation = number_behind(words, "--gradient_accumulation_steps")
    assert 2 * micro * accumulation == 16
    # The Trainer does not divide this loss by the accumulation, and nobody is told that the training is another.
    verdicts = {tried["verdict"] for tried in (tuned.document["confirmation"] or {}).get("candidates", ())}
    assert "disagrees" not in verdicts


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_experts_are_tuned_over_the_stages_that_they_can_have(desk: Desk) -> None:
    tuned = desk.at("experts").tune()
    expect_answered(tuned, TYPED["experts"])
    assert tuned.stages <= {0, 1, 2}
    assert len(tuned.stages) > 1
    for result in tuned.results:
        if result.outcome is not Outcome.COMPLETED:
            assert result.reason


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_batch_in_the_environment_of_a_subcommand_is_set_there(desk: Desk) -> None:
    tuned = desk.at("subcommands").tune()
    expect_answered(tuned, TYPED["subcommands"])
    assert len({engine_of(result)[0] for result in tuned.completed}) > 1
    words = typed_words(tuned, "deepspeed")
    assert (number_in(words, "BATCH="), number_in(words, "ACCUM=")) == engine_of_best(tuned)[:2]
    stage = stage_of(best_of(tuned))
    if OwnCommand.of(tuned.study.paths) is not None:
        assert words[-7:] == ["tool.py", "-v", "fit", "--zero", str(stage), "--lr", "2e-3"]
    else:
        # The code has all else.
        assert "zero_optimization." in tuned.best_command


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_configuration_that_a_function_computes_follows_the_options_of_fire(desk: Desk) -> None:
    tuned = desk.at("fire_function").tune()
    expect_answered(tuned, TYPED["fire_function"])
    assert tuned.new == set()
    for result in tuned.results:
        assert result.outcome in (Outcome.COMPLETED, Outcome.OUT_OF_DATA, Outcome.TOO_SLOW), result.reason
    words = typed_words(tuned, "torch.distributed.run")
    assert (number_in(words, "--micro="), number_in(words, "--accumulate=")) == engine_of_best(tuned)[:2]


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_kit_that_starts_torchrun_on_itself_is_tuned_as_what_it_starts(desk: Desk) -> None:
    tuned = desk.at("launcher_yaml").tune(*SHORT)
    expect_answered(tuned, TYPED["launcher_yaml"])
    assert "python kit.py train recipe.yaml starts `IS_A_RANK=1 torchrun --nproc_per_node 2 " in tuned.said
    assert tuned.new == set()
    own = expect_trained_alike(tuned)
    assert typed_words(tuned, "kit.py")[-4:-1] == ["python", "kit.py", "train"]
    assert own.applied == ("python", "kit.py", "train", "recipe.yaml")
    changed = {line.partition(":")[0] for line in own.diff.splitlines() if line[0] == "+" and line[1] != "+"}
    in_recipe = {name for name in changed if not name.startswith('+    "')}
    assert in_recipe <= {"+per_device_train_batch_size", "+gradient_accumulation_steps"}


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_the_answer_for_a_preset_of_a_kits_is_the_kits_command_with_a_file(desk: Desk) -> None:
    typed = desk.at("named_preset")
    tuned = typed.tune()
    expect_answered(tuned, TYPED["named_preset"])
    words = typed_words(tuned, "kit.py")
    kit = words.index("python")
    assert words[kit : kit + 4] == ["python", "kit.py", "sft", "--deepspeed"]
    expect_trained_alike(tuned)
    # The shell does not have it afterwards.
    assert "NPROC_PER_NODE=2" in words
    typed.variables, typed.program = {"NPROC_PER_NODE": "2"}, words[kit:]
    assert typed.plain_engine() == engine_of_best(tuned)


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_flags_that_repeat_the_configuration_follow_each_candidate(desk: Desk) -> None:
    tuned = desk.at("megatron_flags").tune()
    expect_answered(tuned, TYPED["megatron_flags"])
    assert len(tuned.stages) > 1
    for result in tuned.results:
        assert result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW), result.reason
    config = json.loads(tuned.study.paths.best_ds_config.read_text())
    words = typed_words(tuned, "deepspeed")
    assert number_behind(words, "--micro-batch-size") == config["train_micro_batch_size_per_gpu"]
    assert number_behind(words, "--global-batch-size") == config["train_batch_size"] == 32
    assert number_behind(words, "--zero-stage") == config["zero_optimization"]["stage"]
    expect_trained_alike(tuned)


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_flags_of_training_are_told_from_those_of_rollouts(desk: Desk) -> None:
    tuned = desk.at("rlhf_flags").tune()
    expect_answered(tuned, TYPED["rlhf_flags"])
    words, best = typed_words(tuned, "deepspeed"), engine_of_best(tuned)
    assert number_behind(words, "--micro_train_batch_size") == best[0]
    assert number_behind(words, "--train_batch_size") == best[2] == 32
    assert number_behind(words, "--micro_rollout_batch_size") == 8
    assert number_behind(words, "--rollout_batch_size") == 64


@pytest.mark.long
@STUDY
def test_flags_that_are_not_mapped_let_no_other_run_and_every_place_says_so(desk: Desk, server: PrefectServer) -> None:
    typed = desk.at("megatron_flags")
    # Names that may mean something else are not changed unasked.
    program = typed.folder / "pretrain.py"
    others = {"--zero-stage": "--stage", "args.zero_stage": "args.stage", "--micro-batch-size": "--rows"}
    for name, other in {**others, "args.micro_batch_size": "args.rows"}.items():
        program.write_text(program.read_text().replace(name, other))
        typed.program = [word.replace(name, other) for word in typed.program]
    typed.flags = ["--max-trials", "4", "--json"]
    ended = typed.type()
    assert ended.returncode == 1, ended.stderr
    document = json.loads(ended.stdout)
    headline = document["headline"]
    assert re.fullmatch(r"None of the [23] others could be measured\.", headline)
    assert "they must match. The command has --stage 1" in document["reason"]
    assert "--map zero_optimization.stage=--stage" in document["reason"]
    assert (document["status"], document["best"], document["command"]) == ("failed", None, None)
    study = typed.study
    (finding,) = query(typed.folder / "mlflow.db", "select value from tags where key = 'finding'")
    assert finding == (headline,)
    named = {"flow_runs": {"name": {"any_": [study.paths.root.name]}}}
    user, _, password = server.client_environment["PREFECT_API_AUTH_STRING"].partition(":")
    owner = httpx.Client(auth=(user, password), trust_env=False)
    (run,) = owner.post(f"{server.api_url}/flow_runs/filter", json=named).json()
    assert (run["state_type"], run["state"]["message"]) == ("FAILED", f"{headline} {document['reason']}")
    artifacts = owner.post(f"{server.api_url}/artifacts/filter", json=named).json()
    assert headline in next(each["data"] for each in artifacts if each["key"] == "best-configuration")
    assert read_study(study.paths.root).headline == headline
    assert headline in study.paths.report.read_text()
    assert not study.paths.best_command.exists()
    assert f"{headline} {document['reason']}" in study.paths.log.read_text()


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_batch_that_all_ranks_divide_is_counted_by_what_arrives_at_each(desk: Desk) -> None:
    typed = desk.at("split_batches")
    # It is no global batch, because it has no accumulation in it.
    typed.flags = ["--max-trials", "2", "--map", "train_batch_size=--per_device_train_batch_size"]
    tuned = typed.tune()
    expect_answered(tuned, TYPED["split_batches"])
    assert len({engine_of(result)[0] for result in tuned.completed}) > 1
    micro, accumulation, total = engine_of_best(tuned)
    words = typed_words(tuned, "torchrun")
    assert number_behind(words, "--per_device_train_batch_size") == 2 * micro
    # The plain program has the same rows.
    typed.program = words[words.index("torchrun") :]
    assert typed.plain_engine() == (micro, accumulation, total)


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_sizes_at_which_ranks_are_killed_are_left_for_smaller_ones(desk: Desk) -> None:
    tuned = desk.at("killed_above").tune()
    expect_answered(tuned, TYPED["killed_above"])
    killed = [result for result in tuned.results if result.outcome is Outcome.CRASHED]
    assert killed
    assert all("SIGKILL" in result.reason for result in killed)
    # Two kills of one candidate, one of another arm, and one at half the size.
    assert len(killed) <= 4
    assert max(engine_of(result)[0] for result in tuned.completed) == 8
    (note,) = (note for note in tuned.document["confirmation"]["notes"] if "could not be measured" in note)
    assert "The kernel kills ranks when the host's memory runs out" in note


@pytest.mark.alone
@STUDY
@pytest.mark.long
def test_a_configuration_with_a_section_of_the_autotuner_is_tuned_without_it(desk: Desk) -> None:
    tuned = desk.at("autotuner_lists").tune()
    # The plain program ends in the autotuner's own run, after some steps.
    expect_answered(tuned, TYPED["autotuner_lists"])
    best = json.loads(tuned.study.paths.best_ds_config.read_text())
    assert "autotuning" not in best
    micro, accumulation, _ = engine_of_best(tuned)
    assert best["train_batch_size"] == 8 == 2 * micro * accumulation


@pytest.mark.long
@STUDY
def test_a_list_of_the_autotuner_is_told_with_what_to_type_here_and_has_a_report(desk: Desk) -> None:
    typed = desk.at("autotuner_lists")
    path = typed.folder / "ds_tuned.json"
    path.write_text(path.read_text().replace('"stage": 2', '"stage": [2, 3]'))
    ended = typed.type()
    assert ended.returncode == 1, ended.stderr
    answer = ended.stderr[ended.stderr.index("No configuration was found.") :]
    assert "zero_optimization.stage: the list [2, 3] is a search space of DeepSpeed's autotuner" in answer
    assert "zerotune tune -z 2 -z 3 -- COMMAND" in answer
    assert "the report was not written" not in ended.stderr
    assert "[2, 3]" in typed.study.paths.report.read_text()
    assert "[2, 3]" in read_study(typed.study.paths.root).reason


def best_of(tuned: Tuned) -> TrialResult:
    (best,) = (each for each in tuned.results if each.number == tuned.document["best"]["trial"])
    return best


def engine_of_best(tuned: Tuned) -> Triple:
    return engine_of(best_of(tuned))
