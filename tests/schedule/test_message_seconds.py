"""Seconds of messages: a result's copies to several ranks leave one after the other."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import Edge, Link, ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import P2P, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, fan_out, halves, problems

LINK = P2P(latency_s=0.5, bytes_per_s=4.0)


@st.composite
def read_by_many(draw: st.DrawFn) -> PlanningProblem:
    """A module whose results up to four others read, on any ranks: its last stage's, and any stage's over links."""
    num_ranks, num_modules = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    depths = [draw(st.integers(1, 3)) for _ in range(num_modules)]
    bounds = [sum(depths[:m]) for m in range(num_modules + 1)]
    works: list[Work] = []
    for microbatch in range(draw(st.integers(1, 2))):
        first = len(works)
        works.append(Work(module=0, microbatch=microbatch, sub_microbatch=0))
        for m in range(1, num_modules):
            ends = [(k, t) for k in range(depths[0]) for t in range(depths[m]) if (k, t) != (depths[0] - 1, 0)]
            taken = draw(st.lists(st.sampled_from(ends), unique=True, max_size=2)) if ends else []
            links = tuple(
                Link(work=first, source=k, target=t, size_bytes=draw(st.sampled_from([None, 0.0, 3.0, 16.0])))
                for k, t in taken
            )
            after = (first,) if draw(st.booleans()) or not links else ()
            works.append(Work(module=m, microbatch=microbatch, sub_microbatch=0, after=after, links=links))
    return PlanningProblem.build(
        num_ranks=num_ranks,
        modules=[ModuleStages(name=f"m{m}", stages=tuple(range(a, b))) for m, (a, b) in enumerate(pairwise(bounds))],
        stage_rank=[draw(st.integers(0, num_ranks - 1)) for _ in range(bounds[-1])],
        works=works,
        costs=[[halves(1.0, 1.0, 1.0)]],
        cost_index=[[0] * depths[work.module] for work in works],
        output_bytes=[[draw(st.sampled_from([0.0, 1.0, 8.0])) for _ in range(depths[w.module])] for w in works],
        p2p=LINK,
    )


def expected_s(problem: PlanningProblem, edge: Edge) -> float:
    """What all messages of an edge's result take: one for each rank that reads it, one for each link with a size."""
    graph, amounts, ranks = problem.graph, list[float](), set[int]()
    for node in graph.nodes():
        for other in graph.inputs(*node):
            if (other.source, other.work) != (edge.source, edge.work) or graph.is_local(other):
                continue
            rank = graph.stage_rank[other.target]
            if other.size_bytes is not None:
                amounts.append(other.size_bytes)
            elif rank not in ranks:
                ranks.add(rank)
                amounts.append(problem.output_bytes[edge.work][graph.position[edge.source]])
    return problem.p2p.latency_s + sum(amounts) / problem.p2p.bytes_per_s


@given(problem=read_by_many())
def test_copies_of_a_result_leave_one_after_the_other(problem: PlanningProblem) -> None:
    graph, items = problem.graph, problem.graph.items
    for stage, work in graph.nodes():
        for edge in graph.inputs(stage, work):
            seconds = 0.0 if graph.is_local(edge) else expected_s(problem, edge)
            assert problem.transfer_s(edge) == pytest.approx(seconds)
        for kind in (Kind.F, Kind.B):  # what plans are executed with is the same number
            item = items.item(kind, stage, work)
            for result, over in graph.needs(kind, stage, work):
                (message,) = (number for other, number in items.dependents[items.item(*result)] if other == item)
                assert [*problem.message_s, 0.0][message] == (problem.transfer_s(over) if over else 0.0)


@given(problem=problems())
def test_a_result_that_one_rank_reads_takes_its_own_bytes(problem: PlanningProblem) -> None:
    """To the bit: as of a chain, whatever other modules there are."""
    graph = problem.graph
    for node in graph.nodes():
        for edge in graph.outputs(*node):
            if not graph.is_local(edge):
                amount = problem.output_bytes[edge.work][graph.position[edge.source]]
                assert problem.transfer_s(edge) == problem.p2p.latency_s + amount / problem.p2p.bytes_per_s


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_divided_vocabulary_waits_for_all_its_copies(ranks: int) -> None:
    """The last language stage feeds a head on each rank, its own included; gradients come back likewise."""
    problem = fan_out(ranks, 1, p2p=LINK, size=2.0)
    copies_s = 0.5 + (ranks - 1) * 0.5
    timeline = simulate(problem, CATALOGUE["1F1B"].make(problem))
    rows = {row.action: row for row in timeline.rows}
    language, heads = 2 * ranks - 1, range(2 * ranks, 3 * ranks)
    end = rows[Action(Kind.F, language, 0, 0)].end_s
    for head in heads[:-1]:
        assert rows[Action(Kind.F, head, 0, 0)].start_s == end + copies_s
    back = max(rows[Action(Kind.B, head, 0, 0)].end_s for head in heads[:-1])
    assert rows[Action(Kind.B, language, 0, 0)].start_s == back + copies_s


def test_the_time_of_a_chain_is_as_it_was() -> None:
    problem = chain(3, 2, p2p=LINK)
    assert set(problem.message_s) == {0.5}
