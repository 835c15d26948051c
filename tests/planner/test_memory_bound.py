import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory_bound import memory_bound_s
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import RESULT_OF, Kind
from mmtrain.schedule.graph import ModuleStages, Work
from mmtrain.schedule.items import Result
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from tests.examples import examples
from tests.schedule.problems import as_units, chain, option, problems


def test_one_microbatch_at_a_time() -> None:
    problem = chain(2, 5, cost=option(1.0, 2.0), memory_limit_bytes=[1.0, None])
    # Rank 0 holds a microbatch from its forward to the end of its backward: 1 + (1 + 2) + 2 s.
    assert memory_bound_s(problem, split=False) == pytest.approx(5 * 6.0, rel=1e-8)
    assert lower_bound_s(problem, split=False) == 5 * 3.0 + 3.0
    found = make_plan(problem, SearchOptions(budget_evaluations=50, split=False))
    assert found.makespan_s == 5 * 6.0


def test_a_split_backward_holds_its_bytes_until_its_weight_gradients() -> None:
    problem = chain(2, 5, cost=option(1.0, 2.0), memory_limit_bytes=[1.0, None])
    # F 1, F and I of the other rank 2, then whole 2 or I and W 1 each.
    assert memory_bound_s(problem) == pytest.approx(5 * 5.0, rel=1e-8)


def test_what_a_backward_restores_counts_while_it_runs() -> None:
    cost = replace(option(1.0, 2.0), restored_bytes=1.0)
    problem = chain(2, 5, cost=cost, memory_limit_bytes=[2.0, None])
    # 1 byte for 1 + (1 + 2) + 2 s and another one for 2 s, at most 2 at a time.
    assert memory_bound_s(problem, split=False) == pytest.approx(5 * 8.0 / 2, rel=1e-8)


def test_a_mixture_of_options() -> None:
    keep, recompute = option(1.0, 2.0, 4.0), option(1.0, 3.0, 1.0)
    problem = PlanningProblem.build(
        num_ranks=1,
        modules=[ModuleStages(name="language", stages=(0,))],
        stage_rank=[0],
        works=[Work(module=0, microbatch=m, sub_microbatch=0) for m in range(6)],
        costs=[[keep, recompute]],
        cost_index=[[0]] * 6,
        output_bytes=[[0.0]] * 6,
        p2p=P2P(latency_s=0.0, bytes_per_s=1.0),
        memory_limit_bytes=[2.0],
    )
    # x of the six keep 4 bytes for 3 s, the others 1 byte for 4 s: 12 x + 4 (6 - x) <= 2 (3 x + 4 (6 - x)) = 48 - 2 x,
    # so that x = 2.4 and the rank is busy for 7.2 + 14.4 s.
    assert memory_bound_s(problem, split=False) == pytest.approx(21.6, rel=1e-8)
    assert lower_bound_s(problem) == 18.0


def test_without_limits_it_is_the_bound_without_memory() -> None:
    problem = chain(3, 4, cost=option(1.0, 2.0))
    assert memory_bound_s(problem) == lower_bound_s(problem)


@st.composite
def small_problems(draw: st.DrawFn) -> PlanningProblem:
    """Up to four pairs of a stage and a work on one or two ranks: a language model, at times behind an encoder that
    may be frozen; one to three options with all that they may hold and cost; tight limits."""
    num_ranks = draw(st.integers(1, 2))
    encodes, passes = draw(st.booleans()), draw(st.integers(1, 2)) if num_ranks == 1 else 1
    frozen = draw(st.booleans())
    depth = [num_ranks if encodes else 0, num_ranks * passes]
    modules = [ModuleStages(name="language", stages=tuple(range(depth[0], sum(depth))))]
    works: list[Work] = []
    for microbatch in range(max(1, 4 // sum(depth))):
        after: tuple[int, ...] = ()
        if encodes:
            after = (len(works),)
            works.append(Work(module=1, microbatch=microbatch, sub_microbatch=0))
        works.append(Work(module=0, microbatch=microbatch, sub_microbatch=0, after=after))
    if encodes:
        modules.append(ModuleStages(name="vision", stages=tuple(range(depth[0]))))
    seconds, sizes = st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 2.0, 2.0, 4.0])
    costs, most = [], 0.0
    for is_encoder in (False, True):
        learns = not (is_encoder and frozen)
        base = {name: draw(seconds) for name in ("forward_s", "backward_input_s", "backward_weight_s")}
        held = draw(sizes)
        options = [
            Option(
                name=str(step),
                forward_s=base["forward_s"],
                backward_input_s=(base["backward_input_s"] + step * base["forward_s"]) * learns,
                backward_weight_s=base["backward_weight_s"] * learns,
                activation_bytes=held / 2**step,
                weight_bytes=draw(st.sampled_from([None, 0.0, held / 2, held])),
                restored_bytes=draw(st.sampled_from([0.0, held / 2])) * learns,
                split_s=draw(st.sampled_from([0.0, 0.25])),
                host_s=draw(st.sampled_from([0.0, 1.5])),
            )
            for step in range(draw(st.integers(1, 3)) if learns else 1)
        ]
        costs.append(options)
        most = max(most, *(max(o.held_for_weight_bytes, o.activation_bytes) + o.restored_bytes for o in options))
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=modules,
        stage_rank=[stage % num_ranks for stage in range(sum(depth))],
        works=works,
        costs=costs,
        cost_index=[[w.module] * len(modules[w.module].stages) for w in works],
        output_bytes=[[1.0] * len(modules[w.module].stages) for w in works],
        p2p=P2P(latency_s=draw(st.sampled_from([0.0, 0.25])), bytes_per_s=1e9),
        memory_limit_bytes=[
            draw(st.sampled_from([most, most, 1.25 * most, 1.5 * most, None])) for _ in range(num_ranks)
        ],
    )


class Plans:
    """All plans without blocks that take less than a number of seconds: orders, options, backwards whole and split."""

    def __init__(self, problem: PlanningProblem, *, split: bool, below_s: float) -> None:
        self.problem, self.graph, self.split = problem, problem.graph, split
        self.best_s = below_s
        """The makespan of the best one so far."""
        self.least_s: dict[Result, float] = {}
        for stage, work in self.graph.nodes():
            backward = (Kind.B,) if self.graph.has_backward(stage, work) else ()
            for kind in (Kind.F, *backward):
                timed = Kind.I if kind is Kind.B and split else kind
                self.least_s[kind, stage, work] = min(o.busy_s(timed) for o in problem.options(stage, work))
        self.tail_s = dict.fromkeys(self.least_s, 0.0)
        """The least seconds from the end of each result to the end of the plan."""
        for kind in (Kind.B, Kind.F):
            nodes = [(stage, work) for of, stage, work in self.least_s if of is kind]
            for stage, work in nodes if kind is Kind.B else reversed(nodes):
                for needed, _ in self.graph.needs(kind, stage, work):
                    after_s = self.least_s[kind, stage, work] + self.tail_s[kind, stage, work]
                    self.tail_s[needed] = max(self.tail_s[needed], after_s)
        self.go_on({}, [0.0] * self.graph.num_ranks, [0.0] * self.graph.num_ranks, {}, [], (0.0, -1))

    def next_actions(
        self, ends: dict[Result, float], due: list[tuple[int, int]], chosen: dict[tuple[int, int], Option]
    ) -> Iterator[tuple[Kind, tuple[int, int], Option, float]]:
        """Each action that may come next, with an option, and when its inputs have arrived."""
        for result in self.least_s:
            kind, *node = result
            needs = self.graph.needs(*result)
            if result in ends or any(needed not in ends for needed, _ in needs):
                continue
            ready_s = max((ends[r] + (self.problem.transfer_s(e) if e else 0.0) for r, e in needs), default=0.0)
            stage, work = node
            one_before = (kind, stage, work - len(self.graph.modules))
            if kind is Kind.F and not needs and one_before in self.least_s and one_before not in ends:
                continue  # microbatches are equal: they enter in the order of their numbers
            kinds = (Kind.F,) if kind is Kind.F else (Kind.B, Kind.I) if self.split else (Kind.B,)
            options = self.problem.options(stage, work) if kind is Kind.F else (chosen[stage, work],)
            for which in kinds:
                for one in options:
                    yield which, (stage, work), one, ready_s
        for node in due:
            yield Kind.W, node, chosen[node], 0.0

    def go_on(
        self,
        ends: dict[Result, float],
        times: list[float],
        held: list[float],
        chosen: dict[tuple[int, int], Option],
        due: list[tuple[int, int]],
        last: tuple[float, int],
    ) -> None:
        """Tries all ways on from a state. Args: due: Ws. last: start and rank of the last action; starts ascend."""
        if len(ends) == len(self.least_s) and not due:
            self.best_s = min(self.best_s, max(times))
            return
        for kind, node, one, ready_s in self.next_actions(ends, due, chosen):
            rank = self.graph.stage_rank[node[0]]
            start = max(times[rank], ready_s)
            limit = self.problem.memory_limit_bytes[rank]
            after = held[rank] + one.growth_bytes(kind)
            tail_s = self.tail_s.get((RESULT_OF.get(kind, kind), *node), 0.0)
            if (start, rank) < last or start + one.duration_s(kind) + tail_s >= self.best_s:
                continue
            if limit is not None and exceeds(max(held[rank] + one.needed_bytes(kind), after), limit):
                continue
            done, now_due, end = dict(ends), list(due), start + one.duration_s(kind)
            if kind is Kind.W:
                now_due.remove(node)
            else:
                done[RESULT_OF.get(kind, kind), *node] = end
            if kind is Kind.I:
                now_due.append(node)
            rest_s = sum(s for r, s in self.least_s.items() if r not in done and self.graph.stage_rank[r[1]] == rank)
            if end + rest_s >= self.best_s:
                continue
            then = [end if r == rank else t for r, t in enumerate(times)]
            holds = [after if r == rank else h for r, h in enumerate(held)]
            self.go_on(done, then, holds, {**chosen, node: one}, now_due, (start, rank))


def test_all_plans_of_a_small_chain() -> None:
    problem = chain(2, 3, cost=option(1.0, 2.0), memory_limit_bytes=[2.0, None])
    found = make_plan(problem, SearchOptions(budget_evaluations=50, split=False))
    assert Plans(problem, split=False, below_s=math.inf).best_s == found.makespan_s == 12.0
    assert Plans(problem, split=False, below_s=12.0).best_s == 12.0


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=small_problems(), split=st.booleans())
def test_no_plan_of_all_beats_it(problem: PlanningProblem, split: bool) -> None:
    bound_s = memory_bound_s(problem, split=split)
    assert lower_bound_s(problem, split=split) <= bound_s
    below_s = bound_s * (1 - 1e-9)
    assert Plans(problem, split=split, below_s=below_s).best_s == below_s


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems() | problems().map(as_units), schedule=st.sampled_from(["", *CATALOGUE]))
def test_a_plan_does_not_beat_it_with_its_own_peaks_as_limits(problem: PlanningProblem, schedule: str) -> None:
    result = make_plan(problem, schedule or SearchOptions(budget_evaluations=10, braid=True))
    limited = replace(problem, memory_limit_bytes=result.timeline.peak_bytes)
    assert result.timeline.end_s >= memory_bound_s(limited, split=bool(result.plan.split)) * (1 - 1e-9)
