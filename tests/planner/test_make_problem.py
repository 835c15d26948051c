from dataclasses import replace

import pytest

from mmtrain.config.config import load
from mmtrain.config.planner import DeviceConfig, PlannerConfig, SearchConfig
from mmtrain.costs.cost_model import FlopsCosts, LayerTimes
from mmtrain.costs.overheads import Overheads
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import make_batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.partition.partition import partition
from mmtrain.planner.prices import LEAST_BACKWARD_S
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import Rates, WorkSize
from tests.planner.specs import META, microbatch, vlm

CONFIG = PlannerConfig(device=DeviceConfig(flops_per_s=1e3, p2p_latency_s=0.5, p2p_bytes_per_s=8.0))


def problem(
    spec: ModelSpec, config: PlannerConfig = CONFIG, *, meta: IterationMeta = META, forward_only: bool = False
) -> PlanningProblem:
    batching = make_batching(meta, spec)
    sizes = dict(zip(("vision", "language"), batching.sizes, strict=False))
    parts = partition(spec, 2, {"vision": 1, "language": 1}, sizes)
    return make_problem(spec, parts, batching, FlopsCosts.of(config), config, forward_only=forward_only)


def test_seconds_and_bytes_come_from_the_layers() -> None:
    found = problem(vlm())
    (vision,) = found.options(0, 0)  # two layers of 52 rows
    assert vision.forward_s == pytest.approx(2 * 52 / 1e3)
    assert vision.backward_weight_s == pytest.approx(2 * 52 / 1e3)
    assert vision.backward_input_s == pytest.approx(52 / 1e3)  # the first layer's input needs none
    assert vision.activation_bytes == 2 * 52 * 4
    assert vision.weight_bytes == 2 * 52 * 3
    assert found.output_bytes[0] == (104.0, 104.0)
    assert found.output_bytes[1] == (46.0, 0.0)
    assert found.p2p.latency_s == 0.5
    assert found.memory_limit_bytes == (None, None)


def test_memory_limit_is_in_gib() -> None:
    limited = PlannerConfig(search=SearchConfig(activation_memory_gib=2.0), device=DeviceConfig(flops_per_s=1e3))
    assert problem(vlm(), limited).memory_limit_bytes == (2.0 * 2**30,) * 2


def test_frozen_encoder_has_no_backward_and_keeps_one_layer_at_a_time() -> None:
    found = problem(vlm(frozen_vision=True))
    assert found.graph.backward == ((False, False), (True, True), (True, True), (False, False), (True, True))
    (vision,) = found.options(0, 0)
    assert (vision.backward_input_s, vision.backward_weight_s) == (0.0, 0.0)
    assert vision.activation_bytes == 52 * 4


def test_frozen_language_model_has_a_backward_only_where_images_come_before_it() -> None:
    found = problem(vlm(frozen_language=True))
    assert [row[0] for row in found.graph.backward] == [True, True, False, True, True]
    (language,) = found.options(3, 1)
    assert language.backward_input_s > 0
    assert language.backward_weight_s == LEAST_BACKWARD_S
    assert language.weight_bytes == 0


def test_stage_without_flops_still_has_its_backward() -> None:
    spec = vlm(2, 2)  # stage 2 is the embedding alone
    found = problem(spec)
    (embedding,) = found.options(2, 2)
    assert embedding.forward_s == 0
    assert embedding.has_backward


def test_weight_gradients_of_a_layer_without_linear_layers_are_in_the_first_half() -> None:
    spec = vlm()
    vision, language = spec.modules
    first = replace(vision.layers[0], linear_bytes=Rates())  # as a convolution of patches
    found = problem(ModelSpec(modules=(replace(vision, layers=(first, *vision.layers[1:])), language)))
    (stage,), (linear,) = found.options(0, 0), problem(spec).options(0, 0)
    assert stage.backward_weight_s == pytest.approx(52 / 1e3)  # the second layer's
    assert stage.backward_input_s == pytest.approx(linear.backward_input_s + 52 / 1e3)
    assert stage.weight_bytes == 52 * 3


def with_head(chunk: int, *more: str, tokens: int = 10_000) -> tuple[PlanningProblem, ModelSpec, WorkSize]:
    """A text job on two pipeline ranks with the head in pieces, or in one. Args: more: overrides."""
    values = [
        "parallelism.pipeline_parallel_degree=2",
        f"model.language.config.vocab_size={tokens}",
        f"training.loss_chunk_tokens={chunk}",
        "planner.device.flops_per_s=2e10",
        *more,
    ]
    job = make_job(load("debug_text.toml", [f"--{value}" for value in values]))
    meta = IterationMeta(microbatches=tuple(microbatch(i, [], tokens) for i, tokens in enumerate((90, 200))))
    batching = make_batching(meta, job.spec)
    return IterationPlanner(job).problem(meta, searched=True)[1], job.spec, batching.sizes[-1]


def test_a_head_in_pieces_keeps_no_logits_and_works_in_its_backward() -> None:
    (pieces, spec, size), (whole, plain, _) = with_head(16), with_head(0)
    head, before = spec.text.layers[-1], plain.text.layers[-1]
    ours, theirs = pieces.options(1, 1)[0], whole.options(1, 1)[0]
    assert (head.loss_chunk_tokens, before.loss_chunk_tokens) == (16, 0)
    product_s = before.matmul_flops(size) / 2e10
    assert ours.forward_s == pytest.approx(theirs.forward_s - product_s)
    assert ours.backward_input_s == pytest.approx(theirs.backward_input_s + 2 * product_s)  # logits, weight gradient
    assert ours.backward_weight_s == pytest.approx(theirs.backward_weight_s - product_s)
    assert theirs.activation_bytes - ours.activation_bytes == size.outputs * 4 * 10_000
    assert (ours.restored_bytes, theirs.restored_bytes) == (head.temporary_bytes(size), 0.0)
    assert head.temporary_bytes(size) == 4 * 10_000 * (16 + 128) + 4 * 128 * size.outputs
    assert theirs.weight_bytes - ours.weight_bytes == before.linear_bytes(size)


def test_a_part_of_a_head_in_pieces_repeats_its_product() -> None:
    more = ('parallelism.vocabulary_parallel="pipeline"',)
    (pieces, spec, size), (whole, plain, _) = with_head(16, *more), with_head(0, *more)
    stages = {module.name: module.stages[0] for module in pieces.graph.modules}
    work = [w for w, of in enumerate(pieces.graph.works) if pieces.graph.modules[of.module].name == "head.1"][-1]
    ours, theirs = (found.options(stages["head.1"], work)[0] for found in (pieces, whole))
    head, before = (of.module("head.1").layers[0] for of in (spec, plain))
    product_s = before.matmul_flops(size) / 2e10
    assert ours.forward_s == theirs.forward_s == pytest.approx(product_s)
    assert ours.backward_input_s == pytest.approx(3 * product_s)
    assert theirs.backward_input_s == pytest.approx(product_s) == theirs.backward_weight_s
    assert theirs.activation_bytes - ours.activation_bytes == size.outputs * 4 * 5_000
    assert ours.restored_bytes == head.temporary_bytes(size) == 4 * 5_000 * (16 + 128) + 8 * 128 * size.outputs


def test_under_a_limit_each_mix_of_strategies_has_the_temporary_bytes_of_the_head() -> None:
    found, spec, size = with_head(16, "planner.search.activation_memory_gib=0.2")
    options = found.options(1, 1)
    assert len(options) > 2
    assert {option.restored_bytes for option in options} == {spec.text.layers[-1].temporary_bytes(size)}
    with pytest.raises(PlanError, match="over the memory limit of"):  # of which the pieces alone take 6 MB
        with_head(16, "planner.search.activation_memory_gib=0.005")


def test_forward_only_a_head_in_pieces_needs_its_temporary_bytes() -> None:
    job = make_job(load("debug_text.toml", ["--training.loss_chunk_tokens=16"]))
    meta = IterationMeta(microbatches=(microbatch(0, [], 90),))
    plan = IterationPlanner(job).plan(meta, forward_only=True)
    head, size = job.spec.text.layers[-1], make_batching(meta, job.spec).sizes[0]
    expected = head.activation_bytes(size) + head.temporary_bytes(size)
    assert plan.problem.options(0, 0)[0].activation_bytes >= expected > head.activation_bytes(size)


def test_forward_only_has_no_backward_at_all() -> None:
    found = problem(vlm(), forward_only=True)
    assert not found.graph.has_any_backward
    assert found.options(0, 0)[0].forward_s == problem(vlm()).options(0, 0)[0].forward_s


def test_bytes_are_those_of_the_rank_with_most_patches() -> None:
    spec, meta = vlm(), IterationMeta(microbatches=(microbatch(0, [(8, 8), (4, 4)]),))
    batching = make_batching(meta, spec)
    parts = partition(
        spec, 2, {"vision": 1, "language": 1}, dict(zip(("vision", "language"), batching.sizes, strict=True))
    )
    found = {
        cp: make_problem(spec, parts, batching, FlopsCosts.of(CONFIG, shares=cp), CONFIG, submesh=Submesh(cp=cp))
        for cp in (1, 2)
    }
    vision, language = 0, 1
    for work, share in ((vision, 64 / 80), (language, 1 / 2)):
        stage = parts.of_module(batching.modules[work])[0].index
        (whole,), (mine,) = (found[cp].options(stage, work) for cp in (1, 2))
        for name in ("activation_bytes", "weight_bytes"):
            assert getattr(mine, name) == pytest.approx(share * getattr(whole, name)), name
        assert found[2].output_bytes[work][0] == pytest.approx(share * found[1].output_bytes[work][0])


def test_equal_works_share_an_option_list() -> None:
    twice = IterationMeta(microbatches=(microbatch(1, [(4, 4)]), microbatch(2, [(4, 4)])))
    found = problem(vlm(), meta=twice)
    assert found.cost_index == ((0, 1), (2, 3), (0, 1), (2, 3))


def test_actions_and_messages_have_a_fixed_part() -> None:
    spec, batching = vlm(), make_batching(META, vlm())
    sizes = dict(zip(("vision", "language"), batching.sizes, strict=False))
    parts = partition(spec, 2, {"vision": 1, "language": 1}, sizes)
    plain = FlopsCosts.of(CONFIG)
    free = make_problem(spec, parts, batching, plain, CONFIG).options(0, 0)[0]
    overheads = Overheads(
        forward_s=1.0, backward_s=2.0, backward_input_s=4.0, backward_weight_s=8.0, send_s=16.0, receive_s=32.0
    )
    paid = make_problem(spec, parts, batching, replace(plain, overheads=overheads), CONFIG).options(0, 0)[0]
    assert paid.forward_s - free.forward_s == pytest.approx(1.0 + 16.0)
    assert paid.duration_s(Kind.B) - free.duration_s(Kind.B) == pytest.approx(2.0 + 32.0)
    assert paid.duration_s(Kind.W) - free.duration_s(Kind.W) == pytest.approx(4.0 + 8.0 - 2.0)
    assert paid.activation_bytes == free.activation_bytes


def test_layers_are_asked_for_once_a_size() -> None:
    asked: list[tuple[str, int, WorkSize, bool]] = []

    class Counting(FlopsCosts):
        def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
            asked.append((module.name, index, size, input_grad))
            return super().layer(module, index, size, input_grad=input_grad)

    spec = vlm()
    twice = IterationMeta(microbatches=(microbatch(1, [(4, 4)]), microbatch(2, [(4, 4)])))
    batching = make_batching(twice, spec)
    parts = partition(spec, 2, {"vision": 1, "language": 1}, dict(zip(batching.modules, batching.sizes, strict=False)))
    make_problem(spec, parts, batching, Counting.of(CONFIG), CONFIG)
    assert len(asked) == len(set(asked)) == 4  # two kinds of vision layer by input_grad, embedding, language layer
