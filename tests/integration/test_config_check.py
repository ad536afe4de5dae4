"""What the installed DeepSpeed refuses is said before any trial, by its own class, and leaves nothing behind."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from study_fixtures import Zerotune

from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter
from zerotune.trial_lib.records.result import Outcome

SOUND: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True},
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "left to the Trainer": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "offload_param": {"device": "cpu"}},
    },
    "a batch that the code gives": {"train_micro_batch_size_per_gpu": None},
    # Of four slots two are one replica, by a pipeline, say.
    "a batch of fewer replicas than slots": {"train_batch_size": 4, "gradient_accumulation_steps": 1},
    "a key that is unknown where DeepSpeed looks at none": {"my_own": {"a": 1}},
    "a name that it only warns about": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
}

REFUSED: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "a removed section": ({"sparse_attention": {"mode": "fixed"}}, [["sparse_attention"]]),
    "a removed switch that is off": ({"curriculum_learning": {"enabled": False}}, [["curriculum_learning"]]),
    "an unknown key of a section": (
        {"zero_optimization": {"stage": 1, "reduce_bucketsize": 1}},
        [["zero_optimization.reduce_bucketsize"]],
    ),
    "text for a number": (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": "2e8"}},
        [["zero_optimization.reduce_bucket_size"]],
    ),
    "text for a size, of which DeepSpeed does not say where": (
        {"train_micro_batch_size_per_gpu": "2"},
        [["train_micro_batch_size_per_gpu"]],
    ),
    "batch arithmetic": (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 1},
        [["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]],
    ),
    "two precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [["fp16", "bf16"]]),
    "several at once": (
        {
            "fp16": {"enabled": False, "opt_level": "O2"},
            "zero_optimization": {"stage": 7, "foo": 1},
            "amp": {"enabled": False},
        },
        [["amp"], ["fp16.opt_level"], ["zero_optimization.foo"], ["zero_optimization.stage"]],
    ),
}


def refused(starter: WarmStarter | ColdStarter, changes: dict[str, Any], slots: int = 4) -> list[list[str]]:
    config = {key: value for key, value in {**SOUND, **changes}.items() if value is not None}
    judgement = starter.check(config, slots)
    assert judgement is not None
    return sorted(refusal["keys"] for refusal in judgement["refusals"])


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_deepspeed_takes_is_not_refused(warm_starter: WarmStarter, changes: dict[str, Any]) -> None:
    assert refused(warm_starter, changes) == []


@pytest.mark.parametrize(("changes", "keys"), REFUSED.values(), ids=REFUSED.keys())
def test_what_deepspeed_refuses_is_named_by_its_key(
    warm_starter: WarmStarter, changes: dict[str, Any], keys: list[list[str]]
) -> None:
    assert refused(warm_starter, changes) == keys


@pytest.mark.long
def test_without_a_fork_server_a_process_of_its_own_is_asked(cold_starter: ColdStarter) -> None:
    assert refused(cold_starter, ACCEPTED["left to the Trainer"]) == []
    changes, keys = REFUSED["several at once"]
    assert refused(cold_starter, changes) == keys


def test_what_the_code_itself_hands_over_is_named_by_its_key_as_well(trials: Any) -> None:
    result = trials.run("plain.py", zero={"stage": 1, "reduce_bucketsize": 1})
    assert result.outcome is Outcome.INVALID, result.reason
    assert "deepspeed.initialize has failed: zero_optimization.reduce_bucketsize: DeepSpeed 0." in result.reason
    assert ' has no such key. Did you mean "reduce_bucket_size"?' in result.reason


def test_sizes_that_contradict_each_other_are_named_in_a_rank_of_several(trials: Any) -> None:
    plan = trials.plan("plain.py", slots=2)
    config = {**plan.ds_config, "train_batch_size": 12, "train_micro_batch_size_per_gpu": 5}
    result = trials.start(dataclasses.replace(plan, ds_config=config, as_typed=True)).result()
    assert result.outcome is Outcome.INVALID, result.reason
    assert "train_batch_size (12) is not train_micro_batch_size_per_gpu (5)" in result.reason
    assert "of which 2 slot(s) allow 2 at most" in result.reason


def refuse(zerotune: Zerotune, *arguments: str) -> None:
    """Runs a study of a configuration that DeepSpeed refuses, and sees what is said and what is left."""
    path = zerotune.model / "ds_config.json"
    changes = {"sparse_attention": {"mode": "fixed"}, "zero_optimization": {"stage": 1, "reduce_bucketsize": 1}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    before = sorted(entry.name for entry in zerotune.folder.iterdir())
    running = zerotune.start("adaptive", *arguments)
    ended = running.follow()
    assert ended.returncode == 2, ended.stderr
    assert f"zerotune: {path}: 2 mistakes:" in ended.stderr
    assert f"{path}: sparse_attention: DeepSpeed 0." in ended.stderr
    assert f"{path}: zero_optimization.reduce_bucketsize: DeepSpeed 0." in ended.stderr
    assert 'Did you mean "reduce_bucket_size"?' in ended.stderr
    assert "Traceback" not in ended.stderr
    assert running.left_over(within_s=5) == []
    left = {entry.name for entry in zerotune.folder.iterdir()} - {*before}
    assert {name for name in left if not name.endswith((".out", ".err"))} == set()


def test_a_command_ends_before_any_trial_and_leaves_nothing_behind(tmp_path: Path, home: Path) -> None:
    refuse(Zerotune(tmp_path, home))


@pytest.mark.long
def test_a_command_without_a_fork_server_does_so_too(tmp_path: Path, home: Path) -> None:
    refuse(Zerotune(tmp_path, home), "--start", "cold")


@pytest.mark.long
def test_a_program_that_mends_what_its_file_says_is_tuned(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    config, program = zerotune.model / "ds_config.json", zerotune.model / "train.py"
    config.write_text(json.dumps({**json.loads(config.read_text()), "sparse_attention": {"mode": "fixed"}}))
    own = "engine, *_ = deepspeed.initialize(args=args, "
    mends = """import json
    config = json.loads(open(args.deepspeed_config).read())
    config.pop("sparse_attention", None)
    engine, *_ = deepspeed.initialize(config=config, """
    code = program.read_text()
    assert own in code
    program.write_text(code.replace(own, mends))
    ended = zerotune.run("adaptive", "--max-trials", "3")
    assert ended.returncode == 0, ended.stderr
    assert f"{config}: sparse_attention: DeepSpeed 0." in ended.stderr
    assert "Your program still runs" in ended.stderr


@pytest.mark.long
def test_a_study_resumed_under_a_deepspeed_that_refuses_is_kept(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    running = zerotune.start("adaptive")
    begun = "zerotune-studies/*/trials/0001/candidate.json"
    running.wait_until(lambda: any(zerotune.folder.glob(begun)), "a second trial", 300)
    running.process.kill()
    running.process.wait()
    # What would be another version of DeepSpeed's: one that has no such section any more.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import importlib.abc, importlib.machinery, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'deepspeed.runtime.config':\n"
        "            spec = importlib.machinery.PathFinder.find_spec(name, path)\n"
        "            whole = spec.loader.exec_module\n"
        "            def exec_module(module):\n"
        "                whole(module)\n"
        "                module._REMOVED_TOP_LEVEL_CONFIG_KEYS['optimizer'] = 'Optimizers has been removed.'\n"
        "            spec.loader.exec_module = exec_module\n"
        "            return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    root = zerotune.study.paths.root
    ended = zerotune.run("resume", root, PYTHONPATH=str(site))
    assert ended.returncode == 2, ended.stderr
    assert "optimizer: DeepSpeed" in ended.stderr
    record = zerotune.study.record
    assert record["status"] == "failed"
    assert "optimizer: DeepSpeed" in record["reason"]
