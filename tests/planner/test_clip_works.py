"""Works of text-to-video iterations: each clip in one DiT work, behind one text work with just its prompts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import DataError, PlanError
from mmtrain.modality.metadata import ClipMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import reference_sizes
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.planner.layout import IterationLayout
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.graph import Work
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import Division
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize
from tests.models.dits import t2v
from tests.planner.specs import microbatch, vlm
from tests.planner.test_batching import with_items


def clip(sample: int, frames: int = 1, text: int = 4, side: int = 4, blank: bool = False) -> ClipMeta:
    tokens = frames * side * side // 4
    return ClipMeta(
        sample=sample, frames=frames, height=side, width=side, num_tokens=tokens, num_text_tokens=text, blank=blank
    )


def iteration(*groups: tuple[ClipMeta, ...]) -> IterationMeta:
    return IterationMeta(microbatches=tuple(MicrobatchMeta(clips=group) for group in groups))


SPEC: ModelSpec = model_spec(t2v())
COSTS = FlopsCosts.of(PlannerConfig())
META = iteration((clip(0, 3), clip(1, 1, 6), clip(2, 2)), (clip(3, 4, 2),))


def test_text_works_come_first_and_each_feeds_one_dit_work() -> None:
    batching = make_batching(META, SPEC, 2)
    assert batching.modules == ("language", "dit")
    assert batching.works == (
        Work(module=0, microbatch=0, sub_microbatch=0),
        Work(module=0, microbatch=0, sub_microbatch=1),
        Work(module=1, microbatch=0, sub_microbatch=0, after=(0,)),
        Work(module=1, microbatch=0, sub_microbatch=1, after=(1,)),
        Work(module=0, microbatch=1, sub_microbatch=0),
        Work(module=1, microbatch=1, sub_microbatch=0, after=(4,)),
    )
    samples = [[c.sample for c in item.units] for item in batching.items]
    assert samples == [[0], [1, 2], [0], [1, 2], [3], [3]]
    assert batching.sizes[1] == WorkSize(rows=10, pairs=6 * 7 // 2 + 4 * 5 // 2, outputs=10)
    assert batching.sizes[3] == WorkSize(
        rows=12, pairs=4 * 4 + 8 * 8, outputs=12, cross_pairs=4 * 6 + 8 * 4, texts=10, clips=2, calls=2
    )
    check_conservation(META, batching)


@pytest.mark.parametrize(("size", "counts"), [(0, [1, 1]), (1, [3, 1]), (2, [2, 1]), (9, [1, 1])])
def test_number_of_sub_microbatches(size: int, counts: list[int]) -> None:
    batching = make_batching(META, SPEC, size)
    for module in (0, 1):
        assert [sum(w.module == module and w.microbatch == m for w in batching.works) for m in (0, 1)] == counts


def test_works_have_equal_flops() -> None:
    """A clip of 8 frames asks for more than four of one."""
    meta = iteration((clip(0, 8), *(clip(i) for i in range(1, 5))))
    batching = make_batching(meta, SPEC, 3)
    assert [len(item.units) for item in batching.items] == [1, 4, 1, 4]


def test_clips_of_one_bucket_and_length_of_prompt_are_one_call_of_a_dit() -> None:
    (size,) = make_batching(iteration((clip(0), clip(1), clip(2, 1, 6), clip(3, 2))), SPEC).sizes[1:]
    assert (size.clips, size.calls) == (4, 3)
    turned = [replace(clip(0), height=2, width=4), replace(clip(1), height=4, width=2)]
    (size,) = make_batching(iteration(turned), SPEC).sizes[1:]
    assert (size.clips, size.calls) == (2, 2), "of as many tokens, but in other rows"


def test_a_blank_clip_is_computed_but_has_no_loss() -> None:
    batching = make_batching(iteration((clip(0), clip(1, blank=True))), SPEC)
    assert (batching.sizes[1].rows, batching.sizes[1].outputs) == (8, 4)
    check_conservation(iteration((clip(0), clip(1, blank=True))), batching)


clips = st.builds(clip, st.integers(0, 99), st.integers(1, 9), st.integers(1, 50), st.sampled_from([2, 4, 8]))


@given(st.lists(st.lists(clips, min_size=1, max_size=8).map(tuple), min_size=1, max_size=4), st.integers(0, 9))
def test_nothing_is_lost(groups: list[tuple[ClipMeta, ...]], size: int) -> None:
    meta = iteration(*groups)
    batching = make_batching(meta, SPEC, size)
    check_conservation(meta, batching)
    dit = [s for w, s in zip(batching.works, batching.sizes, strict=True) if w.module == 1]
    every = [c for group in groups for c in group]
    assert sum(s.rows for s in dit) == sum(c.num_tokens for c in every)
    assert sum(s.texts for s in dit) == sum(c.num_text_tokens for c in every)
    assert sum(s.clips for s in dit) == len(every)
    assert sum(s.cross_pairs for s in dit) == sum(c.num_tokens * c.num_text_tokens for c in every)


def with_clips(batching: Batching, work: int, samples: list[int]) -> Batching:
    known = {c.sample: c for m in META.microbatches for c in m.clips}
    found = tuple(known[sample] for sample in samples)
    return with_items(batching, {work: {"units": found}})


@pytest.mark.parametrize(
    ("work", "samples", "message"),
    [
        (3, [1], "the clip of sample 2 occurs 1 times in the batch, but 0 times in its DiT works"),
        (1, [1, 1], "the clip of sample 1 occurs 1 times in the batch, but 2 times in its text works"),
        (3, [2, 1], "the clip of sample 2 is at the position of the clip of sample 1"),
        (5, [0], "microbatch 1: the clip of sample 3 occurs 1 times in the batch, but 0 times in its DiT works"),
    ],
)
def test_lost_doubled_and_moved_clips_are_named(work: int, samples: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_conservation(META, with_clips(make_batching(META, SPEC, 2), work, samples))


def test_lost_tokens_are_counted() -> None:
    batching = make_batching(META, SPEC, 2)
    for work, what in ((1, "text"), (3, "DiT")):
        size = replace(batching.sizes[work], rows=batching.sizes[work].rows - 1)
        with pytest.raises(DataError, match=f"but its {what} works process"):
            check_conservation(META, with_items(batching, {work: {"size": size}}))


@pytest.mark.parametrize("after", [(), (0,), (0, 1)])
def test_a_dit_work_after_another_text_work_is_refused(after: tuple[int, ...]) -> None:
    batching = make_batching(META, SPEC, 2)
    work = replace(batching.works[3], after=after)
    with pytest.raises(DataError, match="but what it reads comes from the text work of the clip of sample 1"):
        check_conservation(META, with_items(batching, {3: {"work": work}}))


def test_strange_works_and_batches_are_refused() -> None:
    batching = make_batching(META, SPEC, 2)
    with pytest.raises(DataError, match="a work belongs to microbatch 1, but the batch has 1"):
        check_conservation(IterationMeta(microbatches=META.microbatches[:1]), batching)
    with pytest.raises(DataError, match="microbatch 0 has no clip"):
        make_batching(iteration(()), SPEC)
    with pytest.raises(
        DataError,
        match="has 1 documents, the first the document of sample 1, but the model reads clips",
    ):
        make_batching(IterationMeta(microbatches=(microbatch(1, []),)), SPEC)
    with pytest.raises(DataError, match="has 3 clips, the first the clip of sample 0, but the model has no diffusion"):
        make_batching(META, vlm())


def test_the_whole_work_is_on_one_rank() -> None:
    batching = make_batching(META, SPEC, 2)
    layout = IterationLayout(Submesh(), batching, META)
    sizes = [layout.local_size(work, 0, 0) for work in range(len(batching.works))]
    assert tuple(sizes) == batching.sizes
    assert SPEC.module("dit").output_shape(1, sizes[3]) == (12 + 10 + 7 * 2, 32)
    assert SPEC.module("dit").output_shape(4, sizes[3]) == ()
    with pytest.raises(PlanError, match="submesh has 2 context-parallel ranks"):
        IterationLayout(Submesh(cp=2), batching, META).local_size(0, 0, 0)


def test_tensor_ranks_divide_the_rows_of_prompts_and_of_each_clip() -> None:
    batching = make_batching(META, SPEC, 2)
    layout = IterationLayout(Submesh(tp=3), batching, META)
    assert [size.rows for size in batching.sizes] == [4, 10, 12, 12, 2, 16]
    for tp_rank in range(3):
        sizes = [layout.local_size(work, 0, tp_rank) for work in range(len(batching.works))]
        assert [size.rows for size in sizes] == [2, 4, 4, 2 + 3, 1, 6]
        assert SPEC.module("language").output_shape(4, sizes[1]) == (4, 24)
        assert SPEC.module("dit").output_shape(1, sizes[3]) == (2 + 3 + 10 + 7 * 2, 32)


def test_tensor_ranks_with_whole_rows_send_all_of_them_without_padding() -> None:
    batching = make_batching(META, SPEC, 2)
    layout = IterationLayout(Submesh(tp=3, whole_rows=True), batching, META)
    assert [layout.local_size(work, 0, 2) for work in range(len(batching.works))] == list(batching.sizes)
    sizes = {"language": batching.sizes[0], "dit": batching.sizes[2]}
    parts = partition(SPEC, 1, {"language": 2, "dit": 2}, sizes)
    one, whole, divided = (
        make_problem(SPEC, parts, batching, COSTS, PlannerConfig(), submesh=submesh)
        for submesh in (Submesh(), Submesh(tp=2, whole_rows=True), Submesh(tp=2))
    )
    assert whole.output_bytes == one.output_bytes
    for stage in range(len(parts.stages)):
        held = [problem.options(stage, 3)[0].activation_bytes for problem in (one, whole, divided)]
        assert held[0] >= held[1] >= held[2], (stage, held)


def test_tensor_ranks_send_their_rows_of_a_dit_and_hold_their_columns() -> None:
    batching = make_batching(META, SPEC, 2)
    sizes = {"language": batching.sizes[0], "dit": batching.sizes[2]}
    parts = partition(SPEC, 1, {"language": 2, "dit": 2}, sizes)
    found = {tp: make_problem(SPEC, parts, batching, COSTS, PlannerConfig(), submesh=Submesh(tp=tp)) for tp in (1, 2)}
    text, dit = 1, 3
    assert found[2].output_bytes[text] == tuple(half / 2 for half in found[1].output_bytes[text])
    for tp in (1, 2):
        assert found[tp].output_bytes[dit] == ((12 / tp + 10 + 7 * 2) * 32 * 4, 0.0)
    size = batching.sizes[dit]
    for stage in parts.of_module("dit"):
        layers = [layer.of_rank(Division(tp=2)) for layer in SPEC.module("dit").layers[slice(*stage.layers)]]
        (whole,), (mine,) = (found[tp].options(stage.index, dit) for tp in (1, 2))
        assert mine.activation_bytes == pytest.approx(sum(layer.activation_bytes(size) for layer in layers))
        assert mine.weight_bytes == pytest.approx(sum(layer.linear_bytes(size) for layer in layers))
        assert whole.activation_bytes / 2 < mine.activation_bytes < whole.activation_bytes


WITH_VAE = model_spec(t2v(vae="wan"))


def test_a_vae_has_a_work_of_its_own_for_each_dit_work() -> None:
    batching = make_batching(META, WITH_VAE, 2)
    assert batching.modules == ("vae", "language", "dit")
    assert [(w.module, w.after) for w in batching.works[:6]] == [
        (0, ()), (0, ()), (1, ()), (1, ()), (2, (0, 2)), (2, (1, 3))
    ]  # fmt: skip
    assert batching.works[8].after == (6, 7)
    assert batching.items[0].units == batching.items[2].units == batching.items[4].units
    assert batching.sizes[1] == WorkSize(rows=16 + 5 * 16, pairs=16 * 16 * 3, outputs=3 * 16)
    check_conservation(META, batching)


def test_vae_works_that_lose_clips_or_feed_others_are_refused() -> None:
    batching = make_batching(META, WITH_VAE, 2)
    with pytest.raises(DataError, match=r"the clip of sample 1 .* 2 times in its VAE works"):
        check_conservation(META, with_clips(batching, 1, [1, 1]))
    size = replace(batching.sizes[1], outputs=batching.sizes[1].outputs - 1)
    with pytest.raises(DataError, match="but its VAE works process"):
        check_conservation(META, with_items(batching, {1: {"size": size}}))
    for after in ((2,), (0,), (2, 0), (1, 2), (0, 3)):
        work = replace(batching.works[4], after=after)
        with pytest.raises(DataError, match=r"what it reads comes from the VAE work of .* and the text work of"):
            check_conservation(META, with_items(batching, {4: {"work": work}}))


def test_a_vae_has_no_backward_and_is_on_the_first_rank_alone() -> None:
    parts = partition(WITH_VAE, 2, {}, reference_sizes(WITH_VAE, 64))
    assert [(s.module, s.pp_rank, s.layers) for s in parts.of_module("vae")] == [("vae", 0, (0, 1))]
    batching = make_batching(META, WITH_VAE, 2)
    problem = make_problem(WITH_VAE, parts, batching, COSTS, PlannerConfig())
    for work in (0, 1):
        (option,) = problem.options(0, work)
        assert option.forward_s > 0
        assert option.backward_input_s == option.backward_weight_s == option.activation_bytes == 0
        assert not problem.graph.has_backward(0, work)
    assert problem.output_bytes[0][0] == batching.sizes[0].outputs * 4 * 4
    # Each rank of a submesh encodes everything.
    for shares, shared in ((1, Submesh()), (2, Submesh(tp=2))):
        costs = FlopsCosts.of(PlannerConfig(), shares=shares)
        divided = make_problem(WITH_VAE, parts, batching, costs, PlannerConfig(), submesh=shared)
        assert divided.options(0, 0) == problem.options(0, 0)
        assert divided.output_bytes[0][0] == problem.output_bytes[0][0]
        assert IterationLayout(shared, batching, META).local_size(0, 0, 1) == batching.sizes[0]
