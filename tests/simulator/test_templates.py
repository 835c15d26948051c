"""Templates of a job: their sizes, their seconds, and `mmtrain allocate --nodes` as a user types it."""

import math
import tomllib
from dataclasses import replace

import pytest

from mmtrain.commands.cli import main
from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, MemoryLimitError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.assignment.sample_costs import SamplePricer
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import Judged
from mmtrain.simulator.allocation.compositions import Template
from mmtrain.simulator.allocation.degrees import priced_layers, values_of
from mmtrain.simulator.allocation.template_report import compositions
from mmtrain.simulator.allocation.templates import TemplateMaker, layer_bytes, oobleck_templates, sums_s
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.spec.builders import model_spec

ON_A40 = ["planner.hardware=a40", "training.global_batch_size=16", "planner.enable=false"]
WITH_SHARDS = JobLayout.grid(dp_shard=4)


def job_of(*overrides):
    return config.load("debug_text.toml", [*ON_A40, *overrides])


def maker_of(job, nodes=4, max_failures=1):
    return TemplateMaker(config=job, costs=drawn_costs(job, 256), nodes=nodes, max_failures=max_failures)


@pytest.fixture(scope="module")
def maker():
    return maker_of(job_of())


@pytest.fixture(scope="module")
def chosen(maker):
    return maker.chosen()


def test_the_ranks_of_a_stage_divide_a_node_and_pipelines_use_all_gpus(maker, chosen):
    stage, templates = chosen
    assert {of.world_size for of in maker.stages()} == {1, 2, 4, 8}
    assert len(set(maker.stages())) == 20, "3 of tp, cp and dp_shard for each power of two"
    for one in templates.templates:
        assert one.depth * stage.world_size == 8 * one.nodes
        assert one.replicas == stage.dp and len(one.held) == one.nodes
        assert one.partition.num_ranks == one.depth
    layers = {(stage.module, i) for stage in one.partition.stages for i in range(*stage.layers)}
    assert frozenset().union(*one.held) == layers == set(layer_bytes(maker.config))


def test_sizes_are_from_the_least_that_fits_up_to_what_f_pipelines_leave():
    """Without room for a rank's state a job cannot be built; without room for a microbatch it has no plan."""
    job = job_of("planner.memory_limit=0.004GiB", "planner.enable=true", "training.inputs_ahead_mib=0")
    maker = maker_of(job)
    for nodes, refused in ((1, True), (3, False)):
        values = values_of(replace(WITH_SHARDS, depths=(2 * nodes,))) | {"training.global_batch_size": 4}
        if refused:
            with pytest.raises(MemoryLimitError):
                make_job(Candidate().having(values).job(job))
            assert isinstance(maker.template(WITH_SHARDS, nodes), Judged)
        else:
            make_job(Candidate().having(values).job(job))
    assert "memory" in maker.template(WITH_SHARDS, 2).problem, "room for its state, but for no microbatch"
    assert maker.smallest(WITH_SHARDS) == 3
    assert 0 < maker.template(WITH_SHARDS, 3).peak_bytes <= 0.004 * 2**30
    with pytest.raises(ConfigError, match=r"--nodes 4 with --max-failures 1: 2 pipelines of at least 3 nodes need 6"):
        maker.templates(WITH_SHARDS)
    assert [one.nodes for one in maker_of(job, 6).templates(WITH_SHARDS).templates] == [3]


def test_no_template_is_deeper_than_there_are_cut_points(maker):
    """A text model of 6 cut points: no pipeline of 8 ranks, also where nodes are left."""
    layers = len(layer_bytes(maker.config))
    assert maker.template(JobLayout.grid(dp_shard=2), 1).depth == 4 <= layers < 8
    made = maker.template(JobLayout.grid(dp_shard=2), 2)
    assert isinstance(made, Judged) and "each chunk needs a layer" in made.problem


def test_seconds_are_those_of_the_simulator(maker):
    made = maker.template(WITH_SHARDS, 1)
    assert [count for count, _ in made.points] == maker.counts(WITH_SHARDS, 1) == [1, 2]
    job = Candidate().having(values_of(replace(WITH_SHARDS, depths=(2,)))).job(maker.config)
    simulator = IterationSimulator.of(job, Machine.of(job).network)
    for count, seconds in made.points:
        step = maker.typical[: 4 * count]
        metas = [IterationMeta(microbatches=step[i : i + count]) for i in range(0, len(step), count)]
        assert simulator.simulate(metas)[0].iteration_s == pytest.approx(seconds)
    assert made.seconds(5) == made.seconds(8) == made.points[1][1], "the most loaded replica has two"


def test_the_beginnings_of_the_typical_step_are_typical(maker):
    pricer = SamplePricer.of(maker.config)
    work = [pricer.microbatch_s(microbatch) for microbatch in maker.typical]
    assert len(work) == 16
    assert sum(work[:4]) / 4 == pytest.approx(sum(work) / 16, rel=0.25)


def test_the_chosen_degrees_have_the_shortest_step_of_those_that_were_simulated(maker, chosen):
    _, templates = chosen
    found = compositions(templates)
    assert [sum(one.nodes) for one in found] == sorted((sum(one.nodes) for one in found), reverse=True)
    for other in maker.stages():
        made = [one for (of, _), one in maker._made.items() if of == other and isinstance(one, Template)]
        if len(made) > 2:
            assert found[0].seconds <= maker.templates(other).best(4).seconds * (1 + 1e-9)


def test_sums_are_an_all_reduce_of_the_largest_gradients(maker):
    small, large = (maker.template(WITH_SHARDS, nodes) for nodes in (1, 2))
    assert small.grad_bytes > large.grad_bytes > 0
    assert sums_s(maker.cluster, [small], 8) == 0.0
    assert sums_s(maker.cluster, [small, large], 8) == sums_s(maker.cluster, [small, small], 8)
    assert sums_s(maker.cluster, [large, large], 8) < sums_s(maker.cluster, [small, large], 8)


def test_state_of_layers_is_that_of_the_model(maker):
    spec = model_spec(maker.config.model, dtype_bytes=4)
    assert sum(layer_bytes(maker.config).values()) == 12 * sum(module.num_params for module in spec.modules)


def test_templates_of_the_thesis_take_its_three_terms(maker):
    (one,) = oobleck_templates(maker.config, maker.costs, [1], 8)
    priced = [priced_layers(maker.config, maker.costs, JobLayout.grid(tp=gpus)) for gpus in range(1, 9)]
    whole = min(sum(map(sum, layers.values())) for layers in priced if layers)
    assert one.seconds(1) >= whole * (1 - 1e-9)
    rate = (one.seconds(50) - one.seconds(40)) / 10
    assert one.seconds(4 * one.depth) == pytest.approx(one.seconds(one.depth) + 3 * one.depth * rate)
    assert one.held == (frozenset(layer_bytes(maker.config)),)


# ------------------------------------------------------------------------------------------------ command


def run(*words):
    given = ["--config", "debug_text.toml", "--training.global_batch_size=16", "--planner.enable=false", *words]
    return main(["allocate", *given])


def test_the_command_prints_templates_compositions_and_toml(capsys):
    assert run("--cluster", "a40", "--nodes", "4", "--max-failures", "1") == 0
    out = capsys.readouterr().out
    assert "4 nodes of 8 GPUs, at least 2 pipelines" in out and "n_0 = 1" in out
    rows = [line.split() for line in out[out.index("iteration s") :].splitlines()[1:4]]
    assert [int(row[0]) for row in rows] == [4, 3, 2]
    section = tomllib.loads(out[out.index("[parallelism]") :])["parallelism"]
    words = ["--training.global_batch_size=16"]
    made = config.load("debug_text.toml", [*words, *(f"--parallelism.{key}={value}" for key, value in section.items())])
    assert made.parallelism.layout.world_size == 32
    pipelines = section.pop("pipelines")
    assert len(pipelines) >= 2
    assert sum(pipelines) * math.prod(section.values()) == 32


def test_an_elastic_job_gets_the_degrees_of_a_stage(capsys):
    on = ["parallelism.pipeline_parallel_degree=1", "elastic.enable=true"]
    assert run("--cluster", "a40", "--nodes", "2", "--max-failures", "1", *(f"--{word}" for word in on)) == 0
    section = tomllib.loads((out := capsys.readouterr().out)[out.index("[parallelism]") :])["parallelism"]
    words = [*on, *(f"parallelism.{key}={value}" for key, value in section.items())]
    made = config.load("debug_text.toml", [*words, "training.global_batch_size=16"])
    assert made.parallelism.layout.depths == (1,) and 8 % made.parallelism.layout.stage_size == 0


TOO_LITTLE = ["--planner.enable=true", "--planner.memory_limit=0.001GiB", "--training.global_batch_size=4"]


def refused(capsys, *words):
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "4", "--gpus", "8"], "--gpus and --nodes were both given; give one of the two"),
        ([], "--gpus and --nodes are both missing; give one of the two"),
        (["--nodes", "0"], "allocate: --nodes 0; it is at least 1"),
        (["--nodes", "257"], "allocate: --nodes 257; it is at most 256"),
        (["--nodes", "4", "--max-failures", "-1"], "allocate: --max-failures -1; it is at least 0"),
        (["--gpus", "4", "--max-failures", "1"], "--max-failures 1 has no effect without --nodes"),
        (["--nodes", "4", "--p-error", "0.1"], "--p-error 0.1 has no effect with --nodes"),
        (["--nodes", "4"], '--nodes with planner.hardware = ""'),
        (
            ["--nodes", "4", "--cluster", "a40", "--training.global_batch_size=1"],
            "training.global_batch_size = 1 microbatches are fewer than 2 pipelines (--max-failures 1) of 1 replicas",
        ),
        (["--nodes", "1", "--cluster", "a40"], "2 pipelines of at least 1 nodes need 2; use more nodes"),
        (
            ["--nodes", "1", "--cluster", "a40", *TOO_LITTLE],
            "allocate: --nodes 1: no pipeline fits into their memory; the closest one (pp ",
        ),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert message in refused(capsys, *words)
