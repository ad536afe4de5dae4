"""What a plan says of layouts, judged by launches."""

from benchmarks.replay.grids import GRIDS, read_worlds
from benchmarks.replay.layouts import judged, summed_up
from tests.unit.replay.test_grids import launch


def _grid(of_one, of_two):
    ran = {1: of_one, 2: of_two, 4: 20.0}
    return [
        launch(tensor=tensor, size=size, samples_per_s=ran[tensor] * size / (size + 1))
        for tensor in (1, 2, 4)
        for size in (1, 2)
    ]


def test_a_list_that_has_the_fastest_first_loses_nothing() -> None:
    right, wrong = judged(_grid(80.0, 50.0)), judged(_grid(50.0, 80.0))
    assert (right["regret_of_first"], wrong["regret_of_first"]) == (0.0, 0.375)
    assert right["regret_of_named"] == wrong["regret_of_named"] == 0.0
    assert right["order_of_launches"] > wrong["order_of_launches"]
    both = summed_up([right, wrong])
    assert both["said_to_fit"] == [12, 12]
    assert both["regret_of_first"] == [0.188, 0.188, 0.375, 0.0]


def test_a_failed_launch_that_is_named_counts() -> None:
    rows = _grid(80.0, 50.0)
    failed = [{**row, "outcome": "out_of_memory"} if row["tensor_parallel"] == 1 else row for row in rows]
    found = judged(failed)
    assert found["named_failed"] == 1
    assert found["said_to_fit"] == [4, 6]
    assert found["regret_of_first"] == 1.0


def test_a_world_that_nothing_was_found_on_is_foreseen_on_one_host() -> None:
    """The order of layouts and the speed of the Ultra-Scale Playbook's 8 B on eight devices."""
    found = judged(next(rows for key, rows in read_worlds(GRIDS).items() if key[0].startswith("Llama 8B")))
    assert found["hosts"] == 1
    assert found["speed_error"] < 0.15
    assert found["regret_of_named"] == 0.0
    assert found["order_of_layouts"] > 0.8
