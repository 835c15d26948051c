"""Plans, costs and memory of jobs whose vocabulary is divided over the pipeline ranks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.costs.job_costs import cost_model
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.operator_graph import Phase
from mmtrain.errors import ConfigError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import TypicalSizes, reference_sizes
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory.rank_bytes import Sharding
from mmtrain.planner.partition.pipeline_layout import show_layout
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.simulator.make_job import job_spec, make_job
from mmtrain.simulator.pipeline_sums import PipelineSums
from mmtrain.simulator.shrink import shrink
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.simulator.workloads import draw
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.vocabulary import divided_vocabulary
from mmtrain.spec.work_size import WorkSize
from tests.costs.profiles import profile_of
from tests.simulator.test_pipeline_sums import NETWORK

SIZE = WorkSize(rows=96, pairs=2000, outputs=24)
VOCABULARY = 451  # neither 2 nor 4 divide it
OPEN = ("model.encoder.num_segments=0", "model.language.num_segments=0")
DIVIDED = 'parallelism.vocabulary_parallel="pipeline"'
SEARCHED = 'parallelism.vocabulary_parallel="search"'
UNTIED = "model.language.config.tie_word_embeddings=false"


def job(*overrides: str, pp: int = 4, blocks: int = 10, size: int = VOCABULARY) -> Config:
    """The debug job, with more layers and an odd vocabulary."""
    return config.load(
        "debug_vlm.toml",
        [
            f"parallelism.pipeline_parallel_degree={pp}",
            *OPEN,
            "model.encoder.config.depth=6",
            f"model.language.config.num_hidden_layers={blocks}",
            f"model.language.config.vocab_size={size}",
            "debug.check_plans=true",
            *overrides,
        ],
    )


def text_job(*overrides: str, pp: int = 4, blocks: int = 6, size: int = 448) -> Config:
    return config.load(
        "debug_text.toml",
        [
            f"parallelism.pipeline_parallel_degree={pp}",
            "training.global_batch_size=16",
            f"model.language.config.num_hidden_layers={blocks}",
            f"model.language.config.vocab_size={size}",
            "model.language.num_segments=0",
            *overrides,
        ],
    )


def batch(of: Config, microbatches: int = 6) -> IterationMeta:
    return draw(
        "mix", dataclasses.replace(TypicalSizes.typical(of), num_microbatches=microbatches), seed=0, iteration=0
    )


def specs(*overrides: str, parts: int = 4, tp: int = 1) -> tuple[ModelSpec, ModelSpec]:
    """The model, and it with its vocabulary divided."""
    whole = model_spec(job(*overrides).model, dtype_bytes=2)
    return whole, divided_vocabulary(whole, parts, tp)


def stages_of(made: Job, name: str) -> Sequence[tuple[int, tuple[int, int]]]:
    return [(stage.pp_rank, stage.layers) for stage in made.partition.of_module(name)]


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_plans_the_parts_and_no_transport_lets_its_program_hang(name: str, pp: int) -> None:
    chosen = job(DIVIDED, f'parallelism.pipeline_parallel_schedule="{name}"', 'planner.partition="dip"', pp=pp)
    plan = IterationPlanner(make_job(chosen)).plan(batch(chosen))  # which proves it on every transport
    names = [module.name for module in plan.problem.graph.modules]
    parts = range(pp)
    assert names == [*["vision", *(f"embed.{r}" for r in parts), "language", *(f"head.{r}" for r in parts), "loss"]]
    loss = [work for work in plan.batching.works if plan.batching.modules[work.module] == "loss"]
    assert [len(work.after) for work in loss] == [pp] * 6


@pytest.mark.parametrize("keys", [(), (DIVIDED,), (DIVIDED, "model.language.num_segments=2")])
def test_ranks_send_only_where_the_partition_says(keys: tuple[str, ...]) -> None:
    """As over the edges of the works of a batch that has all modalities."""
    chosen = job(*keys, 'planner.partition="dip"')
    made = make_job(chosen)
    graph = IterationPlanner(made).plan(batch(chosen)).problem.graph
    edges = [edge for node in graph.nodes() for edge in graph.inputs(*node) if not graph.is_local(edge)]
    hops = {(graph.stage_rank[edge.source], graph.stage_rank[edge.target]) for edge in edges}
    assert made.partition.hops(made.spec) == hops | {(target, source) for source, target in hops}


def test_searches_plan_the_parts_with_and_without_a_memory_limit() -> None:
    for more in ((), ("planner.search.activation_memory_gib=0.02",)):
        chosen = job(DIVIDED, *more)
        planner = IterationPlanner(make_job(chosen))
        prepared = planner.prepare(batch(chosen), searched=True)
        found = make_plan(prepared.problem, SearchOptions(budget_evaluations=20, budget_s=0.0))
        assert planner.finish(prepared, found).result.makespan_s <= prepared.first.makespan_s


def test_drawings_name_all_parts_of_a_matrix_alike() -> None:
    chosen = job(DIVIDED)
    timeline = IterationPlanner(make_job(chosen)).plan(batch(chosen)).result.timeline
    assert [*dict.fromkeys(timeline.stage_modules)] == ["vision", "embed", "language", "head", "loss"]


# -------------------------------------------------------------------------------------------- partition


@pytest.mark.parametrize("keys", [(), ('planner.partition="dip"',), ('planner.partition="mixed-latency"',)])
@pytest.mark.parametrize("schedule", ["interleave", "ZBV"])
def test_each_rank_has_its_parts_whatever_cuts_the_modules(keys: tuple[str, ...], schedule: str) -> None:
    made = make_job(job(DIVIDED, f'parallelism.pipeline_parallel_schedule="{schedule}"', *keys))
    for rank in range(4):
        for name in (f"embed.{rank}", f"head.{rank}"):
            assert stages_of(made, name) == [(rank, (0, 1))]
    assert stages_of(made, "loss") == [(3, (0, 1))]
    names = [module.name for module in made.partition.modules]
    assert names == [module.name for module in made.spec.modules]
    assert str(made.partition).endswith(", vocabulary divided")
    for module in ("vision", "language"):
        ends = [layers for _, layers in stages_of(made, module)]
        assert [a for a, _ in ends[1:]] == [b for _, b in ends[:-1]]


def test_ranks_without_language_layers_have_a_part_too() -> None:
    made = make_job(job(DIVIDED, 'planner.placement="parallel"'))
    of_language = {rank for rank, _ in stages_of(made, "language")}
    assert 0 not in of_language
    assert stages_of(made, "embed.0") == stages_of(made, "head.0") == [(0, (0, 1))]
    assert str(made.partition).count("on") == 2


def test_one_layout_cuts_a_whole_and_a_divided_model_at_the_same_layers() -> None:
    layout = 'model.language.pipeline_layout="Et*2|t*3|t*3|t*2,L"'
    whole, divided = (make_job(job(layout, *more)) for more in ((), (DIVIDED,)))
    assert stages_of(whole, "language") == stages_of(divided, "language")
    bounds = [layers for _, layers in stages_of(divided, "language")]
    assert show_layout(divided.spec.text, bounds) == "Et*2|t*3|t*3|t*2L"
    with pytest.raises(ConfigError, match=r"has the layers .*but the module has Et\*10L"):
        make_job(job(DIVIDED, 'model.language.pipeline_layout="Et*2|t*3|t*3|t*2N"'))


def test_the_rule_compares_modules_that_are_cut_and_not_the_parts() -> None:
    made = make_job(job(DIVIDED, 'planner.partition="dip"', pp=2, size=64))
    spec, sizes = made.spec, reference_sizes(made.spec, 256)
    vision, language = (spec.flops(name, sizes[name]).total for name in ("vision", "language"))
    assert spec.flops("head.0", sizes["head.0"]).total < min(vision, language) / 2
    ratio = [int(total // min(vision, language)) for total in (vision, language)]
    assert [len(stages_of(made, name)) for name in ("vision", "language")] == [2 * k for k in ratio]


# ----------------------------------------------------------------------------------- sums over the parts


@pytest.mark.parametrize(
    "keys", [(), (UNTIED,), ('model.language.trainable="lora"',), ("model.language.trainable=false",)]
)
@pytest.mark.parametrize(("parts", "tp"), [(2, 1), (4, 1), (3, 11)])
def test_parts_have_together_what_the_whole_has(keys: tuple[str, ...], parts: int, tp: int) -> None:
    whole, divided = specs(*keys, parts=parts, tp=tp)
    assert divided.num_params == whole.num_params
    counts = [sum(m.num_trainable_params for m in spec.modules) for spec in (whole, divided)]
    assert counts[0] == counts[1]
    before, after = ([spec.flops(m.name, SIZE) for m in spec.text_modules] for spec in (whole, divided))
    for name in ("forward", "backward_weight", "backward_input"):
        assert sum(getattr(x, name) for x in after) == pytest.approx(sum(getattr(x, name) for x in before))
    head, heads = whole.text.layers[-1], [m.layers[0] for m in divided.modules if m.layers[0].name == "head"]
    # Gradients of logits once, and the normed rows on each rank.
    width, e = whole.text.layers[0].output_width, 2
    waiting = sum(layer.linear_bytes(SIZE) for layer in heads) - head.linear_bytes(SIZE)
    assert waiting == (parts - 1) * width * e * SIZE.outputs
    logits = sum(layer.activation_bytes(SIZE) - (width * e + 16) * SIZE.outputs for layer in heads)
    assert logits == VOCABULARY * e * SIZE.outputs


def test_a_rank_holds_16_bytes_of_each_number_of_its_rows_and_of_tied_rows_once() -> None:
    width = 128
    for tied, matrices in ((True, 1), (False, 2)):
        chosen = job(DIVIDED, *([] if tied else [UNTIED]))
        made, sharding = make_job(chosen), Sharding.of(chosen)
        for rank in range(4):
            rows = made.spec.module(f"embed.{rank}").vocabulary
            assert rows is not None
            parts = {f"embed.{rank}", f"head.{rank}"}
            others = sum(
                layer.num_params
                for stage in made.partition.of_rank(rank)
                if stage.module not in parts
                for layer in made.spec.module(stage.module).layers[slice(*stage.layers)]
            )
            state = sharding.rank_state(made.spec, made.partition, rank)
            held = state.param_bytes + state.grad_bytes + state.optimizer_bytes
            assert held == 16 * (others + matrices * (rows.last - rows.first) * width)
            assert state.updated_params * 16 == held


def test_division_takes_the_matrices_off_the_first_and_last_rank() -> None:
    peaks = {}
    for how, keys in (("whole", ()), ("divided", (DIVIDED,))):
        chosen = text_job(UNTIED, *keys, size=44800)
        made, sharding = make_job(chosen), Sharding.of(chosen)
        peaks[how] = [sharding.rank_state(made.spec, made.partition, rank).peak_bytes(0.0) for rank in range(4)]
    matrix = 16 * 44800 * 128
    assert sum(peaks["whole"]) == pytest.approx(sum(peaks["divided"]))
    assert peaks["whole"][0] > matrix
    assert max(peaks["divided"]) < 0.6 * matrix


def test_rows_of_one_name_are_summed_over_pipelines_and_never_inside_of_one() -> None:
    for keys in ((), (UNTIED,)):
        of_one, of_two = ([*keys, DIVIDED, f"parallelism.data_parallel_replicate_degree={count}"] for count in (1, 2))
        alone, both = (
            PipelineSums.of([made.partition] * count, made.spec, Sharding.of(chosen), NETWORK)
            for count, chosen in ((1, job(*of_one)), (2, job(*of_two)))
            for made in (make_job(chosen),)
        )
        assert not any(len(message.ranks) > 1 for message in alone.messages)
        made = make_job(job(*of_one))
        summed = sum(message.num_bytes for message in both.messages) / 4
        assert summed == made.spec.num_params  # every parameter once, in float32
        assert all(len(message.ranks) == 2 for message in both.messages)


# ------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(("tp", "rows"), [(1, "divided"), (2, "divided"), (2, "whole")])
@pytest.mark.parametrize("trainable", ["true", "false"])
def test_operators_have_the_flops_and_parameters_of_the_parts(tp: int, rows: str, trainable: str) -> None:
    keys = (f"parallelism.tensor_parallel_degree={tp}", f'parallelism.tensor_parallel_rows="{rows}"')
    chosen = job(DIVIDED, *keys, f"model.language.trainable={trainable}", 'planner.hardware="h200"', size=452)
    spec = job_spec(chosen)
    costs = OperatorCosts.of(chosen, spec)
    for module in spec.text_modules:
        for index in {0, len(module.layers) - 1}:
            layer = module.layers[index]
            graph = costs.graph(module, index, input_grad=True)
            wanted = layer.flops(SIZE, input_grad=True)
            found = [sum(op.flops(SIZE) for op in graph.operators if op.phase is phase) for phase in Phase]
            expected = [wanted.forward, wanted.backward_input, wanted.backward_weight]
            assert found == pytest.approx([amount / tp for amount in expected]), module.name
            tape = costs._describers[module.name].tape(layer, input_grad=True)
            divided = 1 if layer.name == "norm" else tp
            assert sum(parameter.count for parameter in tape.parameters) == layer.num_params / divided
            seconds = costs.layer(module, index, SIZE, input_grad=True)
            assert seconds.forward_s > 0
            assert seconds.backward_input_s > 0 or layer.name in ("embed", "inputs")


def seconds_of(costs: OperatorCosts | MeasuredCosts, modules: Sequence[ModuleSpec], size: WorkSize) -> float:
    return sum(
        dataclasses.astuple(costs.layer(module, index, size, input_grad=True))[part]
        for module in modules
        for index, layer in enumerate(module.layers)
        if not layer.is_block
        for part in (0, 1, 2)
    )


def test_parts_of_a_large_head_take_about_as_long_as_the_whole() -> None:
    """The head of 151936 x 3584 at 2048 rows: with 4 parts 1.3 % more, which are the sums of the parts' results."""
    size = WorkSize(rows=2048, pairs=2048 * 1024, outputs=2048)
    keys = ("model.language.config.hidden_size=3584", "model.language.config.intermediate_size=18944", UNTIED)
    wide = text_job(*keys, 'planner.hardware="a800"', 'training.mixed_precision_param="bfloat16"', size=151936)
    whole = job_spec(wide)
    divided = divided_vocabulary(whole, 4)
    total, of_parts = (seconds_of(OperatorCosts.of(wide, spec), spec.text_modules, size) for spec in (whole, divided))
    assert total < of_parts < 1.05 * total
    heads = [m for m in divided.modules if m.layers[0].name == "head"]
    times = [seconds_of(OperatorCosts.of(wide, divided), [module], size) for module in heads]
    assert max(times) == min(times)


def test_a_profile_of_the_whole_layers_prices_their_parts(tmp_path: Path) -> None:
    plain = job()
    whole = job_spec(plain)
    profile_of(plain, whole, cost_model(plain, whole)).write(tmp_path / "profile.json")
    made = make_job(job(DIVIDED, f"planner.profile={tmp_path}/profile.json"))
    assert isinstance(made.costs, MeasuredCosts)
    seconds = [seconds_of(made.costs, spec.text_modules, SIZE) for spec in (whole, made.spec)]
    assert seconds[1] == pytest.approx(seconds[0])
    first, last = (made.spec.module(f"head.{rank}") for rank in (0, 3))
    assert first.vocabulary is not None and last.vocabulary is not None
    ratio = (last.vocabulary.last - last.vocabulary.first) / (first.vocabulary.last - first.vocabulary.first)
    of_parts = [seconds_of(made.costs, [module], SIZE) for module in (first, last)]
    assert of_parts[1] == pytest.approx(of_parts[0] * ratio)


# ------------------------------------------------------------------------------------------------ choice


def test_the_search_divides_where_that_saves_more_than_its_margin_and_only_there() -> None:
    keys = ("parallelism.pipeline_parallel_schedule=interleave",)
    small, large = (make_job(text_job(SEARCHED, *keys, size=size)) for size in (448, 44800))
    assert not small.spec.divides_vocabulary
    assert large.spec.divides_vocabulary
    assert "vocabulary divided, by search" in large.partition_summary
    assert str(large.partition).endswith("vocabulary divided")
    again = make_job(text_job(SEARCHED, *keys, size=44800))
    assert (again.partition, again.partition_summary) == (large.partition, large.partition_summary)


def test_what_the_search_takes_is_the_best_of_both() -> None:
    for size in (4480, 44800):
        chosen = text_job(SEARCHED, size=size)
        made = make_job(chosen)
        seconds = {}
        for key in ("tensor", "pipeline"):
            other = make_job(text_job(f'parallelism.vocabulary_parallel="{key}"', size=size))
            typical = TypicalIterations.draw(chosen, other.spec, other.costs, other.sub_microbatch_size)
            seconds[key] = typical.seconds(other.partition)
        typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
        assert typical.seconds(made.partition) <= 1.03 * min(seconds.values())


def test_a_search_without_a_gain_cuts_as_it_does_without_the_key() -> None:
    plain, searched = (make_job(job(*keys, size=64)) for keys in ((), (SEARCHED,)))
    assert not searched.spec.divides_vocabulary
    assert searched.partition == plain.partition
    assert searched.spec == plain.spec


def test_one_pipeline_rank_divides_nothing() -> None:
    plain = make_job(text_job(pp=1))
    for key in (DIVIDED, SEARCHED):
        assert make_job(text_job(key, pp=1)).spec == plain.spec


def test_a_small_job_is_divided_as_the_real_one_was_chosen() -> None:
    for key, size, expected in ((SEARCHED, 44800, "pipeline"), (SEARCHED, 448, "tensor"), (DIVIDED, 448, "pipeline")):
        small = shrink(text_job(key, size=size)).config
        assert small.parallelism.vocabulary_parallel == expected
        assert make_job(small).spec.divides_vocabulary == (expected == "pipeline")


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ((DIVIDED, "parallelism.pipeline_parallel_degree=1", "parallelism.pipelines=[2, 1]"), "pipelines of unequal"),
        ((SEARCHED, 'planner.partition="dip"'), r'planner.partition = "dip": only a search'),
        ((SEARCHED, 'planner.placement="parallel"'), r'planner.placement = "parallel": only a search'),
    ],
)
def test_what_is_not_built_is_refused_in_a_sentence(keys: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallelism.vocabulary_parallel = .*{sentence}.*set"):
        job(*keys)


def test_a_video_model_and_an_elastic_job_have_no_vocabulary_to_divide() -> None:
    with pytest.raises(ConfigError, match=r"with \[model.dit\]: a text encoder"):
        config.load("debug_t2v.toml", [DIVIDED])
    with pytest.raises(ConfigError, match=r"with elastic.enable = true"):
        text_job(DIVIDED, "elastic.enable=true", "model.language.num_segments=1", pp=1)


def test_more_ranks_than_tokens_are_refused_and_a_search_leaves_them_out() -> None:
    few = ("model.language.config.vocab_size=3",)
    with pytest.raises(ConfigError, match="cannot divide a vocabulary of 3 tokens"):
        make_job(text_job(DIVIDED, *few))
    assert not make_job(text_job(SEARCHED, *few)).spec.divides_vocabulary
