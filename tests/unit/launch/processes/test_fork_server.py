import gc

import pytest

from zerotune.trial_lib.launch.processes.fork_server import _importing


@pytest.mark.parametrize("failure", [None, ImportError("no such module")])
def test_forks_find_the_garbage_collector_as_it_was_before_the_imports(failure):
    before = gc.get_threshold()
    try:
        with _importing():
            assert gc.get_threshold()[0] == 0
            if failure is not None:
                raise failure
    except ImportError:
        assert failure is not None
    assert gc.get_threshold() == before
    assert gc.isenabled()
