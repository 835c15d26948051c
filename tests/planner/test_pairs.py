"""The works of two towers, and a memory limit below the microbatches that have one loss."""

import dataclasses

import pytest

from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import DataError, PlanError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import check_conservation, make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.memory import components
from mmtrain.spec.builders import model_spec
from tests.models.towers import make_pairs, two_towers
from tests.reference import PLANNER

COUNTS = [3, 5, 1, 4, 2]


def batching(microbatches: int, sizes=0, counts=COUNTS):
    model = two_towers("clip", microbatches=microbatches)
    _, meta = make_pairs(model, counts, seed=1)
    return make_batching(meta, model_spec(model), sizes), meta


@pytest.mark.parametrize(("microbatches", "groups"), [
    (1, [[0], [1], [2], [3], [4]]), (2, [[0, 1], [2, 3], [4]]), (4, [[0, 1, 2, 3], [4]]), (0, [[0, 1, 2, 3, 4]]),
])  # fmt: skip
@pytest.mark.parametrize("sizes", [0, {"vision": 2, "language": 3}])
def test_a_loss_comes_after_all_works_of_its_microbatches(microbatches, groups, sizes):
    made, meta = batching(microbatches, sizes)
    check_conservation(meta, made)
    losses = [item for w, item in enumerate(made.items) if made.module_of(w) == "contrast"]
    assert [item.work.microbatch for item in losses] == [group[-1] for group in groups]
    for item, group in zip(losses, groups, strict=True):
        towers = [
            w
            for name in ("vision", "language")
            for index in group
            for w, work in enumerate(made.works)
            if (made.module_of(w), work.microbatch) == (name, index)
        ]
        assert item.work.after == tuple(towers)
        pairs = sum(COUNTS[index] for index in group)
        assert (item.size.rows, item.size.pairs, item.size.outputs) == (2 * pairs, pairs * pairs, pairs)
        assert item.units == tuple(d for index in group for d in meta.microbatches[index].documents)
    if sizes:
        texts = [len(item.units) for w, item in enumerate(made.items) if made.module_of(w) == "language"]
        assert max(texts) == 3 and sum(texts) == sum(COUNTS) and len(texts) == 7


def test_a_loss_without_one_of_its_works_is_refused():
    made, meta = batching(2)
    index = next(w for w in range(len(made.items)) if made.module_of(w) == "contrast")
    item = made.items[index]
    cut = dataclasses.replace(item, work=dataclasses.replace(item.work, after=item.work.after[1:]))
    items = (*made.items[:index], cut, *made.items[index + 1 :])
    with pytest.raises(DataError, match=r"microbatch 1: the contrast work of .* comes after works"):
        check_conservation(meta, dataclasses.replace(made, items=items))


def test_a_microbatch_without_pairs_is_refused():
    model = two_towers("clip")
    empty = IterationMeta(microbatches=(MicrobatchMeta(),))
    with pytest.raises(DataError, match="microbatch 0 has no "):
        make_batching(empty, model_spec(model))


def planner(microbatches: int, limit_gib: float) -> IterationPlanner:
    spec = model_spec(two_towers("clip", microbatches=microbatches))
    section = PLANNER.with_search(activation_memory_gib=limit_gib)
    parts = partition(spec, 2, {}, reference_sizes(spec, 12))
    return IterationPlanner(Job(
        spec=spec, partition=parts, section=section, costs=FlopsCosts.of(section), schedule=CATALOGUE["interleave"],
        sub_microbatch_size=0, sharded=False,
    ))  # fmt: skip


def test_microbatches_of_one_loss_are_one_component_for_memory():
    """A limit with room for two microbatches plans K = 2, and refuses K = 4 with that reason."""
    meta = make_pairs(two_towers("clip"), [4] * 4, seed=1)[1]
    _, problem = planner(2, 0.0).problem(meta)
    assert set(components(problem.graph)) == {0, 1}
    both = IterationPlanner(planner(2, 0.0).job).plan(meta).result
    peak_gib = max(both.timeline.peak_bytes) / 2**30
    assert planner(2, peak_gib).plan(meta).result.has_plan
    words = r"the activations of 4 microbatches that have one loss take at least .*lower model\.contrast\.microbatches"
    with pytest.raises(PlanError, match=words):
        planner(4, peak_gib / 1.5).plan(meta)
