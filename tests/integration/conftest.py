"""What integration tests share: ZeroTune's own home, and trainings started warm."""

from pathlib import Path

import pytest
from study_fixtures import migrated_home
from training_fixtures import Trainings

from trial_lib.launch.warm import WarmLauncher


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return migrated_home(tmp_path_factory.getbasetemp())


@pytest.fixture
def trainings(tmp_path: Path, warm_launcher: WarmLauncher) -> Trainings:
    return Trainings(tmp_path, warm_launcher)
