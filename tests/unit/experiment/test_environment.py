import pytest

from trial_lib.experiment.environment import REDACTED, redact


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "apikey", "KEYS", "MyPasswd"],
)
def test_a_name_that_looks_like_a_secret_is_redacted(name: str) -> None:
    assert redact({name: "abc"}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PWD", "KEYBOARD"])
def test_other_names_keep_their_values(name: str) -> None:
    assert redact({name: "abc"}) == {name: "abc"}


def test_an_address_with_a_password_is_redacted() -> None:
    variables = {"A": "https://me:secret@host/x", "B": "https://host:5000/x"}
    assert redact(variables) == {"A": REDACTED, "B": "https://host:5000/x"}
    assert variables["A"] == "https://me:secret@host/x"
