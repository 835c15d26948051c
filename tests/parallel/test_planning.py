"""The thread that plans ahead: whatever the search does, all ranks of a replica run one plan, in time."""

import dataclasses
import math
import random
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from mmtrain.config.config import uses_fsdp
from mmtrain.config.planner import PlannerConfig, SearchConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import DataError, PlanError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.planning import PlanAhead, PlanStatus
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.partition.partition import partition
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import search_options, search_seed
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check as check_plan
from mmtrain.schedule.simulate import simulate
from mmtrain.spec.builders import model_spec
from tests.parallel.parity import MIXED, check, compare, run_step, take_gradients
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import TRAINING, make_batch, model_config, reference_gradients
from tests.searches import FAULTS, Claimed, Faulty, random_plan, random_search

SEED = 11
SECTION = PlannerConfig(enable=True, search=SearchConfig(budget_evaluations=20, threads=1))
CPU = torch.device("cpu")


def never() -> bool:
    return False


def make_planner(shape: JobLayout, section: PlannerConfig = SECTION, schedule: str = "interleave") -> IterationPlanner:
    spec = model_spec(model_config())
    parts = partition(spec, shape.pp, {"vision": 1, "language": 1}, reference_sizes(spec, TRAINING.seq_len))
    return IterationPlanner(Job(
        spec=spec, partition=parts, section=section, costs=FlopsCosts.of(section), schedule=CATALOGUE[schedule],
        sub_microbatch_size=1, sharded=uses_fsdp(shape, TRAINING), check_plans=True,
    ))  # fmt: skip


def metas(count: int) -> list[IterationMeta]:
    """Batches that differ."""
    rng = random.Random(5)
    images = [[[rng.randint(0, 3) for _ in range(rng.randint(1, 2))] for _ in range(3)] for _ in range(count)]
    return [make_batch(model_config(), batch, seed=number)[1] for number, batch in enumerate(images)]


# ------------------------------------------------------------------------------------ faults of a search


def first_hashes(planner: IterationPlanner, batches: Sequence[IterationMeta]) -> list[int]:
    iterations = [planner.prepare(meta, searched=True) for meta in batches]
    return [planner.finish(iteration, iteration.first).program.hash for iteration in iterations]


def run_faults(rank, fault):
    """Steps 1 to 5, the second of them with a fault: (statuses, which plans are first plans, all hashes, seconds)."""
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    planner, batches = make_planner(mesh.layout), metas(5)
    ahead = PlanAhead(planner, mesh, seed=SEED, search=Faulty(SEED, {2: fault}))
    patience = 0.7 if fault in ("late", "stubborn") else 30.0
    pending = [ahead.submit(1, batches[0])]
    found, seconds = [], []
    for step in range(1, 6):
        if step < 5:
            pending.append(ahead.submit(step + 1, batches[step]))
        start = time.monotonic()
        found.append(ahead.take(pending[step - 1], patience))
        seconds.append(time.monotonic() - start)
        time.sleep(2.0 if step == 3 and fault == "stubborn" else 0.02)  # the step itself
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "plan-ahead"]
    hashes = [planned.plan.program.hash for planned in found]
    firsts = [a == b for a, b in zip(hashes, first_hashes(planner, batches), strict=True)]
    assert ahead.counts == {status: [p.status for p in found].count(status) for status in {p.status for p in found}}
    return [planned.status for planned in found], firsts, hashes, seconds


OF_FAULT = {
    "crash": PlanStatus.FAILED, "memory": PlanStatus.FAILED, "nothing": PlanStatus.FAILED,
    "nonsense": PlanStatus.FAILED, "late": PlanStatus.TIMED_OUT, "stubborn": PlanStatus.TIMED_OUT,
    "slow": PlanStatus.READY,
}  # fmt: skip


def run_all_faults(rank):
    return {fault: run_faults(rank, fault) for fault in FAULTS}


@pytest.fixture(scope="module")
def outcomes():
    """[rank] -> fault -> what `run_faults` returned."""
    return run_ranks(run_all_faults, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_search_that_goes_wrong_costs_its_step_alone(outcomes, fault):
    (statuses, firsts, hashes, seconds), (other_statuses, _, other_hashes, _) = (rank[fault] for rank in outcomes)
    assert (statuses, hashes) == (other_statuses, other_hashes)
    wrong = OF_FAULT.get(fault, PlanStatus.INVALID)
    # A search that does not listen holds up the next one, which is not waited for.
    assert statuses == [
        PlanStatus.READY,
        wrong,
        wrong if fault == "stubborn" else PlanStatus.READY,
        PlanStatus.READY,
        PlanStatus.READY,
    ]
    assert firsts == [status is not PlanStatus.READY for status in statuses]
    if wrong is PlanStatus.TIMED_OUT:
        assert 0.7 <= seconds[1] < 1.7
        assert seconds[2] < 0.7 or fault == "late"


def all_forwards_first(problem, options, *, cancelled):
    """A search that does not look at memory."""
    return Claimed(problem=problem, status="improved", message="", plan_or_none=CATALOGUE["GPipe"].make(problem))


def run_over_the_limit(rank):
    """Statuses of a plan that holds more than each rank may, without and with the limit."""
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    meta = make_batch(model_config(), [[1]] * 6, seed=1)[1]
    found = []
    gib = 0.0
    for _ in range(2):
        planner = make_planner(mesh.layout, SECTION.with_search(activation_memory_gib=gib))
        ahead = PlanAhead(planner, mesh, seed=SEED, search=all_forwards_first)
        planned = ahead.take(ahead.submit(1, meta))
        ahead.close()
        found.append(planned.status)
        gib = 0.6 * max(planned.plan.result.timeline.peak_bytes) / 2**30
    return found


@pytest.mark.ranks
def test_a_plan_over_the_memory_limit_does_not_run():
    assert run_ranks(run_over_the_limit, 2) == [[PlanStatus.READY, PlanStatus.INVALID]] * 2


# -------------------------------------------------------------------------------- errors of an iteration


def run_errors(rank):
    """What is raised on this rank by a batch that is wrong, and by one that fits nowhere; then all goes on."""
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    good = metas(1)[0]
    empty = IterationMeta(microbatches=(MicrobatchMeta(documents=()),))
    found = []
    tight = SECTION.with_search(activation_memory_gib=1e-9)
    for section, meta, error in ((SECTION, empty, DataError), (tight, good, PlanError)):
        ahead = PlanAhead(make_planner(mesh.layout, section), mesh, seed=SEED, search=random_search)
        with pytest.raises(error) as caught:
            ahead.take(ahead.submit(1, meta))
        found.append(str(caught.value))
        if section is SECTION:
            assert ahead.take(ahead.submit(2, good)).status is PlanStatus.READY
        ahead.close()
    return found


@pytest.mark.ranks
def test_errors_of_an_iteration_are_raised_on_every_rank():
    one, two = run_ranks(run_errors, 2)
    assert one == two
    assert "microbatch 0 has no document" in one[0]
    assert "over the memory limit" in one[1]


def run_out_of_step(rank):
    """The two threads of a replica disagree on what they plan: statuses, and what is logged."""
    from mmtrain.parallel import planning

    warned = []
    planning.logger.warning = lambda text, *args: warned.append(text % args)
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    planner, batches = make_planner(mesh.layout), metas(3)
    ahead = PlanAhead(planner, mesh, seed=SEED, search=random_search)
    found = [ahead.take(ahead.submit(1 + 6 * rank, batches[0]), None)]
    found += [ahead.take(ahead.submit(step, batches[step - 1])) for step in (2, 3)]
    ahead.close()
    assert [planned.plan.program.hash for planned in found] == first_hashes(planner, batches)
    return [planned.status for planned in found], warned


@pytest.mark.ranks
def test_threads_that_cannot_agree_stop_searching_and_not_the_job():
    (statuses, leader), (others, other) = run_ranks(run_out_of_step, 2)
    assert statuses == others == [PlanStatus.BROKEN] * 3
    assert leader == []
    assert [text.split(": ", 1)[1] for text in other] == [
        "the ranks of the replica cannot exchange plans any more: PlanError: a plan of step 1 was received for step 7"
    ]


# --------------------------------------------------------------------------------- several searching ranks


@dataclasses.dataclass
class Noted:
    """Draws a plan, and remembers its options. One rank's search fails."""

    broken_seed: int = -1
    options: list = dataclasses.field(default_factory=list)

    def __call__(self, problem, options, *, cancelled):
        self.options.append(options)
        if options.seed == self.broken_seed:
            raise RuntimeError("broken")
        return random_search(problem, options, cancelled=cancelled)


def run_distributed(rank, broken):
    mesh = build_mesh(JobLayout.grid(pp=4), CPU)
    section = SECTION.with_search(distributed=True, budget_evaluations=10)
    planner, batches = make_planner(mesh.layout, section), metas(3)
    noted = Noted(search_seed(SEED, 2, broken))
    ahead = PlanAhead(planner, mesh, seed=SEED, search=noted)
    found = [ahead.take(ahead.submit(step, meta)) for step, meta in enumerate(batches, 1)]
    ahead.close()
    wanted = []
    for step, meta in enumerate(batches, 1):
        problem = planner.problem(meta, searched=True)[1]
        drawn = []
        for member in range(4):
            plan = random_plan(problem, random.Random(search_seed(SEED, step, member)))
            valid = (step, member) != (2, broken)
            drawn.append((simulate(problem, plan).makespan_s if valid else math.inf, member, plan))
        wanted.append(str(min(drawn, key=lambda one: one[:2])[2]))
    assert [str(planned.plan.result.plan) for planned in found] == wanted
    assert [planned.evaluations for planned in found] == [4, 3, 4]
    return [options.seed for options in noted.options], {options.budget_evaluations for options in noted.options}


@pytest.mark.ranks
def test_the_best_of_all_ranks_plans_counts():
    ranks = run_ranks(run_distributed, 4, 3)
    assert [seeds for seeds, _ in ranks] == [
        [search_seed(SEED, step, member) for step in (1, 2, 3)] for member in range(4)
    ]
    assert all(budget == {3} for _, budget in ranks)  # of 10, shared by 4


# ------------------------------------------------------------------------------------------- end of a job


def run_close(rank):
    """Seconds that it takes to leave while a search runs and another one waits."""
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    ahead = PlanAhead(make_planner(mesh.layout), mesh, seed=SEED, search=Faulty(SEED, {1: "late"}))
    for step, meta in enumerate(metas(2), 1):
        ahead.submit(step, meta)
    time.sleep(0.2)
    start = time.monotonic()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "plan-ahead"]
    return time.monotonic() - start


@pytest.mark.ranks
def test_a_job_leaves_while_a_search_runs():
    assert max(run_ranks(run_close, 2)) < 2.0


# ------------------------------------------------------------------------------------ plans that come out


def run_threads(rank):
    """Hashes of the plans of the search itself, by 1 and by 3 threads."""
    mesh = build_mesh(JobLayout.grid(pp=2), CPU)
    found = []
    for threads in (1, 3):
        section = SECTION.with_search(threads=threads)
        ahead = PlanAhead(make_planner(mesh.layout, section), mesh, seed=SEED, search=search)
        found.append([ahead.take(ahead.submit(step, meta)).plan.program.hash for step, meta in enumerate(metas(4), 1)])
        ahead.close()
    return found


@pytest.mark.ranks
def test_plans_do_not_depend_on_the_number_of_threads():
    one, two = run_ranks(run_threads, 2)
    assert one == two and one[0] == one[1]


@dataclasses.dataclass(frozen=True)
class Searching(IterationPlanner):
    """Plans an iteration as a searching rank and its peers do."""

    options: SearchOptions = dataclasses.field(kw_only=True)
    drawn: bool = dataclasses.field(kw_only=True)
    """Any plan at all, and not one that was searched."""

    def plan(self, meta: IterationMeta, *, forward_only: bool = False) -> IterationPlan:
        iteration = self.prepare(meta, searched=True)
        find = random_search if self.drawn else make_plan
        result = find(iteration.problem, self.options, cancelled=never)
        check_plan(result.plan, iteration.problem)
        return self.finish(iteration, result)


def run_gradients(rank, shape, cases):
    """(case, drawn) -> errors against one process."""
    model = model_config()
    mesh, found = build_mesh(shape, CPU), {}
    base = make_planner(shape).job
    local = build_local_model(model, base.spec, base.partition, mesh, TRAINING, seed=5)
    runtime = PipelineScheduleRuntime(local.stages)
    for number, (images, size, plan_seed) in enumerate(cases):
        batches = [make_batch(model, images, seed=replica + 1 + number) for replica in range(shape.dp)]
        wanted_loss, wanted = reference_gradients(model, base.spec, batches, seed=5)
        for drawn in (False, True):
            options = search_options(SECTION, seed=plan_seed + mesh.dp_rank, threads=1)
            job = dataclasses.replace(base, sub_microbatch_size=size)
            planner = Searching(job, options=options, drawn=drawn)
            loss = run_step(mesh, base.partition, planner, model, local, runtime, batches)
            found[number, drawn] = compare(mesh, base.partition, local, loss, wanted_loss, wanted)
            take_gradients(local)
    return found


def drawn_cases(count: int):
    """Random batches: (images of each document of each microbatch, images in a work, seed of the plan)."""
    cases = []

    @seed(1)
    @settings(max_examples=count, database=None, phases=[Phase.generate])
    @given(
        st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5),
        st.integers(0, 3),
        st.integers(0, 1000),
    )
    def draw(images, size, plan_seed):
        cases.append((images, size, plan_seed))

    draw()
    assert len(cases) >= count
    return cases


SHAPES = [JobLayout.grid(pp=2), JobLayout.grid(pp=4), JobLayout.grid(pp=2, dp_shard=2)]


@pytest.mark.ranks
@pytest.mark.parametrize("shape", SHAPES, ids=["pp2", "pp4", "pp2-shard2"])
def test_any_plan_gives_the_gradients_of_one_process(shape):
    cases = [(MIXED[0], 1, 0), *drawn_cases(2)]
    check(run_ranks(run_gradients, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("shape", SHAPES, ids=["pp2", "pp4", "pp2-shard2"])
def test_many_plans_give_the_gradients_of_one_process(shape):
    check(run_ranks(run_gradients, shape.world_size, shape, drawn_cases(60), timeout=1200), TOLERANCE)
