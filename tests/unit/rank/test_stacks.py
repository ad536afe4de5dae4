import linecache
import threading
import time
import weakref
from pathlib import Path

import pytest

from zerotune.trial_lib.rank.endings import doing, place_of, stack_of

COLLECTIVE = "/home/me/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


class Standing:
    """A thread that stands in a function, called by the lines of files that do not exist."""

    def __init__(self, *calls):
        self._lock = threading.Lock()
        self._lock.acquire()
        function = self._lock.acquire
        for file, name, line in calls:
            scope = {"inner": function}
            source = f"def {name}():\n    {line}\n"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            exec(compile(source, file, "exec"), scope)
            function = scope[name]
        self.thread = threading.Thread(target=function, daemon=True)
        self.thread.start()
        time.sleep(0.2)

    @property
    def stack(self):
        return stack_of(self.thread.ident)

    def go_on(self):
        self._lock.release()
        self.thread.join()


@pytest.fixture
def standing():
    all_of_them = []

    def stand(*calls):
        all_of_them.append(Standing(*calls))
        return all_of_them[-1]

    yield stand
    for each in all_of_them:
        each.go_on()


def test_a_collective_is_named_with_the_line_of_the_users_code(standing):
    stack = standing(
        (COLLECTIVE, "all_reduce", "inner()"),
        ("/home/me/lib/python3/site-packages/torch/distributed/c10d_logger.py", "wrapper", "inner()"),
        ("/home/me/code/train.py", "main", "inner()"),
    )
    does = doing(stack.stack, Path("/home/me/code"))
    assert (does.where, does.waits_in) == ("train.py:2", "all_reduce")


def test_work_of_the_program_itself_is_no_wait(standing):
    stack = standing(("/home/me/code/data.py", "prepare", "inner()"))
    does = doing(stack.stack, Path("/home/me/code"))
    assert (does.where, does.waits_in) == ("data.py:2", "")


def test_a_lock_of_python_is_no_wait_for_other_ranks():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert doing(stack_of(thread.ident), Path.cwd()).waits_in == ""
    event.set()


def test_a_started_request_is_waited_for_by_its_own_wait(standing):
    stack = standing(("/home/me/lib/python3/site-packages/deepspeed/runtime/zero/stage3.py", "fetch", "inner()"))
    file = "/home/me/lib/python3/site-packages/deepspeed/runtime/zero/stage3.py"
    linecache.cache[file] = (1, None, ["def fetch():\n", "    handle.wait()\n"], file)
    assert doing(stack.stack, Path("/home/me/code")).waits_in == "wait"


def test_a_thread_that_does_not_move_stands_in_one_place(standing):
    stack = standing(("/home/me/code/train.py", "main", "inner()"))
    assert place_of(stack.stack) == place_of(stack.stack)


def test_a_stack_that_is_kept_keeps_nothing_of_what_the_thread_works_with():
    class Tensor:
        pass

    held, goes_on = [], threading.Event()

    def work():
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        goes_on.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.2)
    stack = stack_of(thread.ident)
    assert "work" in [call.function for call in stack]
    goes_on.set()
    thread.join()
    assert held[0]() is None
    assert stack_of(thread.ident) == ()
