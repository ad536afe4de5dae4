"""ZeroTune's own home, the same for all tests of a session."""

from pathlib import Path

import pytest
from study_fixtures import migrated_home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return migrated_home(tmp_path_factory.getbasetemp())
