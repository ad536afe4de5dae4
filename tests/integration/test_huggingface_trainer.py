"""Trials of unmodified Hugging Face Trainer scripts, most of which leave DeepSpeed's configuration "auto"."""

import copy
import dataclasses
import json
import re
import textwrap
from pathlib import Path

import pytest
from case_fixtures import quick_first
from device_fixtures import TRAINER_FLAGS

from zerotune.trial_lib.deepspeed_config.overrides import config_hash
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.search.zero_settings import FULL, HALF, ZeroSettings, state_bytes
from zerotune.trial_lib.study.program import completed_config

ANY = Path(__file__).parents[1] / "programs" / "any"
AUTO = json.loads((ANY / "ds_auto.json").read_text())
SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
SMALL = ("--hidden_size", "64")
# What it takes to import transformers and peft, once for all of these tests.
IMPORTS = ["transformers", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "peft"]

PARTS = """
import sys
sys.path.insert(0, {any!r})
import json
from dataclasses import dataclass
from model import LENGTH, VOCABULARY, Sentences
from trainer import collate
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=1, n_head=4))

def train(arguments, **more):
    Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate, **more).train()
"""


@pytest.fixture(autouse=True, scope="module")
def _primed(warm_starter):
    warm_starter.prime(IMPORTS)


@pytest.fixture
def run(trials):
    """Runs a trial of a script whose configuration is `base` with the candidate's part merged in."""

    def run(script, *arguments, base=AUTO, stage=None, starter="warm", as_typed=False, **options):
        zero = None if stage is None else {"stage": stage}
        options = {"window": SHORT, "model_dir": ANY, "config_flag": "--deepspeed", "zero": zero, **options}
        plan = trials.plan(script, *arguments, **options)
        config = base if as_typed else plan.candidate.complete(base)
        plan = dataclasses.replace(plan, ds_config=config, config_hash=config_hash(config), as_typed=as_typed)
        return trials.start(plan, starter).result()

    return run


@pytest.fixture
def run_code(run, tmp_path):
    """Runs a trial of a script that is given as text; it ends with what trains."""

    def run_code(source, **options):
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        (folder / "ds.json").write_text(json.dumps(options.get("base", AUTO)))
        (folder / "script.py").write_text(PARTS.format(any=str(ANY)) + textwrap.dedent(source))
        return run("script.py", model_dir=folder, config_flag="--ignored", purpose=Purpose.PROFILE, **options)

    return run_code


def facts(result):
    """What rank 0 of a profile trial has found out about the program."""
    return json.loads(Path(result.logs[0]).with_name("rank0.measurement.json").read_text())["program"]


def contents(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def completed(result, micro_batch):
    assert result.outcome == "completed", result.reason
    assert result.micro_batch_arrived == micro_batch
    return result


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_a_trainer_script_runs_with_the_candidates_batch_and_stage(run, stage):
    result = run("trainer.py", *SMALL, "--max_steps", "1", stage=stage, micro_batch=3, accumulation=2)
    completed(result, 3)
    samples = result.metrics["throughput"] * result.metrics["latency"]
    assert samples == pytest.approx(6)


def test_the_losses_of_a_batch_are_the_same_however_it_is_accumulated(run):
    """Transformers divides them by the accumulation itself.

    Without dropout: its masks are others for one batch of 16 than for four of 4.
    """
    arguments = ("--max_steps", "8", "--dataloader_drop_last", "--dropout", "0")

    def losses(size):
        options = {"stage": 1, "micro_batch": size, "accumulation": 16 // size}
        return completed(run("trainer.py", *SMALL, *arguments, **options), size).losses

    at_once, in_four = losses(16), losses(4)
    assert len(at_once) > 1
    assert in_four == pytest.approx(at_once, rel=1e-5)


@pytest.mark.parametrize(("flags", "is_half"), quick_first(1, [(("--bf16",), True), ((), False)]))
def test_what_the_trainer_makes_of_auto_is_what_memory_is_reckoned_with(run, flags, is_half):
    window = StepWindow(start_step=1, end_step=1, max_steps=1)
    options = {"as_typed": True, "purpose": Purpose.PROFILE, "window": window}
    result = run("trainer.py", *SMALL, "--max_steps", "20", *flags, *TRAINER_FLAGS, **options)
    assert result.outcome == "completed", result.reason
    config = completed_config(AUTO, result.program)
    assert config["bf16"] == {"enabled": is_half}
    # The square of the hidden size.
    assert config["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    # For stage 3 alone, and so not for this engine.
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"
    assert ("bfloat16" in result.program.formats) == is_half
    # As DeepSpeed has it of the configuration that the Trainer hands over.
    settings = ZeroSettings.of(config, result.profile.bytes_per_param)
    assert settings.precision == (HALF if is_half else FULL)
    assert settings.reduce_bucket_size == 64 * 64


@pytest.mark.long
def test_two_ranks_in_bf16_with_gradient_checkpointing(run):
    arguments = ("--bf16", *TRAINER_FLAGS, "--gradient_checkpointing")
    completed(run("trainer.py", *SMALL, *arguments, stage=3, micro_batch=2, slots=2), 2)


@pytest.mark.devices(2, "cpu")
def test_ranks_that_the_trainer_does_not_count_are_refused_with_the_way_out(run):
    # Without a GPU, accelerate takes each rank for the only one, unless told to use the CPU; DeepSpeed fails.
    result = run("trainer.py", *SMALL, micro_batch=4, accumulation=2, slots=2)
    assert result.outcome == "crashed"
    assert "counts one rank instead of 2. Without a GPU, give it --use_cpu" in result.reason


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--bf16",), ("--gradient_checkpointing",)])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_one_rank_and_on_two(run, stage, slots, more):
    completed(
        run("trainer.py", *SMALL, *TRAINER_FLAGS, *more, stage=stage, micro_batch=2, accumulation=2, slots=slots), 2
    )


def test_what_the_program_would_have_used_is_found_out(run):
    typed = ("--per-device-train-batch-size", "5", "--gradient_accumulation_steps=3")
    result = completed(run("trainer.py", *SMALL, *typed, micro_batch=1, purpose=Purpose.PROFILE), 1)
    found = facts(result)
    assert found["batch"] == {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 3}
    assert found["arg_mappings"] == {
        "train_micro_batch_size_per_gpu": "--per-device-train-batch-size",
        "gradient_accumulation_steps": "--gradient_accumulation_steps",
    }
    # As it stands in the file, for the next trial to fill in anew.
    assert found["ds_config"]["optimizer"]["params"]["lr"] == "auto"


def test_numbers_in_the_configuration_that_follow_from_the_programs_length_do_not_contradict_a_trials(run):
    base = copy.deepcopy(AUTO)
    base["scheduler"]["params"] |= {"total_num_steps": 7, "warmup_num_steps": 2}
    base["zero_optimization"] |= {"reduce_bucket_size": 100_000}
    completed(run("trainer.py", *SMALL, "--max_steps", "7", "--warmup_steps", "2", base=base, micro_batch=4), 4)


def test_a_configuration_that_contradicts_the_arguments_fails_as_without_a_trial(run, trials):
    base = copy.deepcopy(AUTO)
    base["optimizer"]["params"]["lr"] = 0.5
    result = run("trainer.py", *SMALL, base=base)
    assert result.outcome in ("crashed", "invalid")
    assert "ds optimizer.params.lr=0.5 vs hf learning_rate=5e-05" in trials.log(result)


@pytest.mark.parametrize("given", quick_first(1, ["'ds.json'", "json.load(open('ds.json'))"]))
def test_a_configuration_given_in_code_follows_the_candidate(run_code, given):
    result = run_code(
        f"""
        arguments = TrainingArguments(deepspeed={given}, per_device_train_batch_size=7, max_steps=2)
        assert arguments.deepspeed == {given}
        train(arguments)
        """,
        stage=3,
        micro_batch=2,
        accumulation=2,
    )
    found = facts(completed(result, 2))
    assert found["ds_config"] == AUTO
    assert found["batch"] == {"train_micro_batch_size_per_gpu": 7, "gradient_accumulation_steps": 1}
    assert not found["repeats_backward"]
    assert found["arg_mappings"] == {}


def test_arguments_of_a_subclass_and_copies_of_arguments_follow_the_candidate(run_code):
    result = run_code(
        """
        from dataclasses import replace
        from transformers import Seq2SeqTrainingArguments

        @dataclass
        class Ours(Seq2SeqTrainingArguments):
            pairs: int = 0

            def __post_init__(self):
                super().__post_init__()
                self.pairs = self.per_device_train_batch_size * 2

        arguments = replace(Ours(deepspeed="ds.json", gradient_accumulation_steps=5), learning_rate=1e-4)
        assert arguments.pairs == 6
        train(arguments)
        """,
        micro_batch=3,
    )
    assert facts(completed(result, 3))["batch"]["gradient_accumulation_steps"] == 5


def test_a_trial_neither_saves_nor_evaluates_nor_resumes_and_leaves_the_users_folder_as_it_was(run_code, tmp_path):
    theirs = tmp_path / "project" / "out"
    (theirs / "checkpoint-5").mkdir(parents=True)
    (theirs / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (theirs / "model.safetensors").write_text("theirs")
    before = contents(theirs)
    result = run_code(
        """
        class Saves(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_save = control.should_evaluate = True
                model.save_pretrained("later")
                tokenizer.save_pretrained("later")

        def never(_):
            raise AssertionError("evaluated")

        arguments = TrainingArguments(
            output_dir="out", deepspeed="ds.json", per_device_train_batch_size=1, max_steps=3, save_steps=1,
            eval_strategy="steps", eval_steps=1, eval_on_start=True, load_best_model_at_end=True, push_to_hub=True,
            auto_find_batch_size=True, report_to="all",
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(8), data_collator=collate,
            compute_metrics=never, callbacks=[Saves()],
        )
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        tokenizer.save_pretrained("out")
        model.save_pretrained("out")
        model.save_pretrained("new")
        tokenizer.save_pretrained("new")
        assert PreTrainedTokenizerFast.from_pretrained("new").vocab_size == 1
        import torch
        read = type(model).from_pretrained("new")
        assert all(map(torch.equal, read.parameters(), model.parameters()))
        trainer.save_model("out")
        trainer.save_state()
        trainer.push_to_hub()
        trainer.train(resume_from_checkpoint=True)
        """,
        micro_batch=2,
    )
    completed(result, 2)
    assert contents(theirs) == before
    assert sorted(path.name for path in theirs.parent.iterdir()) == ["ds.json", "new", "out", "script.py"]


def test_what_the_program_saves_is_not_uploaded(run_code, tmp_path):
    result = run_code(
        """
        import huggingface_hub
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        def never(*_, **__):
            raise AssertionError("uploaded")

        for name in ("create_repo", "create_commit", "create_branch", "whoami"):
            setattr(huggingface_hub.HfApi, name, never)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        for saved in (tokenizer, model, model.config, model.generation_config):
            saved.save_pretrained("new", push_to_hub=True, repo_id="me/new")
            saved.push_to_hub("me/new")
        model.config.save_pretrained("new", True)
        train(TrainingArguments(deepspeed="ds.json", max_steps=2))
        """,
        micro_batch=2,
    )
    completed(result, 2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "project" / "new").iterdir()
    }


@pytest.mark.parametrize("first", quick_first(1, ["pass", "import shutil; shutil.rmtree('prep')"]))
def test_a_model_of_an_earlier_run_gives_way_in_the_trial_alone(run_code, tmp_path, way_of_files, first):
    prepared = tmp_path / "project" / "prep"
    prepared.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "model-00001-of-00002.safetensors"):
        (prepared / name).write_text("an earlier model")
    before = contents(prepared)
    result = run_code(
        f"""
        import os, torch
        {first}
        model.save_pretrained("prep")
        read = GPT2LMHeadModel.from_pretrained("prep")
        assert all(map(torch.equal, read.parameters(), model.parameters()))
        assert "generation_config.json" in os.listdir("prep")
        train(TrainingArguments(deepspeed="ds.json", max_steps=2))
        """,
        micro_batch=2,
    )
    assert completed(result, 2).files == way_of_files
    assert contents(prepared) == before
    assert (prepared / "model.safetensors").read_text() == "an earlier model"


@pytest.mark.long
def test_a_trainer_that_compiles_does_so_in_its_trials(run_code, trials):
    source = """
        from torch._dynamo.utils import counters

        class Says(TrainerCallback):
            def on_step_begin(self, *_, **__):
                print("graphs", counters["stats"]["unique_graphs"], flush=True)

        arguments = TrainingArguments("out", deepspeed="ds.json", per_device_train_batch_size=2,
                                      report_to=[], torch_compile=True, torch_compile_backend="eager")
        train(arguments, callbacks=[Says()])
        """
    profiled = completed(run_code(source, micro_batch=2, window=StepWindow(1, 1, max_steps=1)), 2)
    assert profiled.profile.flops_per_sample > 0
    # On a busy machine the Trainer draws its bar after every step, without an end of line before the text.
    seen = [int(graphs) for graphs in re.findall(r"graphs (\d+)$", trials.log(profiled), re.MULTILINE)]
    # The first step compiles, and no other one does.
    assert seen[0] == 0 < seen[1] == seen[-1]


@pytest.mark.parametrize("names_a_file", quick_first(1, [True, False]))
def test_a_trainer_whose_configuration_is_the_accelerate_launchers(run, tmp_path, names_a_file):
    file = tmp_path / "of_accelerate.json"
    file.write_text(json.dumps(AUTO))
    environment = {**rank_environment(), "ACCELERATE_USE_DEEPSPEED": "true"}
    if names_a_file:
        environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    else:
        environment |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    flag = "--run_name"  # which takes a text
    result = run(
        "trainer.py", *SMALL, stage=3, micro_batch=3, accumulation=2, config_flag=flag, environment=environment
    )
    completed(result, 3)


def lora_profile(run, **options):
    return run("lora.py", *TRAINER_FLAGS, purpose=Purpose.PROFILE, micro_batch=2, **options)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_lora_counts_total_and_trainable_parameters_apart(run, stage):
    profile = completed(lora_profile(run, stage=stage), 2).profile
    hidden, layers, rank, vocabulary, length = 128, 2, 8, 256, 64
    lora = layers * rank * (hidden + 3 * hidden)
    block = 12 * hidden**2 + 13 * hidden
    # GPT-2's head shares the weights of its embedding.
    base = layers * block + 2 * hidden + (vocabulary + length) * hidden
    assert (profile.num_params, profile.trainable_num_params) == (base + lora, lora)
    # Of a frozen model, there are no gradients of weights to compute: about twice the forward pass, not three times.
    forward = 2 * length * (layers * 12 * hidden**2 + vocabulary * hidden) + layers * 4 * length**2 * hidden
    assert 1.8 * forward < profile.flops_per_sample < 2.2 * forward
    # Frozen weights have neither gradients nor an optimizer's states.
    assert state_bytes(0, profile.num_params, lora, FULL, slots=1) == 4 * (base + lora) + (4 + 8) * lora


@pytest.mark.long
def test_lora_at_every_stage_on_one_rank_and_on_two(run):
    profiles = {
        (found.num_params, found.trainable_num_params, round(found.flops_per_sample))
        for stage in (0, 1, 2, 3)
        for slots in (1, 2)
        if (found := completed(lora_profile(run, stage=stage, slots=slots), 2).profile)
    }
    assert len(profiles) == 1
