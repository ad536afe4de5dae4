"""Training resumes on another number of ranks: real engines of every ZeRO stage, saved by some and loaded by others.

Run as a program this file is the ranks: it imports once, and forks a world for each step.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.long]

GLOBAL_BATCH, MICRO_BATCH = 8, 2
SAVED_AT, STEPS = 5, 4
# By the names of the engines: ZeRO's stage, and what is special about the model and its optimizer.
ENGINES = {
    "stage 0": (0, ()),
    "stage 1": (1, ("buffers", "frozen", "groups")),
    "stage 2": (2, ()),
    "stage 3": (3, ()),
    "stage 2, bf16": (2, ("bf16",)),
    "stage 0, bf16": (0, ("bf16",)),
}


# -- in a rank ---------------------------------------------------------------------------------------------------


def build_engine(stage, special, ranks):
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(4, 33), nn.Tanh(), nn.BatchNorm1d(33) if "buffers" in special else nn.Tanh(), nn.Linear(33, 1)
    )
    if "frozen" in special:
        model[0].bias.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = trained
    if "groups" in special:
        parameters = [
            {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in trained if parameter.dim() == 1], "lr": 3e-2},
        ]
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": GLOBAL_BATCH // MICRO_BATCH // ranks,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        "bf16": {"enabled": "bf16" in special},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
    }
    if "groups" in special:
        del config["scheduler"]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train_batches(engine, ranks, batches):
    """Returns the loss of each global batch: the same samples, however many ranks share them."""
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(GLOBAL_BATCH * (SAVED_AT + STEPS), 4, generator=generator)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    losses = []
    for batch in batches:
        total = torch.zeros(())
        for start in range(batch * GLOBAL_BATCH, (batch + 1) * GLOBAL_BATCH, MICRO_BATCH * ranks.size):
            mine = slice(start + ranks.rank * MICRO_BATCH, start + (ranks.rank + 1) * MICRO_BATCH)
            loss = ((engine(inputs[mine].to(dtype)) - targets[mine].to(dtype)) ** 2).mean()
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() * MICRO_BATCH / GLOBAL_BATCH
        losses.append(sum(ranks.allgather(total.item())))
    return losses


def build_all(ranks):
    return {name: build_engine(stage, special, ranks.size) for name, (stage, special) in ENGINES.items()}


def write(engines, folder):
    for index, engine in enumerate(engines.values()):
        engine.save_checkpoint(str(folder), tag=f"model{index}")
    (folder / "of the trial.txt").write_text("kept")


def save(ranks, root):
    """Trains, saves, and trains on: what the others have to repeat."""
    from zerotune.trial_lib.training.checkpoints import CheckpointStore

    engines = build_all(ranks)
    for engine in engines.values():
        train_batches(engine, ranks, range(SAVED_AT))
    CheckpointStore(root, ranks, True).save(SAVED_AT, None, {}, lambda folder: write(engines, folder))
    rest = range(SAVED_AT, SAVED_AT + STEPS)
    return {name: train_batches(engine, ranks, rest) for name, engine in engines.items()}


def resume(ranks, root):
    from zerotune.trial_lib.training.checkpoints import Checkpoint, CheckpointStore, loadable, world_size_problem

    engines = build_all(ranks)
    store = CheckpointStore(root, ranks, True)
    with loadable(store.newest_intact(print), list(engines.values()), ranks) as folder:
        for index, engine in enumerate(engines.values()):
            loaded, _ = engine.load_checkpoint(str(folder), tag=f"model{index}")
            assert loaded is not None
        assert (folder / "of the trial.txt").read_text() == "kept"
    assert [path.name for path in root.iterdir()] == [f"batch-{SAVED_AT:08d}"]
    rest = range(SAVED_AT, SAVED_AT + STEPS)
    answer = {name: train_batches(engine, ranks, rest) for name, engine in engines.items()}
    # What DeepSpeed saves and loads afterwards is as usual.
    store.save(SAVED_AT + STEPS, None, {}, lambda folder: write(engines, folder))
    again = store.newest_intact(print)
    loaded, _ = engines["stage 1"].load_checkpoint(str(again.path), tag="model1")
    problems = [
        world_size_problem(Checkpoint(root / "saved", 5, 3, None, {}), ranks.size, [build_engine(3, what, ranks.size)])
        for what in (("groups",), ("frozen",), ("buffers",))
    ]
    return {**answer, "loads again": loaded is not None, "problems": problems}


def as_rank(step, rank, size, folder, out):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    import torch.distributed as dist

    from zerotune.trial_lib.training.distributed import DistributedContext

    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=rank, world_size=size)
    deepspeed.init_distributed(dist_backend="gloo")
    answer = step(DistributedContext.from_torch(), Path(folder))
    if rank == 0:
        Path(out).write_text(json.dumps(answer))
    dist.destroy_process_group()


def run_world(step, size, folder, out):
    forking = multiprocessing.get_context("fork")
    ranks = [forking.Process(target=as_rank, args=(step, rank, size, folder, out)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def run_worlds(root):
    import deepspeed  # noqa: F401 - once for all ranks

    for before, after in ((2, 1), (1, 2)):
        run_world(save, before, f"{root}/{before}", f"{root}/{before}.json")
        run_world(resume, after, f"{root}/{before}", f"{root}/{before}-{after}.json")


if __name__ == "__main__":
    run_worlds(sys.argv[1])


# -- what the ranks found ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of each world, by what it was: `2` saved, `2-1` resumed alone."""
    root = tmp_path_factory.mktemp("worlds")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    program = subprocess.run(
        [sys.executable, __file__, str(root)], env=environment, capture_output=True, text=True, timeout=500
    )
    found = {path.stem: json.loads(path.read_text()) for path in root.glob("*.json")}
    assert len(found) == 4, program.stdout + program.stderr
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_losses_continue_on_another_number_of_ranks(losses, engine, before, after):
    tolerance = 1e-2 if "bf16" in engine else 1e-5
    assert losses[f"{before}-{after}"][engine] == pytest.approx(losses[f"{before}"][engine], rel=tolerance)


@pytest.mark.parametrize("world", ["2-1", "1-2"])
def test_a_later_load_is_an_ordinary_one(losses, world):
    assert losses[world]["loads again"]


@pytest.mark.parametrize("world", ["2-1", "1-2"])
def test_what_stage_3_would_lose_is_refused_with_the_reason_and_the_remedy(losses, world):
    what = ("several parameter groups", "frozen parameters", "buffers")
    for part, problem in zip(what, losses[world]["problems"], strict=True):
        assert f"was saved by 3 ranks and cannot be loaded by {world[-1]}, because " in problem
        assert part in problem
        assert problem.endswith("at ZeRO stage 3: resume on 3 slots.")
