"""python benchmarks/links.py [--models vlm_s,...] [--iterations 3] [--evaluations 300]

Do transfers that share a link matter? The simulator gives every transfer the link's whole rate. Here the same plans are
simulated once more where a rank's network card sends one message at a time and receives one at a time, in the order in
which they are ready. Printed for each model and schedule: the part of the time that the busiest card sends, and the
makespan over that of the simulator, mean and largest over drawn iterations.
"""

import argparse
import heapq
import statistics
from collections.abc import Iterator

from peers_setups import CLUSTERS

from mmtrain.config import config as config_module
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.search_settings import PLANNED
from mmtrain.schedule.action import RESULT_OF
from mmtrain.schedule.graph import Edge
from mmtrain.schedule.items import Result
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.study import with_schedule
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.workloads import draw

SCHEDULES = ("1F1B", "interleave", PLANNED)


def with_cards(problem: PlanningProblem, plan: Plan) -> tuple[float, float]:
    """(makespan, seconds that the busiest card sends) where cards move one message at a time in each direction."""
    graph, latency_s = problem.graph, problem.p2p.latency_s
    num_ranks = graph.num_ranks
    arrived: dict[tuple[Result, int], float] = {}
    steps, free = [0] * num_ranks, [0.0] * num_ranks
    sends, receives, busy = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    ending: list[tuple[float, int, Result]] = []
    running = [False] * num_ranks

    def start(now: float, rank: int) -> None:
        order = plan.orders[rank]
        if running[rank] or steps[rank] == len(order):
            return
        action = order[steps[rank]]
        work = graph.work_of(action)
        inputs = [(result, edge) for result, edge in graph.needs(action.kind, action.stage, work)]
        if any((result, rank) not in arrived for result, _ in inputs):
            return
        begin = max([now, free[rank], *(arrived[result, rank] for result, _ in inputs)])
        free[rank] = begin + plan.option(problem, action.stage, work).duration_s(action.kind)
        running[rank], steps[rank] = True, steps[rank] + 1
        heapq.heappush(ending, (free[rank], rank, (RESULT_OF[action.kind], action.stage, work)))

    targets: dict[Result, list[tuple[int, float]]] = {}
    for rank, order in enumerate(plan.orders):
        for action in order:
            for result, edge in graph.needs(action.kind, action.stage, graph.work_of(action)):
                targets.setdefault(result, []).append((rank, _sent_s(problem, edge)))
    for rank in range(num_ranks):
        start(0.0, rank)
    now = 0.0
    while ending:
        now, rank, result = heapq.heappop(ending)
        running[rank] = False
        for target, seconds in targets.get(result, ()):
            if target == rank:
                arrived[result, target] = now
                continue
            begin = max(now, sends[rank], receives[target])
            sends[rank] = receives[target] = begin + seconds
            busy[rank] += seconds
            arrived[result, target] = begin + seconds + latency_s
        for other in range(num_ranks):
            start(now, other)
    assert all(step == len(order) for step, order in zip(steps, plan.orders, strict=True))
    return now, max(busy)


def _sent_s(problem: PlanningProblem, edge: Edge | None) -> float:
    """Seconds that one message takes a card, without those of other copies of the result."""
    if edge is None or problem.graph.is_local(edge):
        return 0.0
    made = problem.output_bytes[edge.work][problem.graph.position[edge.source]]
    return (made if edge.size_bytes is None else edge.size_bytes) / problem.p2p.bytes_per_s


def plans(model: str, schedule: str, args: argparse.Namespace) -> Iterator[tuple[PlanningProblem, Plan]]:
    overrides = [f'planner.hardware="{CLUSTERS[model]}"', 'planner.memory_limit="92%"']
    config, _ = with_schedule(config_module.load(f"{model}.toml", overrides), schedule, args.evaluations)
    planner = IterationPlanner(make_job(config))
    for iteration in range(args.iterations):
        meta = draw(usual_workload(config), TypicalSizes.of(config), seed=1, iteration=iteration)
        problem = planner.problem(meta, searched=schedule == PLANNED)[1]
        if schedule == PLANNED:
            result = make_plan(problem, JobMethod.searching(planner.job.schedule, planner.job.section, seed=iteration))
        else:
            result = make_plan(problem, schedule)
        if result.has_plan:
            yield problem, result.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CLUSTERS))
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=300)
    args = parser.parse_args()
    print(f"{'model':8s} {'schedule':12s} {'busiest card':>12s} {'makespan, mean':>15s} {'largest':>8s}")
    for model in args.models.split(","):
        for schedule in SCHEDULES:
            ratios, shares = [], []
            for problem, plan in plans(model, schedule, args):
                simulated_s = simulate(problem, plan).makespan_s
                makespan_s, sending_s = with_cards(problem, plan)
                ratios.append(makespan_s / simulated_s)
                shares.append(sending_s / simulated_s)
            if ratios:
                print(
                    f"{model:8s} {schedule:12s} {statistics.fmean(shares):12.1%} {statistics.fmean(ratios):15.4f} "
                    f"{max(ratios):8.4f}",
                    flush=True,
                )
            else:
                print(f"{model:8s} {schedule:12s} no plan fits")


if __name__ == "__main__":
    main()
