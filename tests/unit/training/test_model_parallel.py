import pytest
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)

from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError
from zerotune.trial_lib.training.model_parallel import ModelParallelUnit, data_parallel_unit, pipeline_unit


def units(topology, dimensions):
    """Returns the unit of each rank, from DeepSpeed's own grid without its process groups."""
    made = []
    for rank in range(topology.world_size()):
        grid = PipelineParallelGrid.__new__(PipelineParallelGrid)
        grid.global_rank, grid._topo = rank, topology
        grid.pipe_parallel_size, grid.data_parallel_size = dimensions
        grid.data_parallel_id = grid.get_data_parallel_id()
        made.append(pipeline_unit(grid))
    return made


def test_a_unit_is_readable_as_attributes():
    unit = ModelParallelUnit(1, 2, False, True)
    assert unit == ModelParallelUnit(
        data_parallel_rank=1, data_parallel_world_size=2, should_report_metrics=False, should_build_data_loader=True
    )
    assert (unit.data_parallel_rank, unit.data_parallel_world_size) == (1, 2)
    assert unit.should_report_metrics is False
    assert unit.should_build_data_loader is True


@pytest.mark.parametrize("builds", [True, False])
def test_both_spellings_say_whether_a_rank_builds_its_loaders(builds):
    for spelling in ("should_build_data_loader", "should_build_dataloader"):
        unit = ModelParallelUnit(0, 1, True, **{spelling: builds})
        assert unit.should_build_data_loader is unit.should_build_dataloader is builds


def test_both_spellings_at_once_are_refused():
    with pytest.raises(TypeError, match=r"both should_build_data_loader and should_build_dataloader.*give one of them"):
        ModelParallelUnit(0, 1, True, should_build_data_loader=True, should_build_dataloader=True)


def test_neither_spelling_is_refused():
    with pytest.raises(TypeError, match="give should_build_data_loader"):
        ModelParallelUnit(0, 1, True)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_of_the_replicas_is_refused(rank, size):
    with pytest.raises(InvalidTrialError, match=f"data_parallel_rank={rank} of data_parallel_world_size={size}"):
        ModelParallelUnit(rank, size, True, True)


def test_a_data_parallel_rank_is_a_replica_that_reads_data_and_reports():
    assert data_parallel_unit(DistributedContext(rank=2, size=4)) == ModelParallelUnit(2, 4, True, True)


def test_the_first_and_last_stage_of_a_pipeline_read_data_and_the_last_one_reports():
    found = units(PipeDataParallelTopology(num_pp=3, num_dp=2), (3, 2))
    assert found == [
        ModelParallelUnit(0, 2, False, True),
        ModelParallelUnit(1, 2, False, True),
        ModelParallelUnit(0, 2, False, False),
        ModelParallelUnit(1, 2, False, False),
        ModelParallelUnit(0, 2, True, True),
        ModelParallelUnit(1, 2, True, True),
    ]


def test_a_pipeline_of_one_stage_reads_data_and_reports():
    assert units(PipeDataParallelTopology(num_pp=1, num_dp=1), (1, 1)) == [ModelParallelUnit(0, 1, True, True)]


def test_each_replica_reports_once_where_its_layers_are_sliced():
    found = units(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2), (2, 2))
    assert len(found) == 8
    assert all(unit.should_build_data_loader for unit in found)
    assert [unit.data_parallel_rank for unit in found if unit.should_report_metrics] == [0, 1]
