"""The host: what NVML, torch and DeepSpeed say of it agrees, and what is imported before a fork leaves it alone."""

import sys
from dataclasses import asdict

from benchmarks.gpu.kit import Kit
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.doctor import environment_report, tried_devices
from zerotune.trial_lib.launch.processes.rank_process import NUMBER

# What a driver keeps of a card's memory for itself, at most.
LEAST_SHARE = 0.95

DEVICE = """
import json, torch
is_there = torch.cuda.is_available()
properties = torch.cuda.get_device_properties(0) if is_there else None
print(json.dumps({
    "name": properties.name if is_there else "", "total": properties.total_memory if is_there else 0,
    "free": torch.cuda.mem_get_info()[0] if is_there else 0, "cuda": torch.version.cuda,
    "capability": list(torch.cuda.get_device_capability()) if is_there else [],
    "multiprocessors": properties.multi_processor_count if is_there else 0,
    "product": float(torch.ones(64, 64, device="cuda" if is_there else "cpu").matmul(
        torch.ones(64, 64, device="cuda" if is_there else "cpu"))[0, 0]),
}))
"""

# OpenBLAS would start a thread for each core when numpy is imported.
AS_IN_THE_FORK_SERVER = {NUMBER: "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# What the fork server does before it forks, one by one.
FORKS = """
import json, os, sys
from zerotune.trial_lib.launch.processes.environment_check import asked_by_a_child, count_by_a_child
from zerotune.trial_lib.launch.processes.fork_server import doubt
found = {"nothing": doubt()}
sys.modules["mlflow"] = None
import torch
found["torch"] = doubt()
count_by_a_child(lambda: doubt() is None)
with asked_by_a_child(lambda: doubt() is None):
    import deepspeed
found["deepspeed"] = doubt()
import deepspeed.ops
deepspeed.ops.__compatible_ops__
found["the ops that can be built"] = doubt()
torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
found["an optimizer"] = doubt()
from deepspeed.accelerator import get_accelerator
get_accelerator().device_name()
get_accelerator().device_count()
found["DeepSpeed's accelerator"] = doubt()
try:
    import transformers
    found["transformers"] = doubt()
except ImportError:
    pass
print(json.dumps(found))
"""


def run(kit: Kit) -> None:
    host, report = kit.host, kit.report
    report.figure("host", asdict(host))
    report.figure("identity", dict(kind_of(host.device).identity(host)))
    report.figure("load", kind_of(host.device).load(host, host.slots))
    report.check("there is a slot", len(host.slots) >= 1, ", ".join(host.slots))
    told = environment_report(sys.executable, kit.environment)
    report.figure("environment", told)
    is_told = report.check("torch and DeepSpeed can be imported", isinstance(told, dict), str(told)[:300])
    if is_told and isinstance(told, dict):
        report.check("DeepSpeed chooses the device that the slots are", told["accelerator"] == host.device)
    tried = tried_devices(sys.executable, kit.environment)
    report.figure("tried", tried)
    if kit.is_cuda:
        sees = tried["sees"] if isinstance(tried, dict) else None
        report.check("torch sees as many devices as there are slots", sees == len(host.slots), str(tried)[:300])
    seen = kit.ask(DEVICE)
    report.figure("torch", seen)
    report.check("the device multiplies", seen["product"] == 64.0)
    if kit.is_cuda:
        uuid = host.device_of(host.slots[0])
        share = seen["total"] / (host.memory.get(uuid) or host.memory_per_slot)
        report.check("torch has the memory that NVML says", LEAST_SHARE < share <= 1.0, f"{share:.4f} of it")
        report.check("torch calls the device as NVML does", seen["name"] == host.models.get(uuid), seen["name"])
    else:
        report.leave_out("NVML against torch", "there is no GPU")
    for what, why in kit.ask(FORKS, **AS_IN_THE_FORK_SERVER).items():
        report.check(f"a process that has imported {what} may be forked", why is None, why or "")
    result = kit.completed("a first trial, from a fork", kit.shape("125m"))
    if result is not None:
        report.figure("phases", result.phases)
    cold = [note for note in kit.notes if note.startswith("starting cold")]
    report.check("it was started warm", not cold, "; ".join(cold))
