from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from trial_lib.launch.processes.torch_cache import remove_empty_torch_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps compiled code in this test, as torch says it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "a:user")
    cache = Path(default_cache_dir())
    assert cache == tmp_path / "torchinductor_a_user"
    cache.mkdir()
    return cache


def test_an_empty_cache_of_torch_is_not_left_behind(cache: Path) -> None:
    remove_empty_torch_cache({})
    assert not cache.exists()
    remove_empty_torch_cache({})


def test_what_was_compiled_stays_and_so_does_a_folder_of_the_user_s_own(cache: Path) -> None:
    remove_empty_torch_cache({"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    assert cache.exists()
    (cache / "code").touch()
    remove_empty_torch_cache({})
    assert (cache / "code").exists()
