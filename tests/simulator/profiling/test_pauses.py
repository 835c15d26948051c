"""Overheads found again from timelines that were made with them."""

import random
from collections.abc import Iterator

import pytest

from mmtrain.costs.overheads import DISPATCH, Overheads
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import COMPUTE, RECEIVES, RESULT_OF, SENDS, WAITS, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.items import Result
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.simulator.profiling.pauses import Pause, Rows, overheads_between, overheads_inside, pauses

WANTED = Overheads(
    forward_s=3e-4,
    backward_s=5e-4,
    backward_input_s=4e-4,
    backward_weight_s=2e-4,
    send_s=2e-4,
    receive_s=3e-4,
    message_s=1e-4,
)
POST_S = 1e-4
"""Of `receive_s`: posting; the rest is taking the message."""


def run(problem: PlanningProblem, program: Program) -> list[Rows]:
    """The rows of ranks that pay for everything in their programs, one action after the other."""
    graph, ends, sent = problem.graph, dict[Result, float](), dict[Result, float]()
    rows: list[list[tuple]] = [[] for _ in program.actions]
    clocks, positions = [0.0] * len(rows), [0] * len(rows)
    while any(p < len(actions) for p, actions in zip(positions, program.actions, strict=True)):
        for rank, actions in enumerate(program.actions):
            while positions[rank] < len(actions):
                action, now = actions[positions[rank]], clocks[rank]
                work = graph.work_of(action) if action.kind in COMPUTE else -1
                if action.kind in SENDS:
                    clocks[rank] += WANTED.send_s
                    last = rows[rank][-1][0]
                    sent[RESULT_OF[last.kind], last.stage, graph.work_of(last)] = clocks[rank]
                elif action.kind in RECEIVES:
                    clocks[rank] += POST_S
                elif action.kind in COMPUTE:
                    needs = graph.needs(action.kind, action.stage, work)
                    remote = [(r, e) for r, e in needs if e is not None and not graph.is_local(e)]
                    if any(result not in sent for result, _ in remote):
                        break
                    arrivals = [sent[r] + problem.transfer_s(e) + WANTED.message_s for r, e in remote]
                    start = max([now, *arrivals]) + len(remote) * (WANTED.receive_s - POST_S)
                    start += getattr(WANTED, DISPATCH[action.kind])
                    end = start + problem.options(action.stage, work)[0].duration_s(action.kind)
                    ends[RESULT_OF[action.kind], action.stage, work] = clocks[rank] = end
                    rows[rank].append((action, start, end))
                else:
                    assert action.kind in WAITS
                positions[rank] += 1
    return rows


def found_pauses() -> Iterator[Pause]:
    for name in ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B"):
        problem = plain_chain(2, 8, CATALOGUE[name], seconds=(0.010, 0.011, 0.008), transfer_s=0.002)
        plan = make_plan(problem, name).plan
        assert plan is not None
        program = lower(plan, problem, sharded=False)
        yield from pauses(program, run(problem, program), problem.transfer_s)


def test_overheads_are_found_again():
    found = overheads_between(list(found_pauses()))
    for name in (*DISPATCH.values(), "send_s", "receive_s"):
        assert getattr(found, name) == pytest.approx(getattr(WANTED, name), rel=1e-6), name
    # What a late message costs is found as a mean: posting its receive does not delay an action that waits for it.
    assert found.message_s == pytest.approx(max(0.0, WANTED.message_s - POST_S), abs=1e-4)


def test_disturbances_of_few_pauses_do_not_count():
    chance = random.Random(0)
    loud = [p._replace(seconds=p.seconds + 0.05) if chance.random() < 0.04 else p for p in found_pauses()]
    found = overheads_between(loud)
    for name in ("forward_s", "backward_s", "send_s", "receive_s"):
        assert getattr(found, name) == pytest.approx(getattr(WANTED, name), abs=4e-4), name


def test_the_inside_of_actions_is_a_mean_by_kind():
    found = overheads_inside([(Kind.F, 1.0), (Kind.F, 3.0), (Kind.W, -1.0)])
    assert found == Overheads(forward_s=2.0)
    assert overheads_inside([]) == overheads_between([]) == Overheads()
