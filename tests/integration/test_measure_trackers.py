"""A trial writes into none of the user's runs, with the trackers themselves."""

import os
import textwrap

import pytest
from case_fixtures import quick_only
from conftest import PROGRAMS

from zerotune.trial_lib.messages.orders import StepWindow

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)

TRAIN = """
import os, sys
import deepspeed
from toy import parse_arguments, small_model, train
args = parse_arguments()
{body}
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
train(engine, 100)
"""

USES = {
    "wandb": """
    import wandb
    wandb.login(key="0" * 40)
    run = wandb.init(project="mine", mode="online", settings=wandb.Settings(mode="online"), resume="allow", id="42")
    wandb.log({"loss": 1.0})
    run.log({"loss": 1.0})
    assert run.disabled
    """,
    "wandb, by its function": """
    from wandb import init
    init(project="mine", mode="offline").log({"loss": 1.0})
    """,
    "mlflow": """
    import mlflow
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.set_experiment("mine")
    with mlflow.start_run(run_name="a") as run:
        mlflow.log_param("lr", 1)
        mlflow.log_metric("loss", 1.0, step=1)
        mlflow.log_dict({"a": 1}, "a.json")
    assert mlflow.MlflowClient("http://127.0.0.1:9").get_run(run.info.run_id).data.metrics == {"loss": 1.0}
    assert "scratch" in mlflow.get_tracking_uri()
    """,
    "mlflow, a run that is resumed": """
    import mlflow
    mlflow.set_experiment(experiment_id="7")
    mlflow.start_run(run_id="0123456789abcdef0123456789abcdef")
    mlflow.log_metric("loss", 1.0)
    """,
    "tensorboard": """
    from torch.utils.tensorboard import SummaryWriter
    SummaryWriter().add_scalar("loss", 1.0, 1)
    SummaryWriter("out/tb").add_scalar("loss", 1.0, 1)
    SummaryWriter(log_dir=os.path.abspath("tb")).add_scalar("loss", 1.0, 1)
    """,
}


@pytest.mark.parametrize("tracker", quick_only(("wandb", "mlflow"), USES))
def test_a_trial_writes_into_none_of_the_users_runs(trials, tmp_path, tracker):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN.format(body=textwrap.dedent(USES[tracker])))
    (folder / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_RUN_ID": "0123456789abcdef0123456789abcdef",
    }
    result = trials.run("train.py", model_dir=folder, window=SHORT, environment=environment)
    assert result.outcome == "completed", (result.reason, trials.log(result))
    assert {path.name for path in folder.iterdir()} <= {"train.py", "toy.py", "__pycache__"}
    assert not (tmp_path / "home" / ".netrc").exists()
    print(tracker, result.phases)
