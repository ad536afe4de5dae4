import pytest

from benchmarks.foresee.public_gpus.model_of_row import read_rows
from benchmarks.foresee.public_gpus.row_facts import facts_of, memory_kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("max allocated; max reserved 22.78 GiB", "allocated"),
        ("max allocated (DeepSpeed timer, GiB)", "allocated"),
        ("peak active (torch allocator), GiB", "allocated"),
        ("peak reserved (torchtitan metric), max over GPUs", "reserved"),
        ("nvidia-smi, worst rank, whole GB", "shown"),
        ('stated "GB per GPU" (nvidia-smi likely)', "shown"),
        ("nvidia-smi (caching allocator filled the card): upper bound only", "upper bound"),
        ("allocated at failure", "allocated at failure"),
        ("stated G per GPU", "unknown"),
    ],
)
def test_the_words_of_a_source_name_a_kind_of_memory(words: str, kind: str) -> None:
    assert memory_kind(words) == kind


def test_a_failed_runs_memory_is_that_of_its_failure() -> None:
    words = "PyTorch allocated at the moment; reserved 30.46"
    assert memory_kind(words, "out_of_memory") == "allocated at failure"


@pytest.mark.parametrize(
    ("note", "loss"),
    [
        ("Liger kernels on", "fused"),
        ("fused cross-entropy", "fused"),
        ("with fused linear cross entropy", "fused"),
        ("chunked CE loss", "chunked"),
        ("no LM head (value head)", "value head"),
        ("fused kernels", None),
    ],
)
def test_a_note_names_the_loss(note: str, loss: str | None) -> None:
    assert facts_of({"note": note, "framework": "HF"}).get("loss") == loss


def test_a_note_names_adapters_beside_the_training_of_all_weights() -> None:
    words = "default script (lora_dim 128 added on top of full training)"
    assert facts_of({"note": words, "framework": "HF"})["lora"] == 128
    assert "lora" not in facts_of({"note": "LoRA alone", "framework": "HF"})


def test_rows_that_have_their_facts_stay_as_they_are() -> None:
    rows = read_rows()
    assert [facts_of(row) for row in rows] == rows
