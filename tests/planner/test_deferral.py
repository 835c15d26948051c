"""Images that are encoded with the microbatch before: works, conservation, plans."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import DataError
from mmtrain.modality.images import ImagesLayout
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta, without_deferral
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.planner.deferral import oversize_pairs
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.layout import IterationLayout
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.partition.partition import Partition, partition
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import Work
from mmtrain.schedule.library.catalogue import CATALOGUE, ChunkPlacement
from mmtrain.schedule.library.memory import Memory, components
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from mmtrain.schedule.view.draw import svg, text
from mmtrain.spec.spec import ModelSpec
from tests.planner.specs import microbatch, vlm
from tests.reference import PLANNER
from tests.schedule.problems import in_pairs

Grids = Sequence[tuple[int, int]]
A: Grids = [(4, 4), (2, 2)]
B: Grids = [(4, 8)]


def packed(*documents: tuple[int, Grids]) -> MicrobatchMeta:
    """Documents of (sample, grids of its images); a negative sample is deferred."""
    metas = [replace(microbatch(abs(n), grids).documents[0], deferred=n < 0) for n, grids in documents]
    return MicrobatchMeta(documents=tuple(metas))


PAIR = IterationMeta(
    microbatches=(packed((1, A), (2, [])), packed((-3, A), (-4, B), (5, B)), packed((6, [])), packed((-7, B), (8, [])))
)
"""Two pairs; nothing but deferred images is encoded with the third microbatch, and none with the last."""


def test_deferred_images_are_works_of_the_microbatch_before() -> None:
    batching = make_batching(PAIR, vlm(), 2)
    assert batching.works == (
        Work(module=0, microbatch=0, sub_microbatch=0),
        Work(module=0, microbatch=0, sub_microbatch=1),
        Work(module=0, microbatch=0, sub_microbatch=2),
        Work(module=1, microbatch=0, sub_microbatch=0, after=(0,)),
        Work(module=0, microbatch=1, sub_microbatch=0),
        Work(module=1, microbatch=1, sub_microbatch=0, after=(1, 2, 4)),
        Work(module=0, microbatch=2, sub_microbatch=0),
        Work(module=1, microbatch=2, sub_microbatch=0),
        Work(module=1, microbatch=3, sub_microbatch=0, after=(6,)),
    )
    samples = [[image.sample for image in item.units] for item in batching.items if item.work.module == 0]
    assert samples == [[1, 1], [3], [3, 4], [5], [7]] or samples == [[1, 1], [3, 3], [4], [5], [7]]
    assert [item.owner for item in batching.items] == [0, 1, 1, 0, 1, 1, 3, 2, 3]
    check_conservation(PAIR, batching)
    assert PAIR.num_deferred == 3
    kept = without_deferral(PAIR, {1, 3})
    assert kept.num_deferred == 0
    assert not any(item.deferred for item in make_batching(kept, vlm(), 2).items)
    assert without_deferral(PAIR, {3}).num_deferred == 2


@pytest.mark.parametrize(
    ("microbatches", "message"),
    [
        ([packed((-1, A))], "microbatch 0: the document of sample 1 is deferred, but there is no microbatch before it"),
        (
            [packed((1, A)), packed((2, A), (-3, A))],
            "microbatch 1: the document of sample 3 is deferred, but comes after the document of sample 2",
        ),
        ([packed((1, A)), packed((-2, []))], "microbatch 1: the document of sample 2 is deferred, but it has no image"),
        (
            [packed((1, A)), packed((-2, A)), packed((-3, A))],
            "microbatches 1 and 2 both have deferred documents, which would join more than two",
        ),
    ],
)
def test_what_cannot_be_deferred(microbatches: list[MicrobatchMeta], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_batching(IterationMeta(microbatches=tuple(microbatches)), vlm())


def changed(batching: Batching, number: int, **fields: object) -> Batching:
    items = list(batching.items)
    items[number] = replace(items[number], **fields)  # type: ignore[arg-type]
    return replace(batching, items=tuple(items))


def test_conservation_over_two_microbatches() -> None:
    batching = make_batching(PAIR, vlm())
    deferred, kept = 1, 3
    assert batching.items[deferred].deferred and batching.items[kept].owner == 1
    with pytest.raises(DataError, match="microbatch 1: image 0 of sample 3 occurs 1 times in the batch, but 0 times"):
        check_conservation(PAIR, changed(batching, deferred, units=batching.items[deferred].units[1:]))
    with pytest.raises(DataError, match="microbatch 1 defers 3 images, but 0 of its images are in vision works of the"):
        late = replace(batching.items[deferred].work, microbatch=1, sub_microbatch=9)
        check_conservation(PAIR, changed(batching, deferred, deferred=False, work=late))
    with pytest.raises(DataError, match=r"microbatch 1: .* comes after works \(3,\), but what it reads comes from"):
        alone = replace(batching.items[4].work, after=(kept,))
        check_conservation(PAIR, changed(batching, 4, work=alone))
    with pytest.raises(DataError, match="microbatch 1 defers 0 images, but 3 of its images"):
        check_conservation(without_deferral(PAIR, {1}), batching)


def parts_of(spec: ModelSpec, placement: ChunkPlacement = "loop", segments: int = 1) -> Partition:
    return partition(spec, 2, dict.fromkeys(("vision", "language"), segments), reference_sizes(spec, 64), placement)


def problem_of(
    meta: IterationMeta, placement: ChunkPlacement = "loop", segments: int = 1, limits: Sequence[float] | None = None
) -> PlanningProblem:
    spec = vlm(4, 4)
    batching = make_batching(meta, spec, 1)
    parts = parts_of(spec, placement, segments)
    return make_problem(spec, parts, batching, FlopsCosts.of(PLANNER), PLANNER, limits=limits, submesh=Submesh())


def sound(plan: Plan, problem: PlanningProblem) -> None:
    check(plan, problem)
    check_transport(lower(plan, problem, sharded=False))


@pytest.mark.parametrize("name", [name for name, schedule in CATALOGUE.items() if not schedule.refusal])
def test_every_schedule_plans_pairs(name: str) -> None:
    schedule = CATALOGUE[name]
    passes = 2 if schedule.placement == "v" else schedule.least_passes
    problem = problem_of(PAIR, schedule.placement, passes)
    for plan in (schedule.make(problem), schedule.separated().make(problem), schedule.braided().make(problem)):
        sound(plan, problem)


def test_the_search_plans_pairs() -> None:
    problem = problem_of(PAIR)
    result = search(problem, SearchOptions(budget_evaluations=200, seed=3))
    sound(result.plan, problem)
    assert simulate(problem, result.plan).makespan_s <= simulate(problem, CATALOGUE["1F1B"].make(problem)).makespan_s


def test_drawings_mark_deferred_works() -> None:
    problem, plain = in_pairs((1, 1), 4), in_pairs((1, 1), 4, 0.0)
    drawn, without = (text(simulate(p, CATALOGUE["1F1B"].make(p)), 400) for p in (problem, plain))
    assert all(name in drawn for name in ("v0>", "V0>", "v0-", "v2>", "V2>")) and "1>" not in drawn
    assert "> of images that the next microbatch reads" in drawn and ">" not in without
    assert "F0.1&gt; vision s0" in svg(simulate(problem, CATALOGUE["1F1B"].make(problem)))


def test_memory_belongs_to_the_microbatch_that_has_the_document() -> None:
    batching = make_batching(PAIR, vlm(), 1)
    assert components(problem_of(PAIR).graph) == [item.owner for item in batching.items]


def test_pairs_that_do_not_fit_are_not_deferred() -> None:
    """The first microbatch has more images than the second; the third one has text alone."""
    meta = IterationMeta(microbatches=(packed((1, [*B, *B])), packed((-3, B)), packed((6, [])), packed((-7, B))))
    together, alone = (footprints(problem_of(m)) for m in (meta, without_deferral(meta, {1, 3})))
    between = [(together[0] + max(alone)) / 2] * 2
    assert max(*alone, *together[1:]) < between[0] < together[0]
    assert oversize_pairs(problem_of(meta)) == oversize_pairs(problem_of(meta, limits=[together[0]] * 2)) == ()
    assert oversize_pairs(problem_of(meta, limits=between)) == (1,)
    assert oversize_pairs(problem_of(meta, limits=[1.0] * 2)) == (1, 3)
    planner = IterationPlanner(Job(
        spec=vlm(4, 4), partition=parts_of(vlm(4, 4)), section=PLANNER, costs=FlopsCosts.of(PLANNER),
        schedule=CATALOGUE["interleave"], sub_microbatch_size=1, sharded=False, activation_limits=tuple(between),
    ))  # fmt: skip
    plan = planner.plan(meta)
    assert plan.batching.not_deferred == (1,)
    assert sum(item.deferred for item in plan.batching.items) == 1
    assert IterationPlanner(replace(planner.job, activation_limits=None)).plan(meta).batching.not_deferred == ()


def footprints(problem: PlanningProblem) -> list[float]:
    """Bytes of the works of each microbatch on their most loaded rank, if all are kept."""
    microbatch = [work.microbatch for work in problem.graph.works]
    memory = Memory.of(problem, microbatch, {node: problem.options(*node)[0] for node in problem.graph.nodes()})
    ranks = range(problem.graph.num_ranks)
    return [max(memory.footprint(c, rank) for rank in ranks) for c in range(memory.num_components)]


@pytest.mark.parametrize(("cp", "tp", "shared"), [(1, 1, False), (2, 1, False), (1, 2, True), (2, 2, True)])
@given(data=st.data())
def test_features_of_two_microbatches_fill_all_slots_once(cp: int, tp: int, shared: bool, data: st.DataObject) -> None:
    """Whichever ranks have which images: of each microbatch every feature comes once, from the works that feed it."""
    counts = st.lists(st.sampled_from([[], A, B]), min_size=1, max_size=3)
    microbatches, before = [], False
    for index in range(data.draw(st.integers(1, 5))):
        grids = data.draw(counts)
        ahead = data.draw(st.integers(0, len(grids))) if index and not before else 0
        names = [(10 * index + n) * (-1 if n <= ahead and all(grids[:n]) else 1) for n in range(1, len(grids) + 1)]
        microbatches.append(packed(*zip(names, grids, strict=True)))
        before = min(names) < 0
    meta = IterationMeta(microbatches=tuple(microbatches))
    spec, submesh = vlm(), Submesh(cp=cp, tp=tp, data_encoder=shared)
    batching = make_batching(meta, spec, data.draw(st.integers(0, 2)))
    check_conservation(meta, batching)
    layout = IterationLayout(submesh, batching, meta).of_module["vision"]
    assert isinstance(layout, ImagesLayout)
    for item in batching.items:
        if item.work.module == 1:
            found = [
                layout.feature_indices(work, c, t)
                for work in item.work.after
                for c in range(cp)
                for t in (range(tp) if shared else (0,))
            ]
            features = sorted(int(i) for rows in found for i in rows if i >= 0)
            assert features == list(range(sum(image.num_tokens for image in meta.microbatches[item.owner].images)))


def test_iterations_without_a_backward_have_pairs_too() -> None:
    spec = vlm(4, 4)
    for name in ("1F1B", "interleave", "GPipe"):
        planner = IterationPlanner(Job(
            spec=spec, partition=parts_of(spec), section=PLANNER, costs=FlopsCosts.of(PLANNER),
            schedule=CATALOGUE[name].eager(int(name == "1F1B")), sub_microbatch_size=0, sharded=True, check_plans=True,
        ))  # fmt: skip
        plan = planner.plan(PAIR, forward_only=True)
        assert {action.kind for order in plan.result.plan.orders for action in order} == {Kind.F}
