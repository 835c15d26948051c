"""Process groups for directed pairs of pipeline ranks, as NCCL gets them."""

import pytest
import torch
import torch.distributed as dist

from mmtrain.config.topology import JobLayout
from mmtrain.parallel.mesh import Channels, _directed_groups, _neighbours, build_mesh
from tests.ranks import run_ranks

LAYOUT = JobLayout(depths=(3, 2), dp_shard=2)
"""Pipelines of 3 and 2 ranks, each twice: global ranks 0, 2, 4 and 1, 3, 5; 6, 8 and 7, 9."""
HOPS = [{(0, 2), (2, 0), (1, 2)}, {(0, 1), (1, 0)}]


def exchange(rank: int) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], int], bool]:
    """(hop -> ranks of its group, hop -> what came over it, whether another hop takes the pipeline's group)."""
    directed = _directed_groups(LAYOUT, rank, HOPS)
    pipeline = next(ranks for ranks in LAYOUT.groups("pp") if rank in ranks)
    mesh = build_mesh(LAYOUT, torch.device("cpu"))
    channels, place = Channels(pipeline, mesh.pp_group, directed), pipeline.index(rank)
    came = {}
    for hop in sorted(directed):
        if place not in hop:
            continue
        message = torch.tensor([rank])
        group, peer = channels.route(*hop, pp_rank=place)
        if place == hop[0]:
            group.send([message], peer, 0).wait()
        else:
            group.recv([message], peer, 0).wait()
            came[hop] = int(message)
    members = {hop: dist.get_process_group_ranks(group) for hop, group in directed.items() if place in hop}
    return members, came, channels.group(0, len(pipeline)) is mesh.pp_group


@pytest.mark.ranks
def test_each_hop_has_a_group_of_its_two_ranks_and_carries_messages() -> None:
    answers = run_ranks(exchange, LAYOUT.world_size)
    for ranks in LAYOUT.groups("pp"):
        hops = HOPS[LAYOUT.coordinates(ranks[0]).pipeline]
        for place, rank in enumerate(ranks):
            members, came, falls_back = answers[rank]
            assert members == {(s, t): sorted([ranks[s], ranks[t]]) for s, t in hops if place in (s, t)}
            assert came == {(s, t): ranks[s] for s, t in hops if place == t}
            assert falls_back


def test_without_a_job_neighbours_and_the_ends_have_groups() -> None:
    assert [_neighbours(1), _neighbours(2)] == [set(), {(0, 1), (1, 0)}]
    assert _neighbours(4) == {(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)}
