"""Whose memory has run out, by the words of everybody who says so."""

import pytest

from zerotune.trial_lib.launch.outcome import MemoryOwner, lack_of_memory
from zerotune.trial_lib.messages.measurement import RankFailure

DEVICE, HOST = MemoryOwner.DEVICE, MemoryOwner.HOST
FULL = {"free": 20 * 2**20, "total": 80 * 2**30, "reserved": 78 * 2**30, "allocated": 77 * 2**30}
ROOM = {**FULL, "free": 12 * 2**30, "reserved": 60 * 2**30}
PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"


def failed(kind, message, frame="train.py", code="loss.backward()", memory=None):
    """Returns the record of an exception that was raised in a line of code."""
    frames = f'  File "train.py", line 9, in main\n    step()\n  File "{frame}", line 3, in step\n    {code}\n'
    trace = f"Traceback (most recent call last):\n{frames}{kind}: {message}"
    return RankFailure(type=kind, message=message, traceback=trace, memory=memory or {})


def whose(failure, log="", device="cuda"):
    lack = lack_of_memory(failure, log, device)
    return None if lack is None else lack.whose


OF_THE_DEVICE = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"),
    ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    # With expandable segments, and from libraries that ask the driver themselves.
    ("RuntimeError", "CUDA driver error: out of memory"),
    ("RuntimeError", "Triton Error [CUDA]: out of memory"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("RuntimeError", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ("RuntimeError", "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    ("RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("DistBackendError", "NCCL error, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ("RuntimeError", "NCCL error, unhandled cuda error\nLast error:\nCuda failure 'out of memory'"),
    ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes."),
]


@pytest.mark.parametrize(("kind", "message"), OF_THE_DEVICE)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_exception_says_in_any_words_that_the_device_is_full(kind, message, device):
    assert whose(failed(kind, message), device=device) is DEVICE


@pytest.mark.parametrize(
    "log",
    [
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        "node1:123:456 [0] transport/p2p.cc:238 NCCL WARN Cuda failure 'out of memory'",
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA driver error: out of memory",
    ],
)
def test_what_python_never_saw_is_read_from_the_log(log):
    assert whose(None, log) is DEVICE
    assert whose(failed("RuntimeError", PEER), log) is DEVICE


def test_a_warning_in_the_log_is_no_lack_of_memory():
    log = "UserWarning: with this sequence length you may run Out Of Memory\nSegmentation fault"
    assert whose(None, log) is None
    assert whose(failed("KeyError", "'labels'"), log) is None


def test_words_of_the_code_are_no_words_of_the_exception():
    code = 'return wrong("this may be out of memory")'
    assert whose(failed("KeyError", "'labels'", code=code)) is None


UNSURE = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    'handles_.at(i) INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":396, please report a bug',
    '!handles_.at(i) INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":408',
]


@pytest.mark.parametrize("message", UNSURE)
def test_what_a_library_does_not_say_is_settled_by_what_was_free(message):
    lack = lack_of_memory(failed("RuntimeError", message, memory=FULL), "", "cuda")
    assert lack is not None
    assert lack.whose is DEVICE
    assert "of 80.0 GiB free" in lack.said
    assert whose(failed("RuntimeError", message, memory=ROOM)) is None
    assert whose(failed("RuntimeError", message)) is None


OF_THE_HOST = [
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ("MemoryError", ""),
    ("_ArrayMemoryError", "Unable to allocate 7.45 GiB for an array with shape (10**9,) and data type float64"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("RuntimeError", "DataLoader worker (pid 4242) is killed by signal: Killed. "),
]


@pytest.mark.parametrize(("kind", "message"), OF_THE_HOST)
def test_what_the_host_has_not_got_is_no_lack_of_the_device(kind, message):
    assert whose(failed(kind, message)) is HOST
    # A CPU's slot has one memory.
    assert whose(failed(kind, message), device="cpu") is DEVICE


@pytest.mark.parametrize(
    ("frame", "code", "message"),
    [
        ("deepspeed/accelerator/abstract_accelerator.py", "return tensor.pin_memory()", "CUDA error: out of memory"),
        ("torch/utils/data/_utils/pin_memory.py", "return data.pin_memory(device)", "CUDA error: out of memory"),
        ("engine.py", "self.load()", "cudaHostAlloc failed: out of memory"),
        (
            "train.py",
            "batch = next(it)",
            "Caught RuntimeError in pin memory thread for device 0.\nCUDA error: out of memory",
        ),
    ],
)
def test_pages_that_cannot_be_locked_are_the_hosts(frame, code, message):
    assert whose(failed("AcceleratorError", message, frame, code)) is HOST


def test_the_devices_own_allocator_speaks_for_the_device_wherever_it_is_asked():
    failure = failed("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", code="x = pinned.to(device)")
    assert whose(failure) is DEVICE


def test_an_exception_of_the_pinning_thread_that_is_not_of_memory_is_none():
    message = "Caught TypeError in pin memory thread for device 0.\nTypeError: pin_memory() takes no arguments"
    assert (
        whose(failed("TypeError", message, "torch/utils/data/_utils/pin_memory.py", "return data.pin_memory()")) is None
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "can't start new thread"),
        ("RuntimeError", "Resource temporarily unavailable"),
        ("RuntimeError", "could not create a primitive"),
    ],
)
def test_a_slots_limit_lets_fail_what_elsewhere_is_no_matter_of_memory(kind, message):
    assert whose(failed(kind, message), device="cpu") is DEVICE
    assert whose(failed(kind, message), device="cuda") is None
