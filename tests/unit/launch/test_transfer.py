"""A trial's plan goes to another host, and its files come back."""

from pathlib import Path

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.rank_starter import HostRanks, Program
from zerotune.trial_lib.launch.ray_host import moved, packed, result_from, unpack
from zerotune.trial_lib.launch.slots import HeldSlots
from zerotune.trial_lib.launch.trial import TrialPlan, order_of, request_of
from zerotune.trial_lib.messages.orders import RankOrder, StepWindow, TrainingSpec
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult


def plan(root: Path) -> TrialPlan:
    paths = TrialPaths(root)
    return TrialPlan(
        trial_id="s-0007",
        number=7,
        purpose=Purpose.SEARCH,
        candidate=Candidate(micro_batch_size=1, slots=1),
        ds_config={},
        config_hash="h",
        program=Program(
            interpreter="python",
            target={"script": "train.py"},
            arguments=[f"--deepspeed_config={paths.ds_config}", "--lr", "0.1"],
            local_rank_option="--local_rank",
            model_dir=Path("/code"),
            environment={"SPEC": str(paths.training_spec), "HOME": "/home/me"},
        ),
        window=StepWindow(),
        memory_limit=None,
        deadline_s=1.0,
        paths=paths,
        training_spec=TrainingSpec(trial=None, hparams={"config": [str(paths.ds_config)]}, scratch=str(paths.scratch)),
    )


def test_a_moved_plan_names_the_other_folder_everywhere_and_nothing_else_changes() -> None:
    there = moved(plan(Path("/here/trials/0007")), Path("/there/0007"))
    assert there.paths.root == Path("/there/0007")
    assert there.program.arguments == ["--deepspeed_config=/there/0007/ds_config.json", "--lr", "0.1"]
    assert there.program.environment == {"SPEC": "/there/0007/training.json", "HOME": "/home/me"}
    assert there.program.model_dir == Path("/code")
    assert there.training_spec is not None
    assert there.training_spec.hparams == {"config": ["/there/0007/ds_config.json"]}
    assert there.training_spec.scratch == "/there/0007/scratch"


def test_only_ranks_on_several_hosts_share_no_folder() -> None:
    moved_plan = moved(plan(Path("/here/trials/0007")), Path("/there/0007"))
    part = HostRanks(first_rank=1, slots=1, world_size=2, address="10.0.0.1", port=2900)
    request = request_of(
        moved_plan, order_of(moved_plan), Host("cpu", ["0"], 2**30), HeldSlots(["0"], ()), part.port, 60.0, part
    )
    assert not RankOrder.from_json(request.payload).shares_folder
    assert order_of(moved_plan).shares_folder
    assert request.layer is None
    assert request.first_rank == 1


def test_a_result_that_comes_back_names_the_logs_of_the_study_s_own_folder() -> None:
    result = TrialResult(
        trial_id="s-0007",
        number=7,
        purpose=Purpose.SEARCH,
        config_hash="h",
        outcome=Outcome.CRASHED,
        reason="It raised. Log: /there/0007/rank0.log",
        logs=["/there/0007/rank0.log"],
    )
    back = result_from(result, Path("/there/0007"), Path("/here/0007"))
    assert back.logs == ["/here/0007/rank0.log"]
    assert back.reason.endswith("/here/0007/rank0.log")


def test_what_the_ranks_have_left_comes_back_and_what_the_driver_wrote_stays_its_own(tmp_path: Path) -> None:
    there, here = TrialPaths(tmp_path / "there"), TrialPaths(tmp_path / "here")
    for paths in (there, here):
        (paths.root / "tensorboard").mkdir(parents=True)
    there.log(0).write_text("said")
    there.measurement(0).write_text("{}")
    (there.tensorboard / "events").write_bytes(b"\x00\xff")
    there.training_spec.write_text("secret")
    there.result.write_text("theirs")
    unpack(packed(there), here.root)
    assert here.log(0).read_text() == "said"
    assert here.measurement(0).exists()
    assert (here.tensorboard / "events").read_bytes() == b"\x00\xff"
    assert not here.training_spec.exists()
    assert not here.result.exists()


def test_of_a_long_log_the_end_comes_back(tmp_path: Path) -> None:
    there = TrialPaths(tmp_path)
    there.log(0).write_bytes(b"begin" + b" " * 9 * 2**20 + b"end")
    (content,) = packed(there).values()
    assert len(content) == 8 * 2**20
    assert content.endswith(b"end")
