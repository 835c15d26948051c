"""Emulated devices: what the real runtime executes takes, in virtual time, exactly as long as simulated."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from emulation import (
    EmulatedRuntime,
    HostClock,
    VirtualClock,
    executed_timeline,
    message_shapes,
)

from mmtrain.config import config as config_module
from mmtrain.config.topology import JobLayout
from mmtrain.errors import PlanError
from mmtrain.modality.typical import TypicalSizes
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.iteration import Iteration, IterationPlanner
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import BRAID, COMPUTE, SENDS, Action, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE, ChunkPlacement, Schedule
from mmtrain.schedule.library.names import EAGER_SCHEDULES
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.recipe import Recipe, Rule, Traversal
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw
from tests.ranks import run_ranks
from tests.schedule.problems import as_units, fan_out
from tests.searches import random_plan

RANKS = 4
IMAGES = (2, 0, 3, 1, 0, 4)
"""Vision works of each microbatch."""
MESSAGE_BYTES = 4096.0
"""Of the largest message; the others in proportion."""
PLACED_CHOICES = ((5, 3), (4, 4), (3, 5)), (False, True), ("1F1B", "ZB-H1", "ZB-AutoSchedule", "interleave")
"""Ranks of vision and language, whether images are deferred, schedules."""
DIVIDED = ("1F1B", "ZB-AutoSchedule", "interleave")
"""Schedules of a vocabulary that all ranks divide."""
BRAIDED = ("STP", "STP-lean", "DualPipeV")
RECIPES = {
    "recipe, split": Recipe(in_flight=2 * RANKS, until="W", split_backward=True, overrides={1: Rule(first="forward")}),
    "recipe, lockstep": Recipe(
        first="alternate", units=(2, 1), forward=Traversal("breadth", every=2), backward="depth", clock="lockstep"
    ),
}
SCHEDULES = dict(CATALOGUE) | {
    name: Schedule(idea="", make=partial(plan_of, recipe), splits_backward=recipe.split_backward)
    for name, recipe in RECIPES.items()
}


@dataclass(frozen=True, kw_only=True)
class Case:
    problem: PlanningProblem
    plan: Plan
    program: Program | None = None
    """What is executed; None: the plan."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What one rank did."""

    rows: tuple
    losses: dict[int, float]
    weight_grads: dict[int, float]


# ------------------------------------------------------------------------------------------ problems


def two_modules(
    *,
    placement: ChunkPlacement = "loop",
    segments: tuple[int, int] = (2, 1),
    frozen: int = 0,
    options: int = 1,
    one_v: bool = False,
) -> PlanningProblem:
    """Vision before language, text-only microbatches, no two works or stages alike, transfers that take their time.

    Args:
        frozen: first stages of vision without a backward.
        options: of each stage and work, for plans to choose.
        one_v: both modules are one V, vision on the first rank and a half.
    """
    rng = random.Random(7)
    down = list(range(RANKS))
    counts = (2, 2) if placement == "v" else segments
    turn = down + down[::-1] if placement == "v" else down
    stage_rank = [turn[k % len(turn)] for count in counts for k in range(RANKS * count)]
    border = RANKS * counts[0]
    if one_v:
        stage_rank, border = [0, 1, *down[1:], *down[::-1]], 2
    works: list[Work] = []
    for m, count in enumerate(IMAGES):
        first = len(works)
        works += [Work(module=0, microbatch=m, sub_microbatch=i) for i in range(count)]
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=tuple(range(first, first + count))))
    costs, cost_index = [], []
    for work in works:
        stages = range(border) if work.module == 0 else range(border, len(stage_rank))
        cost_index.append([len(costs) + k for k in range(len(stages))])
        costs += [_options(rng, work.module == 1 or stage >= frozen, options) for stage in stages]
    return PlanningProblem.build(
        num_ranks=RANKS,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(border))),
            ModuleStages(name="language", stages=tuple(range(border, len(stage_rank)))),
        ],
        stage_rank=stage_rank,
        works=works,
        costs=costs,
        cost_index=cost_index,
        output_bytes=[[rng.uniform(0, 900.0) for _ in row] for row in cost_index],
        p2p=P2P(latency_s=0.03, bytes_per_s=2000.0),
        memory_limit_bytes=[60.0] * RANKS if options > 1 else None,
    )


def apart(vision: int, language: int, *, deferral: bool) -> PlanningProblem:
    """Vision and language on ranks of their own, no two works or stages alike.

    Args: deferral: some images of every other microbatch are for the next one.
    """
    rng = random.Random(11)
    works: list[Work] = []
    early: tuple[int, ...] = ()
    for m, count in enumerate(IMAGES):
        first = len(works)
        works += [Work(module=0, microbatch=m, sub_microbatch=i) for i in range(count)]
        ahead = range(len(works) - count // 2, len(works)) if deferral and m % 2 == 0 else range(0)
        kept = tuple(w for w in range(first, len(works)) if w not in ahead)
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=(*early, *kept)))
        early = tuple(ahead)
    depth = (vision, language)
    cost_index, costs = [], []
    for work in works:
        cost_index.append([len(costs) + k for k in range(depth[work.module])])
        costs += [_options(rng, True, 1) for _ in range(depth[work.module])]
    return PlanningProblem.build(
        num_ranks=vision + language,
        modules=[
            ModuleStages(name="vision", stages=tuple(range(vision))),
            ModuleStages(name="language", stages=tuple(range(vision, vision + language))),
        ],
        stage_rank=[*range(vision + language)],
        works=works,
        costs=costs,
        cost_index=cost_index,
        output_bytes=[[rng.uniform(0, 900.0) for _ in row] for row in cost_index],
        p2p=P2P(latency_s=0.03, bytes_per_s=2000.0),
    )


def _options(rng: random.Random, trains: bool, count: int) -> list[Option]:
    forward, inputs, weights = (rng.uniform(0.2, 1.7) for _ in range(3))
    return [
        Option(
            name=f"{step} recompute",
            forward_s=forward,
            backward_input_s=inputs + 0.4 * step if trains else 0.0,
            backward_weight_s=weights if trains else 0.0,
            activation_bytes=6.0 - 2.0 * step,
        )
        for step in range(count)
    ]


def drawn_iteration(name: str, *overrides: str) -> tuple[IterationPlanner, Iteration]:
    """One iteration of a job of the paper, with memory options, on simulated devices."""
    words = [
        "training.global_batch_size=5",
        'planner.hardware="h800x16"',
        'planner.memory_limit="40GiB"',
        'activation_checkpoint.mode="none"',
        *overrides,
    ]
    job = config_module.load(name, words)
    planner = IterationPlanner(make_job(job))
    meta = draw(usual_workload(job), TypicalSizes.of(job), seed=3, iteration=0)
    return planner, planner.prepare(meta, searched=True)


def regrouped() -> Case:
    """A plan whose search has grouped the samples anew."""
    planner, iteration = drawn_iteration(
        "vlm_s.toml", "planner.search.regroup=true", "planner.search.budget_evaluations=2600"
    )
    found, result = search_iteration(planner, iteration, SearchOptions(budget_evaluations=2600), search)
    assert len(found.grouped_meta.microbatches) > len(iteration.meta.microbatches)
    return Case(problem=found.problem, plan=result.plan)


def searched(problem: PlanningProblem, seed: int) -> Case:
    result = search(problem, SearchOptions(budget_evaluations=200, seed=seed))
    return Case(problem=problem, plan=result.plan)


# --------------------------------------------------------------------------------------------- cases


def named_cases() -> dict[str, Case]:
    found = {}
    for name, schedule in SCHEDULES.items():
        passes = 2 if schedule.placement == "v" else schedule.least_passes
        chain = plain_chain(RANKS, 6, schedule, seconds=(1.0, 1.1, 0.7), transfer_s=0.15)
        mixed = two_modules(placement=schedule.placement, segments=(passes, passes), frozen=3)
        for kind, problem in (("chain", chain), ("two modules", mixed)):
            plan = schedule.make(problem)
            check(plan, problem)
            found[f"{name}, {kind}"] = Case(problem=problem, plan=plan)
    for name in BRAIDED:
        problem = plain_chain(RANKS, 12, CATALOGUE[name], seconds=(1.0, 1.1, 0.7), transfer_s=0.15, exchange_s=0.17)
        found[f"{name}, blocks"] = Case(problem=problem, plan=CATALOGUE[name].make(problem))
        problem = as_units(two_modules(frozen=1, one_v=True))
        plan = CATALOGUE[name].make(problem)
        check(plan, problem)
        assert any(entry.kind is BRAID for order in plan.orders for entry in order)
        found[f"{name}, two modules as one V"] = Case(problem=problem, plan=plan)
    found["STP, blocks, offloaded"] = offloaded(found["STP, blocks"])
    return found


def offloaded(case: Case) -> Case:
    """The case with less memory, half or all of an activation offloaded, with copies longer than what they run in."""
    (keep,) = case.problem.costs[0]
    options = [
        replace(keep, name=f"{k} offload", activation_bytes=keep.activation_bytes * (1 - k / 2), host_s=0.9 * k)
        for k in range(3)
    ]
    limits = [0.8 * peak for peak in simulate(case.problem, case.plan).peak_bytes]
    problem = replace(case.problem, costs=(tuple(options),), memory_limit_bytes=tuple(limits))
    plan = offload(case.plan, problem)
    assert plan is not None
    check(plan, problem)
    assert {*plan.options.values()} == {1, 2}
    return Case(problem=problem, plan=plan)


def planned_cases() -> dict[str, Case]:
    options = two_modules(options=3)
    frozen = two_modules(segments=(1, 3), frozen=4)
    found = {
        "searched, memory options": searched(options, 0),
        "searched, memory options, another seed": searched(options, 1),
        "searched, frozen encoder": searched(frozen, 0),
        **{f"drawn {i}": Case(problem=frozen, plan=random_plan(frozen, random.Random(i))) for i in range(3)},
    }
    for job in ("vlm_s", "t2v_s"):
        planner, iteration = drawn_iteration(f"{job}.toml")
        problem = iteration.problem
        found[f"{job}, searched"] = searched(problem, 0)
        plan = make_plan(problem, planner.job.schedule).plan
        assert plan is not None
        found[f"{job}, {planner.job.schedule.name}"] = Case(problem=problem, plan=plan)
    found["vlm_s, regrouped"] = regrouped()
    chain = plain_chain(RANKS, 4, CATALOGUE["1F1B"], transfer_s=0.2)
    forward = replace_backward(chain)
    found["forward only"] = Case(problem=forward, plan=make_plan(forward, "1F1B").plan)
    return found


def placed_name(ranks: tuple[int, int], deferral: bool, schedule: str) -> str:
    return f"{ranks[0]}:{ranks[1]}, {schedule}{', deferred' * deferral}"


def placed_cases() -> dict[str, Case]:
    """Modules on ranks of their own, as many as they need, with deferred images and without."""
    found = {}
    for ranks, deferral, schedule in itertools.product(*PLACED_CHOICES):
        problem = apart(*ranks, deferral=deferral)
        assert bool(problem.graph.deferred) == deferral
        plan = CATALOGUE[schedule].eager(int(deferral and schedule in EAGER_SCHEDULES)).make(problem)
        check(plan, problem)
        found[placed_name(ranks, deferral, schedule)] = Case(problem=problem, plan=plan)
    return found


def divided_cases() -> dict[str, Case]:
    """Results that all ranks read, and inputs that come from all of them; copies leave one after the other."""
    problem = fan_out(RANKS, 6, p2p=P2P(latency_s=0.03, bytes_per_s=2000.0), size=333.0)
    last = problem.graph.outputs(2 * RANKS - 1, RANKS)
    assert [problem.transfer_s(edge) for edge in last] == [0.03 + 999.0 / 2000.0] * (RANKS - 1) + [0.0]
    found = {f"{name}, divided": Case(problem=problem, plan=CATALOGUE[name].make(problem)) for name in DIVIDED}
    for case in found.values():
        check(case.plan, problem)
    return found | {"searched, divided": searched(problem, 0)}


def replace_backward(problem: PlanningProblem) -> PlanningProblem:
    """The problem without any backward, as in validation."""
    costs = tuple(
        tuple(replace(option, backward_input_s=0.0, backward_weight_s=0.0) for option in options)
        for options in problem.costs
    )
    graph = replace(problem.graph, backward=tuple((False,) * len(row) for row in problem.graph.backward))
    return replace(problem, graph=graph, costs=costs)


def faulty_cases() -> dict[str, Case]:
    """Executions that differ from the plan in one point each: order, a duration, when a message leaves."""
    good = two_modules(frozen=3)
    plan = CATALOGUE["1F1B"].make(good)
    program = lower(plan, good, sharded=False)
    late = replace(program, actions=(program.actions[0], sent_late(program.actions[1]), *program.actions[2:]))
    check_transport(late)
    longer = replace(good.costs[0][0], forward_s=good.costs[0][0].forward_s + 1e-6)
    return {
        "another order": Case(problem=good, plan=plan, program=lower(swapped(plan), good, sharded=False)),
        "another duration": Case(problem=replace(good, costs=((longer,), *good.costs[1:])), plan=plan, program=program),
        "a late message": Case(problem=good, plan=plan, program=late),
    }


def sent_late(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The actions with the first send behind the compute action that comes next."""
    send = next(i for i, action in enumerate(actions) if action.kind in SENDS)
    then = next(i for i in range(send, len(actions)) if actions[i].kind in COMPUTE)
    return (*actions[:send], *actions[send + 1 : then + 1], actions[send], *actions[then + 1 :])


def swapped(plan: Plan) -> Plan:
    """The plan with two forwards of the last rank in the other order."""
    order = list(plan.orders[-1])
    first, second = [i for i, action in enumerate(order) if action.kind is Kind.F and action.stage == RANKS - 1][:2]
    order[first], order[second] = order[second], order[first]
    found = Plan(plan.graph, (*plan.orders[:-1], tuple(order)), plan.options)
    check(found)
    return found


NAMED = [f"{name}, {kind}" for name in SCHEDULES for kind in ("chain", "two modules")]
NAMED += [f"{name}, {kind}" for name in BRAIDED for kind in ("blocks", "two modules as one V")]
NAMED += ["STP, blocks, offloaded"]
PLANNED = [
    "searched, memory options", "searched, memory options, another seed", "searched, frozen encoder",
    "drawn 0", "drawn 1", "drawn 2", "vlm_s, searched", "vlm_s, interleave", "t2v_s, searched", "t2v_s, interleave",
    "vlm_s, regrouped", "forward only",
]  # fmt: skip
DIVIDED_CASES = [*(f"{name}, divided" for name in DIVIDED), "searched, divided"]
PLACED = [placed_name(*choice) for choice in itertools.product(*PLACED_CHOICES)]
FAULTY = ["another order", "another duration", "a late message"]


def message_scale(problem: PlanningProblem) -> float:
    largest = max(max(row) for row in problem.output_bytes)
    return MESSAGE_BYTES / largest if largest else 1.0


def run_cases(rank: int, cases: dict[str, Case]) -> dict[str, Executed]:
    (num_ranks,) = {case.problem.graph.num_ranks for case in cases.values()}
    mesh = build_mesh(JobLayout.grid(pp=num_ranks), torch.device("cpu"))
    found = {}
    for name, case in cases.items():
        runtime = EmulatedRuntime(case.problem, mesh, VirtualClock(), message_scale=message_scale(case.problem))
        outcome = runtime.run(case.plan, case.program)
        found[name] = Executed(
            rows=outcome.rows,
            losses={work: float(loss) for work, loss in outcome.losses.items()},
            weight_grads={stage.stage_index: stage.weight_grad for stage in runtime.emulated},
        )
    return found


@pytest.fixture(scope="module")
def executions() -> dict[str, tuple[Case, list[Executed]]]:
    """All cases, those of equally many ranks run on one set of them."""
    found = {}
    for cases in (named_cases() | planned_cases() | faulty_cases() | divided_cases(), placed_cases()):
        answers = run_ranks(run_cases, next(iter(cases.values())).problem.graph.num_ranks, cases)
        found |= {name: (case, [answer[name] for answer in answers]) for name, case in cases.items()}
    assert [*found] == NAMED + PLANNED + FAULTY + DIVIDED_CASES + PLACED
    return found


# --------------------------------------------------------------------------------------------- tests


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMED + PLANNED + DIVIDED_CASES + PLACED)
def test_the_executed_timeline_is_the_simulated_one(name, executions):
    """Start and end of every action, to the bit: the same numbers are added in the same order."""
    case, ranks = executions[name]
    executed = executed_timeline(case.problem.graph, [rank.rows for rank in ranks])
    simulated = simulate(case.problem, case.plan)
    assert executed.rows == simulated.rows
    assert executed.makespan_s == simulated.makespan_s > 0


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMED + PLANNED + DIVIDED_CASES + PLACED)
def test_every_loss_and_gradient_came_through(name, executions):
    case, ranks = executions[name]
    graph = case.problem.graph
    losses = {work: loss for rank in ranks for work, loss in rank.losses.items()}
    works = range(len(graph.works))
    consumers = {work: [other for other in works if work in graph.sources(other)] for work in works}
    assert losses == {work: pytest.approx(1.0) for work in works if not consumers[work]}
    expected: Counter[int] = Counter()
    share = [0.0] * len(graph.works)
    for work in reversed(graph.work_order):
        share[work] = sum(share[other] / len(graph.works[other].after) for other in consumers[work]) or 1.0
        for stage in graph.stages(work):
            expected[stage] += share[work] * graph.has_backward(stage, work)
    assert {s: g for rank in ranks for s, g in rank.weight_grads.items()} == pytest.approx(dict(expected))


@pytest.mark.ranks
@pytest.mark.parametrize("name", FAULTY)
def test_an_execution_that_is_not_the_plan_is_seen(name, executions):
    case, ranks = executions[name]
    executed = executed_timeline(case.problem.graph, [rank.rows for rank in ranks])
    good = two_modules(frozen=3)
    assert executed.rows != simulate(good, case.plan).rows
    if case.program is not None and name == "another order":
        assert executed.rows == simulate(good, swapped(case.plan)).rows


@pytest.mark.ranks
def test_the_cases_have_what_plans_can_have(executions):
    """Split backwards, several memory options, stages without a backward, text-only microbatches, long transfers."""
    cases = {name: case for name, (case, _) in executions.items()}
    assert all(cases[f"{name}, two modules"].plan.split for name in SCHEDULES if SCHEDULES[name].splits_backward)
    assert len({*cases["searched, memory options"].plan.options.values()}) > 1
    assert cases["searched, memory options"].plan != cases["searched, memory options, another seed"].plan
    assert all(any(cases[f"{job}, searched"].plan.options.values()) for job in ("vlm_s", "t2v_s"))
    assert any(case.plan.split for name, case in cases.items() if "searched" in name)
    frozen = cases["searched, frozen encoder"].problem.graph
    assert not any(frozen.has_backward(stage, 0) for stage in range(4)) and frozen.has_backward(4, 3)
    assert [len(work.after) for work in frozen.works if work.module == 1] == list(IMAGES)
    for name in BRAIDED:
        kinds = {
            tuple(part.kind for part in entry.parts)
            for order in cases[f"{name}, blocks"].plan.orders
            for entry in order
        }
        assert (Kind.F, Kind.B) in kinds, name
    for name, case in cases.items():
        graph = case.problem.graph
        edges = [edge for node in graph.nodes() for edge in graph.outputs(*node)]
        assert any(case.problem.transfer_s(edge) > 0 for edge in edges), name


def wait_for_real(rank: int) -> tuple[tuple, float]:
    problem, plan = waiting()
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    runtime = EmulatedRuntime(problem, mesh, HostClock())
    outcome = runtime.run(plan)
    return outcome.rows, runtime.timeline(outcome).makespan_s


def waiting() -> tuple[PlanningProblem, Plan]:
    problem = plain_chain(2, 3, CATALOGUE["ZB-H1"], seconds=(0.004, 0.003, 0.002), transfer_s=0.006)
    return problem, CATALOGUE["ZB-H1"].make(problem)


@pytest.mark.ranks
def test_nothing_is_faster_than_simulated_on_the_host_clock():
    """However busy the machine is; how much slower it is, the benchmark measures."""
    problem, plan = waiting()
    simulated = simulate(problem, plan)
    (first, makespan), (second, same) = run_ranks(wait_for_real, 2)
    assert makespan == same >= simulated.makespan_s
    for rank, rows in enumerate((first, second)):
        assert [action for action, _, _ in rows] == list(plan.orders[rank])
        for (_, start, end), row in zip(rows, simulated.of_rank(rank), strict=True):
            assert start >= row.start_s - 1e-9 and end - start >= row.end_s - row.start_s - 1e-9


def blocks_for_real(rank: int) -> tuple[float, float, float]:
    problem, plan = blocks()
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    runtime = EmulatedRuntime(problem, mesh, HostClock())
    makespan_s = runtime.timeline(runtime.run(plan)).makespan_s
    return makespan_s, runtime.link.exchanged_s, runtime.link.exposed_s


def blocks() -> tuple[PlanningProblem, Plan]:
    seconds = (0.016, 0.016, 0.016)
    problem = plain_chain(2, 8, CATALOGUE["STP"], seconds=seconds, transfer_s=0.001, exchange_s=0.004)
    return problem, CATALOGUE["STP"].make(problem)


@pytest.mark.ranks
def test_blocks_hide_exchanges_on_the_host_clock():
    """Most of what the simulator hides, with each exchange a wait of its own."""
    problem, plan = blocks()
    simulated = simulate(problem, plan)
    for makespan_s, exchanged_s, exposed_s in run_ranks(blocks_for_real, 2):
        assert exchanged_s == pytest.approx(8 * 2 * 2 * 0.004)
        assert exposed_s < 0.6 * exchanged_s
        assert makespan_s >= 0.95 * simulated.makespan_s


def exchange_messages(rank: int) -> None:
    """Rank 0 sends its first two activations in the order that rank 1 does not expect."""
    problem = plain_chain(2, 2, CATALOGUE["GPipe"])
    program = lower(CATALOGUE["GPipe"].make(problem), problem, sharded=False)
    assert str(program).startswith("0F0.0 0SEND_F0.0>1 0F1.0 0SEND_F1.0>1 ")
    text = str(program).replace("0SEND_F0.0>1 0F1.0 0SEND_F1.0>1", "0F1.0 0SEND_F1.0>1 0SEND_F0.0>1")
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    runtime = EmulatedRuntime(problem, mesh, VirtualClock())
    runtime.run(CATALOGUE["GPipe"].make(problem), Program.parse(problem.graph, text))


@pytest.mark.ranks
def test_messages_of_one_size_in_the_wrong_order_are_seen():
    with pytest.raises(
        AssertionError, match=r"activation of work 0 from stage 0 to stage 1 was awaited, but .* work 1"
    ):
        run_ranks(exchange_messages, 2)


def refusals(rank: int) -> list[str]:
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    chain = plain_chain(2, 1, CATALOGUE["1F1B"])
    idle = replace(chain, graph=replace(chain.graph, stage_rank=(1 - rank, 1 - rank)))
    messages = []
    for problem in (plain_chain(3, 1, CATALOGUE["1F1B"]), idle):
        with pytest.raises(PlanError) as error:
            EmulatedRuntime(problem, mesh, VirtualClock())
        messages.append(str(error.value))
    return messages


@pytest.mark.ranks
def test_a_problem_for_other_ranks_is_refused():
    ranks, stages = run_ranks(refusals, 2)[1]
    assert ranks == "the problem has 3 ranks, but 2 run; start as many as it has"
    assert stages == "rank 1 holds no stage of the problem; give each rank one"


def test_shapes_of_messages():
    problem = two_modules()
    last = len(problem.graph.works) - 1
    assert message_shapes(problem, 1.0)(1, 0) == (round(problem.output_bytes[0][1] / 4),)
    assert message_shapes(problem, 10.0)(8, last) == (round(problem.output_bytes[last][0] * 2.5),)
    assert message_shapes(plain_chain(2, 1, CATALOGUE["1F1B"]), 1.0)(0, 0) == (11,)
