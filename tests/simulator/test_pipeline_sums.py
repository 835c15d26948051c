"""Sums over pipelines: which messages there are, and when the last one ends."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from mmtrain.config import config
from mmtrain.config.config import Config, each_pipeline
from mmtrain.costs.machine import NominalNetwork
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.schedule.problem import P2P
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.pipeline_sums import PipelineSums, SumMessage
from tests.ranks import run_ranks

NETWORK = NominalNetwork(p2p=P2P(latency_s=0.5, bytes_per_s=1e6))
UNTIED = "model.language.config.tie_word_embeddings=false"


def load(*overrides: str) -> Config:
    degree = ["parallelism.pipeline_parallel_degree=1"] * any("pipelines" in one for one in overrides)
    return config.load("debug_vlm.toml", [*degree, *overrides])


def sums_of(job: Config) -> PipelineSums:
    jobs = each_pipeline(job, make_job)
    return PipelineSums.of([one.partition for one in jobs], jobs[0].spec, Sharding.of(job), NETWORK)


def stage_elements(job: Config) -> list[int]:
    """[stage] -> its trainable parameters."""
    made = make_job(job)
    return [
        sum(layer.num_trainable_params for layer in made.spec.module(stage.module).layers[slice(*stage.layers)])
        for stage in made.partition.stages
    ]


# --------------------------------------------------------------------------------------------- messages


def test_equal_pipelines_have_a_message_for_each_stage_as_long_as_an_all_reduce_of_it() -> None:
    job = load("parallelism.pipelines=[2,2]", "parallelism.data_parallel_shard_degree=2", UNTIED)
    sums, stages = sums_of(job), make_job(load()).partition.stages
    assert [one.holders for one in sums.messages] == [((0, s.index), (1, s.index)) for s in reversed(stages)]
    assert [one.ranks for one in sums.messages] == [(2 * s.pp_rank, 4 + 2 * s.pp_rank) for s in reversed(stages)]
    elements = stage_elements(load(UNTIED))[::-1]
    assert [one.num_bytes for one in sums.messages] == pytest.approx([4 * count / 2 for count in elements])
    wanted = [NETWORK.collective_s(OpKind.ALL_REDUCE, 4 * count / 2, [0, 1]) for count in elements]
    assert sums.seconds == pytest.approx(wanted)


def test_layers_travel_with_their_neighbours_of_equal_holders() -> None:
    job = load(
        "parallelism.pipelines=[2,3]", "planner.partition=mixed-parameters", UNTIED, "model.encoder.num_segments=0"
    )
    (one, two), spec = ([made.partition for made in each_pipeline(job, make_job)], make_job(load(UNTIED)).spec)
    trained = [(m.name, i) for m in spec.modules for i, layer in enumerate(m.layers) if layer.num_trainable_params]

    def stage(parts, layer: tuple[str, int]) -> int:
        return next(s.index for s in parts.of_module(layer[0]) if s.layers[0] <= layer[1] < s.layers[1])

    holders = [((0, stage(one, layer)), (1, stage(two, layer))) for layer in reversed(trained)]
    found = sums_of(job).messages
    assert [message.holders for message in found] == list(dict.fromkeys(holders))
    assert len(found) == len(set(holders)) > 3


def test_a_tied_matrix_is_a_message_of_its_own_among_all_copies() -> None:
    plain, tied = sums_of(load("parallelism.pipelines=[2,2]", UNTIED)), sums_of(load("parallelism.pipelines=[2,2]"))
    text = make_job(load()).partition.of_module("language")
    (matrix,) = [one for one in tied.messages if len(one.holders) == 4]
    assert matrix.holders == tuple((p, stage.index) for p in (0, 1) for stage in (text[0], text[-1]))
    assert matrix.num_bytes == 4 * 448 * 128
    both = sum(one.num_bytes for one in plain.messages)
    assert sum(one.num_bytes for one in tied.messages) == pytest.approx(both - matrix.num_bytes)


def test_one_pipeline_adds_up_only_copies() -> None:
    assert sums_of(load(UNTIED)).messages == ()
    (matrix,) = sums_of(load()).messages
    assert matrix.ranks == (0, 1)


def test_what_is_frozen_has_no_message() -> None:
    job = load("parallelism.pipelines=[2,2]", "model.encoder.trainable=false", "model.projector.trainable=false")
    language = {stage.index for stage in make_job(load()).partition.of_module("language")}
    assert {stage for one in sums_of(job).messages for _, stage in one.holders} == language


# ------------------------------------------------------------------------------------------ against ranks


def found_on_ranks(rank: int, job: Config) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The sums of this rank in their order: ranks, own stages, elements."""
    mesh = build_mesh(job.parallelism.layout, torch.device("cpu"))
    made = each_pipeline(job, make_job)[mesh.place.pipeline]
    sums: LayerSums = build_local_model(job.model, made.spec, made.partition, mesh, job.training, seed=0).sums
    return [
        (
            tuple(dist.get_process_group_ranks(one.group)) if one.group is not None else (rank,),
            tuple(sorted(one.stages)),
            sum(copies[0].numel() for copies in one.copies),
        )
        for one in sums.sums
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallelism.pipelines=[2,3]"],
        ["parallelism.pipelines=[3,2]", "model.language.num_segments=1", "model.encoder.num_segments=1", UNTIED],
        ["parallelism.pipelines=[1,2,2]", "model.encoder.trainable=false"],
    ],
    ids=["tied", "untied", "frozen"],
)
def test_messages_are_those_of_real_ranks(overrides: list[str]) -> None:
    job = load(*overrides, "training.global_batch_size=6")
    layout, sums = job.parallelism.layout, sums_of(job)
    for rank, found in enumerate(run_ranks(found_on_ranks, layout.world_size, job)):
        place = layout.coordinates(rank)
        parts = each_pipeline(job, make_job)[place.pipeline].partition
        wanted = []
        for one in sums.messages:
            stages = [s for p, s in one.holders if p == place.pipeline and parts.stage_rank[s] == place.pp]
            if rank in one.ranks:
                wanted.append((one.ranks, tuple(stages), round(one.num_bytes / 4)))
        assert found == wanted
        assert found


# ------------------------------------------------------------------------------------------------- times


def message(*ranks: int, holders: Sequence[tuple[int, int]] = ()) -> SumMessage:
    """A message of one-stage ranks, each of which is a pipeline of its own unless holders are named."""
    return SumMessage(holders=tuple(holders or ((rank, 0) for rank in ranks)), holder_ranks=ranks, num_bytes=1.0)


@pytest.mark.parametrize(
    ("messages", "seconds", "reduced_s", "end_s"),
    [
        ([], [], [[3.0], [5.0]], 5.0),
        ([message(0, 1)], [2.0], [[3.0], [5.0]], 7.0),
        ([message(0, 1), message(0, 1)], [2.0, 1.0], [[3.0], [5.0]], 8.0),
        # Messages of different ranks are in flight at the same time.
        ([message(0, 1), message(2, 3)], [2.0, 2.5], [[3.0], [5.0], [4.0], [4.0]], 7.0),
        # A message that waits for one of its ranks does not hold up the link of the other.
        ([message(0, 1), message(1, 2)], [2.0, 1.0], [[9.0], [0.0], [0.0]], 11.0),
        # A rank starts messages in their order: the second one waits for the reduction that the first one needs.
        ([message(0, 1), message(1, 2)], [2.0, 5.0], [[0.0], [9.0], [0.0]], 16.0),
        (
            [message(0, 1, holders=[(0, 0), (1, 0)]), message(1, 2, holders=[(1, 1), (2, 0)])],
            [2.0, 1.0],
            [[0.0], [9.0, 3.0], [0.0]],
            12.0,
        ),
        # The reduction of another rank may be the end of all.
        ([message(0, 1)], [1.0], [[1.0], [1.0], [8.0]], 8.0),
        # A pipeline of one rank with two stages, and one of two ranks.
        (
            [message(0, 2, holders=[(0, 1), (1, 1)]), message(0, 1, holders=[(0, 0), (1, 0)])],
            [2.0, 3.0],
            [[4.0, 5.0], [7.0, 1.0]],
            10.0,
        ),
    ],
)
def test_hand_made_sums_end_when_they_should(messages, seconds, reduced_s, end_s) -> None:
    assert PipelineSums(messages=tuple(messages), seconds=tuple(seconds)).end_s(reduced_s) == end_s


def literal_end(sums: PipelineSums, reduced_s: Sequence[Sequence[int]]) -> int:
    """When a clock that ticks has seen all messages end: each rank starts its own in their order, as soon as it can,
    and its link carries one at a time."""
    queues: dict[int, list[int]] = {}
    for number, one in enumerate(sums.messages):
        for rank in one.ranks:
            queues.setdefault(rank, []).append(number)
    started = {number: set[int]() for number in range(len(sums.messages))}
    on_link: dict[int, int] = {}
    left, now = dict(enumerate(sums.seconds)), 0
    while left:
        for rank, queue in queues.items():
            while queue:
                one = sums.messages[queue[0]]
                own = [holder for holder, of in zip(one.holders, one.holder_ranks, strict=True) if of == rank]
                if any(now < reduced_s[p][s] for p, s in own):
                    break
                started[queue.pop(0)].add(rank)
        for number in sorted(left):
            ranks = sums.messages[number].ranks
            if started[number] == {*ranks} and not any(rank in on_link for rank in ranks):
                on_link |= dict.fromkeys(ranks, number)
        now += 1
        for number in {*on_link.values()}:
            left[number] -= 1
            if left[number] == 0:
                del left[number]
                on_link = {rank: other for rank, other in on_link.items() if other != number}
    return max(now, *map(max, reduced_s), 0)


@pytest.mark.parametrize("seed", range(50))
def test_times_are_those_of_a_clock_that_ticks(seed: int) -> None:
    rng = random.Random(seed)
    depths = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    starts = list(accumulate(depths, initial=0))
    num_stages = [depth * rng.randint(1, 2) for depth in depths]
    messages = []
    for _ in range(rng.randint(0, 12)):
        holders = {(p, rng.randrange(num_stages[p])) for p in range(len(depths)) for _ in range(rng.randint(1, 2))}
        ranks = [starts[p] + stage % depths[p] for p, stage in sorted(holders)]
        messages.append(message(*ranks, holders=sorted(holders)))
    seconds = tuple(rng.randint(1, 9) for _ in messages)
    reduced_s = [[rng.randint(0, 20) for _ in range(count)] for count in num_stages]
    sums = PipelineSums(messages=tuple(messages), seconds=seconds)
    assert sums.end_s(reduced_s) == literal_end(sums, reduced_s)
