import pytest

from zerotune.trial_lib.messages.secrets import REDACTED, redact, redact_text, secrets_in


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


def test_a_secret_is_left_out_however_deep_it_stands() -> None:
    experiment = {
        "hyperparameters": {"lr": 0.1, "wandb_api_key": "w", "stages": [{"password": 1234}]},
        "environment": {"registry_auth": {"username": "me", "password": "p"}},
        "checkpoint_storage": {"type": "s3", "secret_key": "s"},
    }
    assert redact(experiment) == {
        "hyperparameters": {"lr": 0.1, "wandb_api_key": REDACTED, "stages": [{"password": REDACTED}]},
        "environment": {"registry_auth": {"username": REDACTED, "password": REDACTED}},
        "checkpoint_storage": {"type": "s3", "secret_key": REDACTED},
    }


def test_numbers_that_count_tokens_and_switches_are_no_secrets() -> None:
    values = {"max_tokens": 512, "key_dim": 64, "use_auth_token": True, "token": None}
    assert redact(values) == values


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("HF_TOKEN=hf_abc python3 train.py --lr 1", "HF_TOKEN=<redacted> python3 train.py --lr 1"),
        ("A_KEY='a b' B=1 python3 train.py", "A_KEY=<redacted> B=1 python3 train.py"),
        ("train.py --api-key abc --password=x --lr 1", "train.py --api-key <redacted> --password=<redacted> --lr 1"),
        ("train.py --use_auth_token --tokenizer gpt2", "train.py --use_auth_token --tokenizer gpt2"),
        ("python -u train.py -p configs/base.yaml", "python -u train.py -p configs/base.yaml"),
        ("python -u -mtrain -p configs/base.yaml", "python -u -mtrain -p configs/base.yaml"),
        ("mysql -u root -p windmill77 runs", "mysql -u root -p <redacted> runs"),
        ("train.py --db=postgres://me:pw@host/db --lr 1", "train.py --db=<redacted> --lr 1"),
    ],
)
def test_a_command_keeps_all_but_its_secrets(command: str, shown: str) -> None:
    assert redact_text(command) == shown


def test_a_list_may_hold_assignments_or_the_words_of_a_command() -> None:
    words = ["HF_TOKEN=a b", "LR=1", "python3", "--api-key", "abc", "--tokenizer", "gpt2"]
    shown = ["HF_TOKEN=<redacted>", "LR=1", "python3", "--api-key", "<redacted>", "--tokenizer", "gpt2"]
    assert redact({"entrypoint": words}) == {"entrypoint": shown}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train.py --max_tokens 512 --n_keys=1e3 --lr 1", "train.py --max_tokens 512 --n_keys=1e3 --lr 1"),
        ("train.py --passwd 123456", "train.py --passwd <redacted>"),
        ("curl -H 'Authorization: Bearer abc.def' x", "curl -H 'Authorization: Bearer <redacted>' x"),
        ("X-Api-Key: abc1234", "X-Api-Key: <redacted>"),
        ("the bearer abcdefgh1 was refused", "the bearer <redacted> was refused"),
        ("wandb.init(config={'api_key': 'a\\'b', 'lr': 1})", "wandb.init(config={'api_key': <redacted>, 'lr': 1})"),
        ('{"comet": {"api_key": "abc"}, "n": 1}', '{"comet": {"api_key": <redacted>}, "n": 1}'),
        ("train.py -k 5 -k x7Yp90Qrstu", "train.py -k 5 -k <redacted>"),
        ("login hf_abcdefghijklmnopqrst", "login <redacted>"),
        ("[postgres://me:p/w@host/db, http://host:80/a]", "[<redacted> http://host:80/a]"),
        ("git clone https://0123456789abcdef01@host/x", "git clone <redacted>"),
        ("docker://host:5000/image@sha256:abc", "docker://host:5000/image@sha256:abc"),
        ("http://h:5000/#/runs?viewStateShareKey=m-1", "http://h:5000/#/runs?viewStateShareKey=m-1"),
        ("http://h/?viewStateShareKey=m-1&token=abc", "http://h/?viewStateShareKey=<redacted>"),
        ("Missing keys: lm_head.weight; eos_token: </s>", "Missing keys: lm_head.weight; eos_token: </s>"),
    ],
)
def test_a_text_keeps_all_but_what_looks_like_a_secret(text: str, shown: str) -> None:
    assert redact_text(text) == shown


def test_a_long_word_takes_no_time() -> None:
    for word in ("x" * 200_000, "a/" * 100_000, "key_" * 30_000, "key-" * 2_000 + "=", "://a:b" * 10_000):
        redact_text(word)


def test_what_is_left_out_is_known() -> None:
    values = {"A_TOKEN": "ab1", "entrypoint": ["--key", "de2", "-k", "x7Yp90Qrstu", "B_KEY=gh3"], "max_tokens": "9"}
    assert secrets_in(values) == ["ab1", "de2", "x7Yp90Qrstu", "gh3"]


def test_an_ordinary_word_under_a_name_that_may_be_anything_is_hidden_there_and_nowhere_else() -> None:
    values = {"DB_KEY": "status", "CACHE_KEY": "hello-deepspeed", "A_TOKEN": "open-sesame", "DB_PASS": "status"}
    assert set(redact(values).values()) == {REDACTED}
    assert secrets_in(values) == ["open-sesame"]
