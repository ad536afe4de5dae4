"""How much of a corpus of secrets reaches MLflow and Prefect, as a command, in a configuration, or in a sentence."""

import json
import random
import re
import shlex
import string
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, sent_command, sent_document, sent_text, sent_words
from zerotune.trial_lib.messages.secrets import without_random

CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text())


def sent(where: str, text: str, folder: Path) -> str:
    """Returns what leaves the folder of a text that stands in a command, the environment, a YAML, or a sentence."""
    if where == "command":
        words = shlex.split(text)
        document = KnownSecrets.within({"command": words}).hide_in(sent_document({"command": words}, folder))
        return json.dumps(document)
    if where == "setting":
        return json.dumps(KnownSecrets.within(json.loads(text)).hide_in(json.loads(text)))
    return KnownSecrets.within().hide(sent_text(text))


def missed(items: list[dict[str, Any]], folder: Path) -> list[str]:
    """Returns the items of which any part of a secret is sent."""
    return [
        each["text"]
        for each in items
        if any(secret in sent(each["where"], each["text"], folder) for secret in each["secrets"])
    ]


CHARACTERS = {
    "b62": string.ascii_letters + string.digits,
    "hex": "0123456789abcdef",
    "up": string.ascii_uppercase + string.digits,
    "num": string.digits,
}


def lines(name: str) -> list[str]:
    """Returns lines in public tools' formats. `{hex:40}` stands for that many characters at random."""
    drawn = random.Random(56)

    def random_text(found: re.Match[str]) -> str:
        return "".join(drawn.choices(CHARACTERS[found[1]], k=int(found[2])))

    text = Path(__file__).with_name("lines").joinpath(name).read_text()
    return re.sub(r"\{(b62|hex|up|num):(\d+)\}", random_text, text).splitlines()


def leaks(where: str, line: str, folder: Path) -> bool:
    """Returns whether a secret, or eight characters of it in a row, are sent of a line. It stands between « and »."""
    shown = sent(where, line.replace("«", "").replace("»", ""), folder)
    secrets = re.findall("«(.*?)»", line)
    return any(each in shown or any(each[at : at + 8] in shown for at in range(len(each) - 7)) for each in secrets)


@pytest.mark.parametrize(("kind", "secrets", "harmless"), [("", (2, 80), (0, 64)), ("unseen_", (4, 29), (6, 21))])
def test_the_published_figures_on_lines_by_another_hand(
    kind: str, secrets: tuple[int, int], harmless: tuple[int, int], tmp_path: Path
) -> None:
    found = [leaks("sentence", line, tmp_path) for line in lines(f"{kind}secrets.txt")]
    typed = [line for line in lines(f"{kind}secrets.txt") if re.match(r"(\w+=\S+ )*python ", line)]
    found += [leaks("command", line, tmp_path) for line in typed]
    assert (sum(found), len(found)) == secrets
    changed = [sent("sentence", line, tmp_path) != line for line in lines(f"{kind}harmless.txt")]
    assert (sum(changed), len(changed)) == harmless


def test_a_number_that_may_be_a_pin_is_sent_of_a_launchers_option_alone(tmp_path: Path) -> None:
    words = (
        "deepspeed --master_port 29513 train.py --door 48213377 --lr 0.00012345 --vocab 65536 --rows 120000 --d=4711"
    )
    shown = words.replace("48213377", "<redacted>").replace("4711", "<redacted>")
    assert sent_words(words.split(), tmp_path) == shown.split()
    assert sent_words(["python", "--door", "9" * 5000], tmp_path) == ["python", "--door", "<redacted>"]


@pytest.mark.parametrize("kind", ["of_the_report", "siblings"])
def test_the_corpus_is_hidden_but_for_what_is_known_to_pass(kind: str, tmp_path: Path) -> None:
    assert missed(CORPUS[kind], tmp_path) == CORPUS["known_to_pass"][kind]


@pytest.mark.parametrize("text", CORPUS["no_secrets"])
def test_what_is_no_secret_is_sent_as_it_is(text: str) -> None:
    assert KnownSecrets.within({"command": ["DB_KEY=status", "CACHE_KEY=hello-deepspeed"]}).hide(text) == text


def test_of_a_command_options_numbers_switches_files_and_launchers_are_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").touch()
    words = "deepspeed --num_gpus 8 train.py --deepspeed_config=ds.json --lr 1e-4 --bf16 true --name hunter2 -ptop"
    shown = (
        "deepspeed --num_gpus 8 train.py --deepspeed_config=ds.json --lr 1e-4 --bf16 true --name <redacted> <redacted>"
    )
    assert sent_words(words.split(), tmp_path) == shown.split()
    text = f"# To train.\ncd {tmp_path} && X=abc {words}"
    assert sent_command(text, tmp_path) == f"cd {tmp_path} && X=<redacted> {shown}"
    assert sent_words(["python", "-m", "package.train", "layers=4", "note=abc"], tmp_path)[2:] == [
        *("package.train", "layers=4", "note=<redacted>")
    ]


def test_a_command_in_a_sentence_is_found() -> None:
    note = "bash run.sh starts `torchrun train.py --who me`. Then open `mlflow ui --port 5`."
    assert sent_text(note) == (
        "bash run.sh starts `torchrun train.py --who <redacted>`. Then open `mlflow ui --port 5`."
    )


def test_the_folder_of_the_study_is_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "project-7"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = f"see {Path.cwd()}/zerotune-studies"
    assert KnownSecrets.within({"token": "project-7"}).hide(text) == text


def test_a_hash_in_a_path_names_a_file() -> None:
    path = "/root/.cache/hub/models--gpt2/snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e/config.json"
    assert without_random(path, "-") == path
    assert without_random("X-Amz-Signature=607a30d783dfa663caf39e06633721c8d4cfcd7e", "-") == "X-Amz-Signature=-"
