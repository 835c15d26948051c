"""What `benchmarks/emulate_torch.py` measures of torch's schedules: they spend what the plan says, where it says it."""

import random
from dataclasses import replace

import emulate_peers
import pytest
import torch

from mmtrain.errors import PlanError
from mmtrain.schedule.action import BRAID
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import P2P, Option
from tests.ranks import run_ranks

RANKS, MICROBATCHES = 3, 6
CHAINS = {
    "torch 1F1B": ("1F1B", 1),
    "torch Interleaved1F1B": ("Interleaved1F1B", 2),
    "torch ZBVZeroBubble": ("ZBV", 2),
}


def uneven(name, passes):
    """A chain no two of whose stages or microbatches are alike; its exchanges lie in part under compute."""
    rng = random.Random(3)
    problem = plain_chain(RANKS, MICROBATCHES, CATALOGUE[name], num_segments=passes)
    stages, works = len(problem.graph.stage_rank), len(problem.graph.works)
    costs = []
    for _ in range(stages * works):
        forward, inputs, weights = (rng.uniform(0.2, 1.7) for _ in range(3))
        costs.append(
            (
                Option(
                    name="keep",
                    forward_s=forward,
                    backward_input_s=inputs,
                    backward_weight_s=weights,
                    activation_bytes=1.0,
                    forward_exchange_s=rng.uniform(0, 0.5) * forward,
                    backward_exchange_s=rng.uniform(0.2, 0.5) * inputs,
                    contention=0.19,
                ),
            )
        )
    return replace(
        problem,
        costs=tuple(costs),
        cost_index=tuple(tuple(range(w * stages, (w + 1) * stages)) for w in range(works)),
        output_bytes=tuple(tuple(rng.uniform(0, 900.0) for _ in range(stages)) for _ in range(works)),
        p2p=P2P(latency_s=0.03, bytes_per_s=2000.0),
    )


def case(schedule, problem, plan):
    return emulate_peers.Case(batch="", schedule=schedule, problem=problem, plan=plan, message_scale=1.0)


def executed(rank, cases):
    return emulate_peers.execute(torch.device("cpu"), cases, 0)


@pytest.mark.ranks
def test_in_virtual_time_torch_does_what_is_simulated():
    cases = []
    for peer, (name, passes) in CHAINS.items():
        problem = uneven(name, passes)
        plan = CATALOGUE[name].make(problem)
        split = emulate_peers.as_torch_splits(problem) if plan.split else problem
        for schedule, mine in ((peer, split), (peer + emulate_peers.OURS, problem)):
            cases.append(case(schedule, mine, plan))
    problem = uneven("STP", 2)
    cases.append(case("STP", problem, CATALOGUE["STP"].make(problem)))
    assert any(entry.kind is BRAID for order in cases[-1].plan.orders for entry in order)
    answers = run_ranks(executed, RANKS, cases)
    runs = [emulate_peers.together(*(rank[-1][i] for rank in answers)) for i in range(len(cases))]
    for mine, run in zip(cases, runs, strict=True):
        emulate_peers.check_stages(mine, run, virtual=True)

    # The check sees one action that is longer, two that are exchanged, and a split that is not torch's.
    first, run = cases[0], runs[0]
    stage, work = 0, 2
    longer = list(first.problem.costs)
    index = first.problem.cost_index[work][stage]
    longer[index] = (replace(longer[index][0], forward_s=longer[index][0].forward_s + 1e-6),)
    other = replace(first.problem, costs=tuple(longer))
    with pytest.raises(PlanError, match=r"stage 0 asked for"):
        emulate_peers.check_stages(replace(first, problem=other), run, virtual=True)
    orders = [list(order) for order in first.plan.orders]
    orders[0][3], orders[0][4] = orders[0][4], orders[0][3]
    exchanged = replace(first, plan=replace(first.plan, orders=tuple(map(tuple, orders))))
    with pytest.raises(PlanError, match=r"did not end at|too soon"):
        emulate_peers.check_stages(exchanged, run, virtual=True)
    with pytest.raises(PlanError, match=r"stage 0 asked for"):
        emulate_peers.check_stages(cases[5], runs[4], virtual=True)
