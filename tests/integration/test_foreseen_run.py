"""Foreseen runs: programs as users write them, as rank 0 of a world that is not there, and what their records say."""

import json
import shutil
from dataclasses import replace

import pytest
from foreseen_fixtures import PROGRAMS, program_named

from benchmarks.foresee.few_layers import zero_of_few
from zerotune.trial_lib.launch.trial_files import layer_refusal
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, OPERATIONS, PLACES
from zerotune.trial_lib.plan.fits import by_size
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.records.folders import PLANS

PASSES = ("forward", "backward")
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
}
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 100_000}


@pytest.fixture(scope="module")
def starter(tmp_path_factory):
    notes = []
    started = starter_for(program_named("transformer.py"), tmp_path_factory.mktemp("server"), notes.append)
    yield started
    started.close()
    assert not notes


@pytest.fixture
def foreseen(starter, tmp_path):
    def run(name, overrides, *arguments, world=2, deadline_s=120.0, config=BASE, folder=PROGRAMS):
        config_file = tmp_path / "ds_config.json"
        config_file.write_text(json.dumps(config))
        program = program_named(name, "--deepspeed_config", str(config_file), *arguments, folder=folder)
        pretended = Pretended(world=world, ranks_per_host=min(world, 8))
        return simulate(program, overrides, pretended, tmp_path / "run", starter, deadline_s=deadline_s)

    return run


def live_at_end(run, place="device"):
    """Bytes in a place by kind, at the end of the run."""
    live = dict.fromkeys(KINDS, 0)
    for event in run.events:
        storage = run.storages[event.storage]
        if PLACES[storage.place] == place:
            live[KINDS[storage.kind]] += storage.size if event.is_made else -storage.size
    return live


@pytest.mark.parametrize(
    ("precision", "stage"),
    [
        ("fp32", 0),
        ("fp32", 3),
        ("bf16", 3),
        *(pytest.param("fp32", stage, marks=pytest.mark.long) for stage in (1, 2)),
        *(pytest.param("bf16", stage, marks=pytest.mark.long) for stage in range(3)),
    ],
)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 8])
def test_states_are_the_closed_form(foreseen, world, stage, precision):
    half = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **BUCKETS}}
    run = foreseen("transformer.py", {**half, **zero, "gradient_accumulation_steps": 2}, world=world)
    assert run.stopped == ""
    size = 4 if precision == "fp32" else 2
    share = world if stage else 1
    # A master copy exists if the model is in half precision, and under ZeRO (deepspeed/runtime/zero).
    masters = 4 if precision == "bf16" or stage else 0
    parameters = run.parameters * size / (world if stage == 3 else 1)
    live = live_at_end(run)
    assert live["parameter"] == pytest.approx(parameters, rel=0.01)
    assert live["optimizer"] == pytest.approx(run.parameters * (masters + 8) / share, rel=0.01)
    assert (run.stage, run.accumulation, run.micro_batch, run.tokens) == (stage, 2, 2, 64)
    assert (run.world, run.replicas) == (world, world)


def test_a_record_shows_the_parts_of_each_step(foreseen):
    run = foreseen("transformer.py", {"gradient_accumulation_steps": 2})
    passes = [(MOMENTS[each.name], each.step, each.micro_batch) for each in run.moments if MOMENTS[each.name] in PASSES]
    # The first step is as short as it can be.
    assert passes == [(name, *place) for place in ((1, 0), (2, 0), (2, 1)) for name in PASSES]
    kinds = {OPERATIONS[each.kind] for each in run.operations}
    assert {"matmul", "norm", "embedding", "update", "all_reduce"} <= kinds


def test_stage_3_gathers_parameters_on_a_stream_of_its_own(foreseen):
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **BUCKETS}}
    run = foreseen("transformer.py", {**zero, "bf16": {"enabled": True}})
    assert any(each.stream for each in run.storages if KINDS[each.kind] == "buffer")
    # Batches are on the stream that computes.
    assert not any(each.stream for each in run.storages if KINDS[each.kind] == "input")


@pytest.mark.long
def test_quantised_weights_are_gathered_in_bytes_and_gradients_exchanged_in_half_bytes(foreseen):
    def moved(**zero):
        section = {"stage": 3, "stage3_param_persistence_threshold": 0, **BUCKETS, **zero}
        run = foreseen("transformer.py", {"zero_optimization": section, "bf16": {"enabled": True}}, world=16)
        assert run.stopped == ""
        kinds = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.0)
        for each in run.operations:
            if OPERATIONS[each.kind] in kinds:
                kinds[OPERATIONS[each.kind]] += each.moved
        return kinds

    plain, quantised = moved(), moved(zero_quantized_weights=True, zero_quantized_gradients=True)
    # Of four passes the first finds weights that no partition has quantised yet. Groups have scales of 4 bytes.
    assert quantised["all_gather"] == pytest.approx((1 + 3 / 2) / 4 * plain["all_gather"], rel=0.03)
    # Only matrices are quantised.
    assert plain["all_to_all"] == 0 < quantised["all_to_all"]
    assert quantised["reduce_scatter"] < 0.1 * plain["reduce_scatter"]


@pytest.mark.parametrize("key", ["reduce_buckets", "overlap_comm"])
def test_a_key_that_deepspeed_refuses_is_named(foreseen, key):
    run = foreseen("transformer.py", {"zero_optimization": {"stage": 1, key: "often"}})
    assert run.stopped.startswith(f"zero_optimization.{key}: DeepSpeed ")


def test_every_ask_of_deepspeed_has_a_known_answer(foreseen):
    run = foreseen("transformer.py", {"zero_optimization": {"stage": 3, **BUCKETS}, "bf16": {"enabled": True}})
    assert run.asks
    assert all(each.is_known for each in run.asks)


def test_a_program_without_an_engine_is_stopped_with_a_sentence(foreseen):
    run = foreseen("without_deepspeed.py", {})
    assert "without a DeepSpeed engine" in run.stopped


def test_a_deadline_names_the_line(foreseen, tmp_path):
    (tmp_path / "waits.py").write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    run = foreseen("waits.py", {}, deadline_s=2.0, folder=tmp_path)
    assert "within 2 s" in run.stopped
    assert "waits.py:" in run.stopped


def test_a_batch_that_the_program_moves_itself_is_input(foreseen):
    run = foreseen("ignores_batch.py", {})
    moved = [each for each in run.storages if KINDS[each.kind] == "input"]
    assert moved
    assert len({each.size for each in moved}) <= 2


_STAGES = """
import deepspeed
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from toy import CLASSES, FEATURES, batches, parse_arguments

args = parse_arguments()
deepspeed.init_distributed()
layers = [LayerSpec(nn.Linear, FEATURES, 16), TiedLayerSpec("tied", nn.Linear, 16, 16)]
layers += [LayerSpec(nn.Linear, 16, 16, bias=False), TiedLayerSpec("tied", nn.Linear, 16, 16)]
layers += [F.relu, nn.Linear(16, CLASSES)]
model = PipelineModule(layers, num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform")
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
data = batches(engine.train_micro_batch_size_per_gpu(), engine.device)
for _ in range(args.steps):
    engine.train_batch(data)
"""


def test_a_pipeline_has_the_parameters_of_all_its_stages(foreseen, tmp_path):
    (tmp_path / "stages.py").write_text(_STAGES)
    (tmp_path / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
    run = foreseen("stages.py", {"zero_optimization": {"stage": 1}}, world=4, folder=tmp_path)
    assert run.stopped == ""
    assert (run.is_pipeline, run.pipeline_stages) == (True, 2)
    assert (run.replicas, run.parameters) == (2, 24 * 16 + 16 + 16 * 16 + 16 + 16 * 16 + 16 * 8 + 8)
    assert "first of 2 stages" in run.notes[0]
    assert not foreseen("transformer.py", {}).is_pipeline


def test_kernels_of_liger_and_bitsandbytes_have_the_sizes_of_a_gpu(foreseen):
    """Both packages, and triton, are stand-ins with the signatures and the allocations of the real ones."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    run = foreseen("train.py", {}, folder=PROGRAMS / "kernel_packages", config=config)
    assert run.stopped == ""
    assert [ask for ask in run.asks if not ask.is_known] == []
    hidden, processors = 256, 132
    packed, trained = hidden * 4 * hidden // 2, hidden * 4 * hidden + hidden
    live = live_at_end(run)
    assert live["parameter"] == pytest.approx(packed + 2 * trained, rel=0.01)
    # A master copy, two states of a byte, and a maximum of four bytes for 256 numbers of each state.
    assert live["optimizer"] == pytest.approx(trained * (4 + 2 + 2 * 4 / 256), rel=0.01)
    # Liger sums the gradient of a norm's weight for each processor of the GPU apart.
    assert processors * hidden * 4 in {each.size for each in run.storages}
    kinds = [OPERATIONS[each.kind] for each in run.operations]
    assert kinds.count("norm") == 2 * 2
    # DeepSpeed makes the states by an update before the first step.
    assert kinds.count("update") == 3 * 2


def test_offloaded_shares_count_however_small_they_are(foreseen):
    offloads = {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")}
    config = {**BASE, "bf16": {"enabled": True}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **offloads}
    run = foreseen("transformer.py", {"zero_optimization": zero}, config=config, world=8)
    assert run.stopped == ""
    live = live_at_end(run, place="host")
    share = run.parameters / run.world
    # bf16 parameters, and a master copy with two moments.
    assert live["parameter"] == pytest.approx(2 * share, rel=0.02)
    assert live["optimizer"] == pytest.approx(12 * share, rel=0.02)


@pytest.mark.long
def test_a_stage_3_update_in_pieces_is_a_line_in_the_layers(foreseen):
    """The share of eight layers is updated in two pieces. That of two, or of four, is one piece of that size."""
    zero, config = {"stage": 3, "sub_group_size": 500_000}, {**BASE, "bf16": {"enabled": True}}

    def run(layers, zero):
        words = ("--hidden", "128", "--heads", "4", "--vocabulary", "256", "--length", "16", "--layers", str(layers))
        found = foreseen("transformer.py", {"zero_optimization": {**BUCKETS, **zero}}, *words, config=config)
        assert not found.stopped
        return replace(found, micro_batch=layers)

    def update_of(*runs):
        return by_size(*runs).at(8).by_name()["update"]

    whole, few = run(8, zero), [run(layers, zero) for layers in (2, 4)]
    smaller = [run(each.micro_batch, zero_of_few(zero, each.parameters, whole.parameters)) for each in few]
    assert update_of(*smaller) == pytest.approx(update_of(whole), rel=0.01)
    assert update_of(*few) > 1.05 * update_of(whole)


def most_bytes(run):
    """The most bytes on the device at any event, and the arithmetic of the run."""
    live = most = 0
    for event in run.events:
        storage = run.storages[event.storage]
        if storage.place == 0:
            live += storage.size if event.is_made else -storage.size
            most = max(most, live)
    return most, sum(operation.flops for operation in run.operations)


def test_a_switch_that_the_rank_turns_is_foreseen_by_the_code_of_a_trial(foreseen):
    zero = {"zero_optimization": {"stage": 1, **BUCKETS}}
    place = "model:activation_checkpointing"
    bytes_, flops = {}, {}
    for kind in ("none", "full", "every_second"):
        overrides = {**zero, "train_micro_batch_size_per_gpu": 16, "program": {place: kind}}
        run = foreseen("transformer.py", overrides, "--layers", "6")
        assert run.stopped == ""
        assert run.ds_config["program"] == {place: kind}
        assert run.program["turnable"][place] == ["none", "full", "every_second"]
        bytes_[kind], flops[kind] = most_bytes(run)
    assert bytes_["full"] < bytes_["every_second"] < bytes_["none"]
    assert 1.15 * flops["none"] < flops["full"] < 1.4 * flops["none"]
    assert flops["none"] < flops["every_second"] < flops["full"]


@pytest.mark.long
def test_another_attention_is_foreseen(foreseen):
    runs = {}
    for name in ("sdpa", "eager"):
        overrides = {"zero_optimization": {"stage": 1, **BUCKETS}, "program": {"model:attention": name}}
        runs[name] = foreseen("train.py", overrides, folder=PROGRAMS / "turned")
        assert runs[name].stopped == ""
    assert most_bytes(runs["sdpa"])[0] < most_bytes(runs["eager"])[0]


GROUPED = """
import deepspeed, torch
from toy import parse_arguments

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(4, {inner}, 32))

    def forward(self, rows):
        ends = torch.arange(2, 10, 2, dtype=torch.int32, device=rows.device)
        return torch._grouped_mm(rows, self.weights, offs=ends).square().sum()

args, model = parse_arguments(), Experts()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    engine.backward(engine(torch.ones(8, {inner}, device=engine.device, dtype=next(model.parameters()).dtype)))
    engine.step()
"""


@pytest.mark.parametrize(("precision", "inner"), [("fp32", 36), ("bf16", 16), ("fp16", 16)])
def test_experts_computed_at_once_work_as_much_as_all_rows_with_their_own(foreseen, tmp_path, precision, inner):
    (tmp_path / "experts.py").write_text(GROUPED.format(inner=inner))
    shutil.copy(PROGRAMS / "toy.py", tmp_path)
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    run = foreseen("experts.py", half, folder=tmp_path)
    assert run.stopped == ""
    products = [each.flops for each in run.operations if OPERATIONS[each.kind] == "matmul"]
    # Of each of two steps, forward and the gradient of the weights.
    assert products == [2 * 8 * inner * 32] * 4


WRITES = """
import pathlib, runpy, subprocess, sys

subprocess.run({command!r}, shell=True, check=True)
assert not list(pathlib.Path(".").rglob("*.tmp")) or {command!r} == "true"
pathlib.Path("mine.log").write_text("overwritten")
pathlib.Path("cache").mkdir()
pathlib.Path("cache/tokens.txt").write_text("prepared")
sys.argv[0] = "transformer.py"
try:
    runpy.run_path("transformer.py", run_name="__main__")
finally:
    pathlib.Path("late.txt").write_text("after the steps")
"""


def test_a_foreseen_program_changes_no_file_of_the_users_and_keeps_what_it_prepared(foreseen, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    for name in ("transformer.py", "toy.py"):
        shutil.copy(PROGRAMS / name, folder)
    deletes = "true" if layer_refusal(tmp_path) else "find . -name '*.tmp' -delete; rm -rf zerotune-*"
    (folder / "writes.py").write_text(WRITES.format(command=deletes))
    (folder / "mine.log").write_text("mine")
    earlier = folder / PLANS / "earlier" / "mine.tmp"
    earlier.parent.mkdir(parents=True)
    for mine in (folder / "mine.tmp", earlier):
        mine.write_text("mine")
    run = foreseen("writes.py", {}, folder=folder)
    assert run.stopped == ""
    assert [mine.read_text() for mine in (folder / "mine.log", folder / "mine.tmp", earlier)] == ["mine"] * 3
    assert {each.name for each in folder.iterdir()} - {"__pycache__"} == {
        *("transformer.py", "toy.py", "writes.py", "mine.log", "mine.tmp", PLANS, "cache")
    }
    assert (folder / "cache" / "tokens.txt").read_text() == "prepared"
    # The device's host has a compiler, whether this host has one or not.
    assert run.program["turnable"]["model:compile"] == [False, True]


SAVES = """
import deepspeed, json, pathlib, sys, torch

model = torch.nn.Linear(4, 4)
config = json.loads(pathlib.Path(sys.argv[-1]).read_text())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
pathlib.Path("prepared.txt").write_text("")
for step in range(9):
    engine.backward(engine(torch.randn(2, 4, device=engine.device)).square().mean())
    engine.step()
    torch.save({"step": step}, f"checkpoint_{step}.pt")
    assert torch.load(f"checkpoint_{step}.pt") == {"step": step}
"""


def test_checkpoints_that_a_program_saves_while_it_trains_are_not_kept(foreseen, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "saves.py").write_text(SAVES)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    assert foreseen("saves.py", {}, folder=folder, config=config).stopped == ""
    assert {each.name for each in folder.iterdir()} - {"__pycache__"} == {"saves.py", "prepared.txt"}
