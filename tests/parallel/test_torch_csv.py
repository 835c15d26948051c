"""Our CSV files are read by torch's own classes, and theirs by us."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.schedule.action import COMPUTE, TRANSFERS, WAITS
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.io.torch_csv import read_plan, read_program, write_plan, write_program
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.transport import check_transport

NUM_RANKS, NUM_MICROBATCHES = 4, 8

CLASSES = [
    (ScheduleInterleaved1F1B, "loop"),
    (ScheduleLoopedBFS, "loop"),
    (ScheduleInterleavedZeroBubble, "loop"),
    (ScheduleZBVZeroBubble, "v"),
    (ScheduleDualPipeV, "v"),
]
"""torch's schedules of two stages a rank."""


@pytest.fixture(autouse=True)
def four_ranks():
    """A process group of four ranks without the other three: these classes send nothing here."""
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def stages(placement, num_stages=2 * NUM_RANKS):
    mine = [s for s in range(num_stages) if rank_of(s, placement) == 0]
    return [PipelineStage(nn.Linear(2, 2), s, num_stages, torch.device("cpu")) for s in mine]


def rank_of(stage, placement):
    if placement == "v" and stage >= NUM_RANKS:
        return 2 * NUM_RANKS - 1 - stage
    return stage % NUM_RANKS


def torch_schedule(kind, placement, num_stages=2 * NUM_RANKS):
    return kind(stages(placement, num_stages), n_microbatches=NUM_MICROBATCHES, loss_fn=lambda a, b: (a - b).sum())


@pytest.mark.parametrize(("kind", "placement"), CLASSES, ids=lambda x: getattr(x, "__name__", x))
def test_files_of_torch_are_plans(kind, placement, tmp_path):
    schedule = torch_schedule(kind, placement)
    options = {"format": "compute_only"} if isinstance(schedule, _PipelineScheduleRuntime) else {}
    schedule._dump_csv(str(tmp_path / "plan.csv"), **options)
    plan = read_plan((tmp_path / "plan.csv").read_text())
    assert plan.graph.stage_rank == tuple(rank_of(s, placement) for s in range(2 * NUM_RANKS))
    assert len(plan.graph.works) == NUM_MICROBATCHES
    assert read_plan(write_plan(plan)) == plan


@pytest.mark.parametrize("name", CATALOGUE)
def test_torch_takes_every_schedule_of_ours_and_adds_the_transfers_that_we_add(name, tmp_path):
    schedule = CATALOGUE[name]
    problem = plain_chain(NUM_RANKS, NUM_MICROBATCHES, schedule)
    plan = schedule.make(problem)
    file = tmp_path / "plan.csv"
    file.write_text(write_plan(plan))
    runtime = torch_schedule(_PipelineScheduleRuntime, schedule.placement, len(problem.graph.stage_rank))
    runtime._load_csv(str(file), format="compute_only")
    runtime._dump_csv(str(tmp_path / "program.csv"), format="compute_comms")
    theirs, ours = read_program((tmp_path / "program.csv").read_text()), lower(plan, problem, sharded=True)
    for one, other in zip(theirs.actions, ours.actions, strict=True):
        assert [a for a in one if a.kind in COMPUTE] == [a for a in other if a.kind in COMPUTE]
        assert Counter(a for a in one if a.kind in TRANSFERS) == Counter(a for a in other if a.kind in TRANSFERS)


@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_torch_takes_our_programs(name, tmp_path):
    schedule = CATALOGUE[name]
    problem = plain_chain(NUM_RANKS, NUM_MICROBATCHES, schedule)
    program = lower(schedule.make(problem), problem, sharded=True)
    file = tmp_path / "program.csv"
    file.write_text(write_program(program))
    runtime = torch_schedule(_PipelineScheduleRuntime, schedule.placement, len(problem.graph.stage_rank))
    runtime._load_csv(str(file), format="compute_comms")
    again = read_program(file.read_text())
    check_transport(again)
    assert again.actions == program.actions
    loaded = runtime.pipeline_order_with_comms
    assert [len(loaded[r]) for r in range(NUM_RANKS)] == [
        sum(a.kind not in WAITS for a in actions) for actions in program.actions
    ]


def test_columns_are_the_steps_in_which_torch_matches_neighbours(tmp_path):
    """`PipelineScheduleMulti` receives in one column what a neighbour made in the column before."""
    name = "Interleaved1F1B"
    file = tmp_path / "plan.csv"
    file.write_text(write_plan(CATALOGUE[name].make(plain_chain(NUM_RANKS, NUM_MICROBATCHES, CATALOGUE[name]))))
    schedule = torch_schedule(ScheduleInterleaved1F1B, "loop")
    made = {rank: [a for a in row if a] for rank, row in schedule.pipeline_order.items()}
    schedule._load_csv(str(file))
    loaded = schedule.pipeline_order
    assert {rank: [a for a in row if a] for rank, row in loaded.items()} == made
    column = {(str(action), rank): i for rank, row in loaded.items() for i, action in enumerate(row) if action}
    for (action, _), i in column.items():
        stage, kind, microbatch = action.partition("F") if "F" in action else action.partition("B")
        before = int(stage) - 1 if kind == "F" else int(stage) + 1
        if 0 <= before < 2 * NUM_RANKS:
            assert column[f"{before}{kind}{microbatch}", before % NUM_RANKS] < i
