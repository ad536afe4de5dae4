import dataclasses
import json
import re

import pytest

from zerotune.trial_lib.launch.outcome import FAILURE, RankRecord, classify, is_from_outside, read_record
from zerotune.trial_lib.launch.rank_starter import ProcessesEnd
from zerotune.trial_lib.messages.measurement import Measurement, RankFailure
from zerotune.trial_lib.records.result import Outcome

DONE = Measurement(outcome="completed")
PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"


def failure(kind, message, **changes):
    trace = f"Traceback (most recent call last):\n{kind}: {message}"
    return RankFailure(**{"type": kind, "message": message, "traceback": trace, "time": 1.0, **changes})


def rank(number=0, measurement=None, failure=None, log="", engine_built=True):
    return RankRecord(measurement, failure, log, f"rank{number}.log", engine_built)


def ended(ranks, by="ranks", statuses=None, kernel_killed=False, device="cpu"):
    statuses = [1] * len(ranks) if statuses is None else statuses
    end = classify(ProcessesEnd(by, statuses), ranks, 60.0, kernel_killed, device)
    # A reason names the log of the rank that failed.
    named = None if " Log: " not in end.reason else int(re.findall(r"Log: rank(\d+).log$", end.reason)[0])
    assert named in (None, end.failed_rank)
    return end.outcome.value, end.reason


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        ),
        ("MemoryError", ""),
        ("RuntimeError", "can't start new thread"),
        ("RuntimeError", "Resource temporarily unavailable"),
        ("RuntimeError", "could not create a primitive"),
        (
            "_ArrayMemoryError",
            "Unable to allocate 7.45 GiB for an array with shape (10**9,) and data type float64",
        ),
        ("OSError", "[Errno 12] Cannot allocate memory"),
        ("RuntimeError", "DataLoader worker (pid 4242) is killed by signal: Killed. "),
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB",
        ),
        ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        (
            "DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.7\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        ),
    ],
)
def test_every_known_way_to_run_out_of_memory_is_recognised(kind, message):
    died = rank(1, failure=failure(kind, message))
    peer = rank(0, failure=failure("RuntimeError", PEER))
    outcome, reason = ended([peer, died])
    assert outcome == "out_of_memory"
    assert reason.endswith("Log: rank1.log")


def test_an_operation_that_onednn_has_not_got_is_no_lack_of_memory():
    message = "could not create a primitive descriptor for a convolution forward propagation primitive"
    outcome, _ = ended([rank(0, failure=failure("RuntimeError", message))])
    assert outcome == "crashed"


@pytest.mark.parametrize(
    "log",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory.",
        "node1:123:456 [0] transport/p2p.cc:238 NCCL WARN Cuda failure 2 'out of memory'",
    ],
)
def test_what_python_never_saw_is_read_from_the_log(log):
    peer = rank(0, failure=failure("RuntimeError", PEER))
    assert ended([peer, rank(1, log=log)], statuses=[1, -6])[0] == "out_of_memory"


def test_a_rank_that_aborts_in_another_collective_than_its_peers_is_said_to_be_there():
    thrown = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 16672 vs 4. Received data size "
        "doesn't match expected size. Is there a distributed collective mismatch in your code?"
    )
    peer = rank(0, failure=failure("RuntimeError", PEER))
    outcome, reason = ended([peer, rank(1, log=thrown)], statuses=[1, -6])
    assert outcome == "crashed"
    assert reason.startswith("Rank 1 was in another collective than its peers")
    assert "different numbers of batches" in reason
    assert reason.endswith("Log: rank1.log")


def test_a_rank_that_aborts_is_told_of_by_what_was_thrown():
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no route to host\n"
    assert ended([rank(0, log=thrown)], statuses=[-6])[1] == "Rank 0 aborted: no route to host. Log: rank0.log"
    assert ended([rank(0)], statuses=[-6])[1] == (
        "Rank 0 crashed in native code by SIGABRT; its last words: it printed nothing. Log: rank0.log"
    )


def test_a_kill_is_out_of_memory_only_where_the_kernel_says_so():
    assert ended([rank()], statuses=[-9], kernel_killed=True)[0] == "out_of_memory"
    by_whom = "Otherwise another process has sent it, or the program itself. Log: rank0.log"
    killed = "Rank 0 was killed by SIGKILL. The kernel sends it if memory runs out, and"
    none, unknown = f"{killed} has counted no such kill meanwhile.", f"{killed} does not show whether it has."
    assert ended([rank()], statuses=[-9], kernel_killed=False) == ("crashed", f"{none} {by_whom}")
    assert ended([rank()], statuses=[-9], kernel_killed=None) == ("crashed", f"{unknown} {by_whom}")
    assert ended([rank()], statuses=[-11], kernel_killed=True)[0] == "crashed"


@pytest.mark.parametrize(
    "message",
    [
        PEER,
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] Connection reset by peer",
        "NCCL communicator was aborted on rank 0.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exited prematurely.",
        "failed to recv, got 0 bytes",
        "Broken pipe",
    ],
)
def test_a_lost_connection_is_never_the_cause(message):
    peer = rank(0, failure=failure("RuntimeError", message, time=1.0))
    culprit = rank(1, failure=failure("KeyError", "'labels'", time=2.0))
    assert ended([peer, culprit]) == ("crashed", "The program raised KeyError: 'labels'. Log: rank1.log")
    outcome, reason = ended([peer, rank(1)], statuses=[1, -9])
    assert outcome == "crashed"
    assert reason.startswith("Rank 1 was killed by SIGKILL.")


def test_of_several_exceptions_the_first_is_the_cause():
    late, early = (rank(n, failure=failure("ValueError", str(n), time=2.0 - n)) for n in range(2))
    assert ended([late, early])[1] == "The program raised ValueError: 1. Log: rank1.log"


def test_all_ranks_have_to_be_measured():
    assert ended([rank(0, DONE), rank(1, DONE)], statuses=[0, 0]) == ("completed", "")
    assert ended([rank(0, DONE), rank(1)], statuses=[0, 0])[0] == "crashed"
    assert ended([rank(), rank(1)], statuses=[0, 0])[0] == "crashed"


def test_a_measurement_counts_whatever_ended_the_processes_afterwards():
    for by in ("deadline", "cancel", "guard"):
        assert ended([rank(0, DONE)], by=by, statuses=[None])[0] == "completed"


# Of LLaMA-Factory at stage 3 on two CPU ranks, which ends so without ZeroTune as well.
ALONE = (
    "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
    "world_size 16 != 2 * 4 * 1"
)


@pytest.mark.parametrize(("ranks", "begins"), [(2, "In the program deepspeed.zero.Init"), (1, "The program raised")])
def test_a_model_that_is_partitioned_before_the_ranks_have_met_is_named(ranks: int, begins: str) -> None:
    trace = 'File "/lib/deepspeed/runtime/zero/partition_parameters.py", line 945, in __init__'
    alone = failure("AssertionError", ALONE, traceback=trace)
    outcome, reason = ended([rank(number, failure=alone) for number in range(ranks)])
    assert outcome == "crashed"
    assert reason.startswith(begins)
    assert "16 != 2 * 4 * 1" in reason


@pytest.mark.parametrize("outcome", ["invalid", "diverged"])
def test_what_one_rank_measured_to_be_wrong_is_wrong_for_all(outcome):
    wrong = Measurement(outcome=outcome, reason="because")
    assert ended([rank(0, DONE), rank(1, wrong)]) == (outcome, "because")
    assert ended([rank(0, failure=failure("RuntimeError", PEER)), rank(1, wrong)]) == (outcome, "because")


def test_an_error_in_initialize_is_deepspeeds_refusal_unless_it_says_nothing_of_the_configuration():
    refused = failure("AssertionError", "Check batch related parameters.", in_initialize=True)
    assert ended([rank(failure=refused)]) == (
        "invalid",
        "deepspeed.initialize has failed: AssertionError: Check batch related parameters. Log: rank0.log",
    )
    named = dataclasses.replace(refused, refusal="train_batch_size: this is why. Change it.")
    assert ended([rank(failure=named)])[1] == (
        "deepspeed.initialize has failed: train_batch_size: this is why. Change it. Log: rank0.log"
    )
    for name, message in (("ModuleNotFoundError", "No module named 'mpi4py'"), ("DistNetworkError", "EADDRINUSE")):
        assert ended([rank(failure=failure(name, message, in_initialize=True))])[0] == "crashed"


def test_running_out_of_memory_in_initialize_is_no_refusal():
    assert ended([rank(failure=failure("MemoryError", "", in_initialize=True))])[0] == "out_of_memory"


def test_deadline_cancel_and_guard_are_told_apart():
    assert ended([rank()], by="deadline", statuses=[None]) == (
        "timed_out",
        "Still running after its deadline of 60 s. Log: rank0.log",
    )
    assert ended([rank()], by="cancel", statuses=[None])[0] == "cancelled"
    # Cancelled while it waited for its slots.
    assert ended([rank()], by="cancel", statuses=[])[0] == "cancelled"
    outcome, reason = ended([rank()], by="guard", statuses=[None])
    assert outcome == "crashed"
    assert "guard" in reason


@pytest.mark.parametrize(
    ("by", "ranks", "statuses"),
    [
        ("guard", [rank()], [None]),
        ("host", [rank()], [None]),
        ("ranks", [rank(), rank(1, log=PEER)], [-9, 1]),
        ("ranks", [rank(), rank(1, failure=failure("RuntimeError", PEER))], [-9, 1]),
        ("stopped", [rank()], [None]),
        ("ranks", [rank()], [-15]),
    ],
)
def test_who_was_killed_says_nothing_of_what_it_ran(by, ranks, statuses):
    assert is_from_outside(ProcessesEnd(by, statuses), Outcome.CRASHED, ranks)


@pytest.mark.parametrize(
    ("outcome", "ranks", "statuses"),
    [
        (Outcome.CRASHED, [rank(), rank(1, failure=failure("KeyError", "labels"))], [-9, 1]),
        (Outcome.CRASHED, [rank()], [-11]),
        (Outcome.OUT_OF_MEMORY, [rank()], [-9]),
        (Outcome.COMPLETED, [rank(0, DONE)], [-9]),
    ],
)
def test_an_exception_a_fault_and_memory_are_the_program_s_own(outcome, ranks, statuses):
    assert not is_from_outside(ProcessesEnd("ranks", statuses), outcome, ranks)


def test_a_deadline_without_an_engine_says_so_with_the_last_words():
    outcome, reason = ended([rank(log="Downloading: 3 %\n", engine_built=False)], by="deadline", statuses=[None])
    assert outcome == "timed_out"
    assert "had no DeepSpeed engine after 60 s" in reason
    assert "Downloading: 3 %" in reason


def test_a_program_that_ends_itself_with_a_number_is_told_by_its_last_words():
    ends = failure("SystemExit", "2")
    reason = ended([rank(failure=ends, log="usage: train.py\ntrain.py: error: unrecognized arguments: --bach 3\n")])[1]
    assert "SystemExit: 2; its last words: train.py: error: unrecognized arguments: --bach 3" in reason


def test_last_words_stand_in_for_an_exception():
    assert ended([rank(log="a\nlicence expired\n")], statuses=[4])[1] == (
        "Rank 0 ended with exit code 4 and left no result; its last words: licence expired. Log: rank0.log"
    )


def test_a_long_message_is_cut_to_one_line():
    message = "1 validation error\nzero_optimization.stage\n  Input should be 3\n" + "more\n" * 50
    reason = ended([rank(failure=failure("ValidationError", message, in_initialize=True))])[1]
    assert "ValidationError: 1 validation error zero_optimization.stage Input should be 3. Log:" in reason
    assert len(ended([rank(failure=failure("ValueError", "x" * 5000))])[1]) < 400


@pytest.mark.parametrize(
    "complaint",
    [
        "/usr/bin/ld: cannot find -ltorch_cpu: No such file or directory",
        "/env/torch/include/torch/all.h:4:2: error: #error C++20 or later is required.",
        "nvcc fatal   : Unsupported gpu architecture 'compute_103a'",
    ],
)
def test_an_op_that_cannot_be_built_is_told_by_the_compilers_complaint(complaint):
    lines = ["[1/2] c++ -MMD -Werror -c x.cpp", "x.cpp:9:1: warning: unused", complaint, "ninja: build stopped."]
    message = f"Error building extension 'fused_adam': {chr(10).join(lines)}"
    outcome, reason = ended([rank(failure=failure("RuntimeError", message))])
    said = f"The program raised RuntimeError: Error building extension 'fused_adam': {complaint.rstrip('.')}."
    assert (outcome, reason) == ("crashed", f"{said} Log: rank0.log")


def test_a_memory_error_that_the_program_survived_does_not_decide_how_it_ended():
    survived = rank(failure=failure("ValueError", "bad label"), log="warning: MemoryError, trying a smaller chunk\n")
    assert ended([survived])[0] == "crashed"


def test_a_memory_error_behind_the_programs_own_exception_is_the_cause():
    trace = (
        "MemoryError\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: step 3"
    )
    assert ended([rank(failure=failure("RuntimeError", "step 3", traceback=trace))])[0] == "out_of_memory"


def test_on_a_gpu_the_hosts_memory_is_an_outcome_of_its_own():
    pinned = "CUDA error: out of memory"
    where = failure(
        "AcceleratorError", pinned, traceback=f'  File "a.py", line 1, in f\n    t.pin_memory()\nE: {pinned}'
    )
    outcome, reason = ended([rank(failure=where)], device="cuda")
    assert outcome == "out_of_host_memory"
    assert reason == "The host's memory has run out: AcceleratorError: CUDA error: out of memory. Log: rank0.log"
    assert ended([rank()], statuses=[-9], kernel_killed=True, device="cuda")[0] == "out_of_host_memory"
    assert ended([rank()], statuses=[-9], kernel_killed=False, device="cuda")[0] == "crashed"
    assert ended([rank(failure=failure("MemoryError", ""))], device="cuda")[0] == "out_of_host_memory"


def test_who_runs_out_of_host_memory_was_not_killed_from_outside():
    assert not is_from_outside(ProcessesEnd("ranks", [-9]), Outcome.OUT_OF_HOST_MEMORY, [rank()])


def test_a_rank_on_another_kind_of_device_says_so_in_full():
    sentence = "the devices: the program trains on `xpu`. " + "Set DS_ACCELERATOR=cpu. " * 20
    died = rank(failure=failure("OtherDeviceError", sentence, in_initialize=True, elsewhere=True))
    assert ended([died]) == ("invalid", f"{sentence.rstrip()} Log: rank0.log")


def test_a_failure_that_names_a_file_which_is_no_utf_8_is_read(tmp_path):
    record = tmp_path / "failure.json"
    record.write_text(json.dumps({"type": "OSError", "message": "caf\udce9.txt", "elsewhere": True}))
    found = read_record(record, FAILURE)
    assert found is not None
    assert found.elsewhere


def test_an_error_that_a_library_has_raised_from_another_one_names_that() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "torchao.py", line 3\nOSError: no libcuda.so\n'
        "\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "utils.py", line 9\nModuleNotFoundError: Could not import x.\n'
    )
    raised = failure("ModuleNotFoundError", "Could not import x.", traceback=trace)
    assert ended([rank(failure=raised)])[1] == (
        "The program raised ModuleNotFoundError: Could not import x, because of OSError: no libcuda.so. Log: rank0.log"
    )
