"""What others have published for trainings like the user's, beside an answer on GPUs. No GPU measured these trials."""

from typing import Any

import pytest

from zerotune.trial_lib.device.data_sheets import peak_flops
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialDevice, TrialResult
from zerotune.trial_lib.study.published import own_training, published, published_for

PARAMETERS, LENGTH, TOKENS = 6_700_000_000, 2048, 80_000.0


def answer(model: str = "NVIDIA A100-SXM4-80GB", ranks: int = 8, dtype: str = "bfloat16", **more: float) -> TrialResult:
    flops = 6.2 * PARAMETERS * TOKENS / ranks
    peak = peak_flops(model, dtype, 1.0)
    metrics = {"throughput": TOKENS / LENGTH, "tokens_per_second": TOKENS, "FLOPS_per_gpu": flops}
    if peak is not None:
        metrics["mfu"] = flops / peak
    return TrialResult(
        trial_id="study-0009",
        number=9,
        purpose=Purpose.CONFIRM,
        config_hash="9",
        outcome=Outcome.COMPLETED,
        metrics={**metrics, **more},
        memory=Memory(peak=[1] * ranks),
        devices=[TrialDevice(device=str(rank), model=model) for rank in range(ranks)],
    )


def profile(trained: int = PARAMETERS) -> ModelProfile:
    sizes: dict[str, Any] = {
        "activation_mem_per_gpu": 1,
        "gpu_mem": 1,
        "data_parallel_size": 8,
        "flops_per_sample": 1.0,
    }
    return ModelProfile(num_params=PARAMETERS, trainable_num_params=trained, **sizes)


def test_an_answer_on_gpus_has_the_published_figures_of_its_like_beside_it() -> None:
    own = own_training(answer(), profile())
    assert own is not None
    assert (own.device, own.devices, own.length) == ("A100", 8, LENGTH)
    alike = [each for each in published() if each.is_like(own)]
    assert alike
    assert all(each.device == "A100" and 0.5 <= each.parameters / PARAMETERS <= 2 for each in alike)
    said = published_for(own)
    assert f"Your MFU is {100 * own.mfu:.0f} %" in said
    assert alike[0].source in said


@pytest.mark.parametrize(
    ("result", "model"),
    [
        (answer("AMD Ryzen"), profile()),
        (answer("NVIDIA A100-SXM4-80GB MIG 3g.40gb", mfu=0.9), profile()),
        (answer(dtype="tf32"), profile()),
        (answer(tokens_per_second=0.0), profile()),
        (answer(), profile(trained=1_000_000)),
        (answer(), None),
    ],
    ids=["no known device", "slice of a device", "32 bits", "no tokens", "adapters", "no profile"],
)
def test_a_training_of_another_kind_is_not_compared(result: TrialResult, model: ModelProfile | None) -> None:
    assert own_training(result, model) is None
    assert not published_for(None)


def test_where_nothing_alike_is_published_nothing_is_said() -> None:
    own = own_training(answer("NVIDIA L4"), profile())
    assert own is not None
    assert not published_for(own)


def test_the_table_has_trainings_that_are_possible_and_a_shared_row_fits_it() -> None:
    rows = published()
    assert len(rows) == len({row.row() for row in rows}) > 50
    assert all(0.0 < row.mfu < 0.8 and row.source for row in rows)
    own = own_training(answer(), profile())
    assert own is not None
    assert own.row() == f"zerotune share,,{PARAMETERS},{round(6.2 * PARAMETERS)},{LENGTH},A100,8,{TOKENS:.0f}"
