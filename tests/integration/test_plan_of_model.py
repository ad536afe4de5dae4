"""`zerotune plan --model`: the program that it writes trains, and is planned, for each kind of model."""

import json
import os
import subprocess
import sys

import pytest

from tests.study_fixtures import Zerotune
from zerotune.trial_lib.plan.plan_record import PlanArguments, PlanPaths, PlanRecord
from zerotune.trial_lib.study.model_program import with_program

pytestmark = pytest.mark.long

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
MODELS = {
    "decoder": ("LlamaConfig", {**SMALL, "vocab_size": 500, "num_key_value_heads": 2}),
    "encoder": ("BertConfig", {**SMALL, "vocab_size": 500}),
    "encoder-decoder": (
        "T5Config",
        {"vocab_size": 500, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
    "vision": ("ViTConfig", {**SMALL, "image_size": 32, "patch_size": 8}),
    "speech": (
        "WhisperConfig",
        {
            "vocab_size": 500,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "max_source_positions": 64,
            **HEADS,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        },
    ),
}


def configuration(kind):
    # Here, because every worker imports every file of tests.
    import transformers

    name, settings = MODELS[kind]
    return json.dumps(getattr(transformers, name)(**settings).to_dict())


def written(kind, folder):
    (folder / f"{kind}.json").write_text(configuration(kind))
    return with_program(PlanArguments(model=folder / f"{kind}.json"), folder).model_dir


@pytest.mark.parametrize("kind", MODELS)
def test_the_program_trains_without_zerotune(kind, tmp_path):
    words = "--use_cpu --max_steps 2 --output_dir out --report_to none --save_strategy no --length 16 --logging_steps 1"
    trained = subprocess.run(
        [sys.executable, "train.py", *words.split(), "--per_device_train_batch_size", "2"],
        cwd=written(kind, tmp_path),
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert trained.returncode == 0, trained.stderr
    assert "'train_loss'" in trained.stdout


def test_an_unknown_architecture_is_one_sentence(tmp_path):
    (tmp_path / "new.json").write_text('{"model_type": "megamodel"}')
    folder = with_program(PlanArguments(model=tmp_path / "new.json"), tmp_path).model_dir
    ended = subprocess.run(
        [sys.executable, "train.py", "--output_dir", "out"], cwd=folder, text=True, capture_output=True
    )
    assert "has no architecture 'megamodel'" in ended.stderr.splitlines()[-1]


def test_a_model_is_planned_with_layouts_and_hours_and_its_program_stays(tmp_path, tmp_path_factory):
    zerotune = Zerotune(tmp_path, tmp_path_factory.mktemp("home"))
    (tmp_path / "tiny.json").write_text(configuration("decoder"))
    words = ("--model", "tiny.json", "--on", "h100-80gb:2", "-z", "1", "--layouts", "--whole", "1e6tokens")
    ended = zerotune.run("plan", *words, "--price", "h100-80gb=3", "--", "--length", "64")
    assert ended.returncode == 0, ended.stderr
    (root,) = (tmp_path / "zerotune-plans").iterdir()
    assert root.name.startswith("tiny-")
    record = PlanRecord.model_validate_json(PlanPaths(root).record.read_text())
    assert record.tokens == 64
    assert record.whole is not None
    assert {row.devices for row in record.whole.rows} >= {"h100-80gb:1", "h100-80gb:2"}
    assert {(each.tensor, each.replicas) for each in record.devices[0].layouts} == {(1, 2), (2, 1)}
    assert (root / "program" / "train.py").is_file()
    assert f"cd {root / 'program'}" in record.best_command
