"""Weights come from the header of a file. No test reads a model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zerotune.trial_lib.plan.simulate import checkpoint_headers
from zerotune.trial_lib.rank.patching import installed

_GIGABYTES = 24


@pytest.fixture
def faked():
    """Installs the replacements for one test, and puts the originals back."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def make(shape, dtype):
        with fakes:
            return torch.empty(tuple(shape), dtype=dtype)

    mode = SimpleNamespace(empty_on_host=make, fakes=fakes, ends_with=lambda error: None)
    with installed(checkpoint_headers.PATCHES, mode):
        yield


def _write_without_numbers(path: Path) -> None:
    """Writes a file that says it has gigabytes, and has a hole in their place."""
    rows = _GIGABYTES * 2**30 // (2 * 4096)
    table = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [0, rows * 4096 * 2]},
        "steps": {"dtype": "I64", "shape": [2], "data_offsets": [rows * 4096 * 2, rows * 4096 * 2 + 16]},
    }
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 4096 * 2)
        file.seek(0, 2)
        file.write((7).to_bytes(8, "little") + (9).to_bytes(8, "little"))


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_a_large_file_is_not_read(faked, tmp_path):
    path = tmp_path / "model.safetensors"
    _write_without_numbers(path)
    before = _read_bytes()
    loaded = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        part = file.get_slice("weight")[:10]
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["steps", "weight"]
    assert _read_bytes() - before < 2**20
    assert isinstance(loaded["weight"], FakeTensor)
    assert loaded["weight"].nbytes == _GIGABYTES * 2**30
    assert loaded["weight"].dtype == torch.bfloat16
    assert part.shape == (10, 4096)


def test_small_whole_numbers_are_read(faked, tmp_path):
    path = tmp_path / "model.safetensors"
    _write_without_numbers(path)
    assert safetensors.torch.load_file(path)["steps"].tolist() == [7, 9]


def test_a_file_that_is_none_is_named(faked, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        safetensors.torch.load_file(path)


def test_a_pickle_of_weights_is_not_read_and_keeps_its_shared_tensors(faked, tmp_path):
    path = tmp_path / "weights.bin"
    weight = torch.zeros(2048, 4096)
    torch.save({"model": {"embedding": weight, "head": weight, "bias": torch.zeros(3)}, "step": 3}, path)
    before = _read_bytes()
    loaded = torch.load(path)
    assert _read_bytes() - before < 2**20
    assert isinstance(loaded["model"]["embedding"], FakeTensor)
    assert loaded["model"]["embedding"].shape == (2048, 4096)
    assert loaded["model"]["head"] is loaded["model"]["embedding"]
    assert loaded["step"] == 3


def test_a_pickle_of_data_stays_real(faked, tmp_path):
    path = tmp_path / "tokens.pt"
    torch.save({"tokens": torch.arange(2**22)}, path)
    assert torch.load(path)["tokens"][-1].item() == 2**22 - 1


def test_a_model_of_several_files_comes_from_their_headers(faked, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for shard in tmp_path.glob("*.safetensors"):
        _drop_numbers(shard)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(isinstance(each.data, FakeTensor) for each in model.parameters())
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def _drop_numbers(path: Path) -> None:
    with path.open("rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        file.truncate(8 + length)
