"""Costs of single samples: against the planning problem of a microbatch full of them, and as a file."""

import json
from dataclasses import replace

import pytest

from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.assignment.sample_costs import SampleCosts, SamplePricer
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.simulator.make_job import make_job

OPTIONS = (
    [],
    ["planner.hardware=a40", "parallelism.tensor_parallel_degree=2"],
    ["model.language.trainable=false", "activation_checkpoint.mode=full"],
    ["model.encoder.trainable=false"],
)


def document(sample, images=1, text=22):
    found = tuple(ImageMeta(sample=sample, index=i, grid=(1, 8, 8), num_tokens=16, start=16 * i) for i in range(images))
    return DocumentMeta(sample=sample, num_tokens=16 * images + text, num_targets=text // 2, images=found)


@pytest.mark.parametrize("overrides", OPTIONS)
@pytest.mark.parametrize("images", [0, 1])
def test_equal_samples_share_the_seconds_of_their_microbatch(overrides, images):
    job = config.load(
        "debug_vlm.toml", ["model.encoder.sub_microbatch_size=0", "planner.search.sub_microbatch=false", *overrides]
    )
    pricer, planner = SamplePricer.of(job), IterationPlanner(make_job(job))
    sample = document(0, images)
    copies = job.training.seq_len // sample.num_tokens
    microbatch = MicrobatchMeta(documents=tuple(document(i, images) for i in range(copies)))
    batching, problem = planner.problem(IterationMeta(microbatches=(microbatch,)))
    expected = dict.fromkeys(batching.modules, (0.0, 0.0))
    for stage, work in problem.graph.nodes():
        (option,) = problem.options(stage, work)
        forward, backward = expected[batching.module_of(work)]
        spent = option.backward_input_s + option.backward_weight_s
        expected[batching.module_of(work)] = (forward + option.forward_s, backward + spent)
    found = pricer.ns(sample)
    assert set(found) == {name for name, seconds in expected.items() if seconds[0]}
    for name, passes in found.items():
        forward, backward = expected[name]
        assert passes.forward == pytest.approx(1e9 * forward / copies, rel=0.01, abs=2)
        assert passes.backward == pytest.approx(1e9 * backward / copies, rel=0.01, abs=20)


def test_the_encoder_and_the_last_module_are_told_apart():
    pricer = SamplePricer.of(config.load("debug_vlm.toml"))
    with_image, without = pricer.cost(document(0), (38,)), pricer.cost(document(1, images=0, text=38), (38,))
    assert with_image.encoder_ns > 0 == without.encoder_ns
    assert with_image.language_ns > 0 < without.language_ns
    assert with_image.size == (38,)


@pytest.fixture(scope="module")
def costs():
    return drawn_costs(config.load("debug_vlm.toml"), 20)


def test_a_file_is_read_as_it_was_written(costs, tmp_path):
    path = tmp_path / "samples.json.gz"
    costs.write(path)
    assert SampleCosts.read(path) == costs
    video = drawn_costs(config.load("debug_t2v.toml"), 5)
    assert SampleCosts.from_json(video.to_json()) == video


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree = 1, but this job has 2"),
        (["parallelism.context_parallel_degree=2"], "context_parallel_degree = 1, but this job has 2"),
        (["tokenizer.path=gpt2"], "tokenizer = built-in, but this job has gpt2"),
        (["training.seq_len=128"], "training.seq_len = 256, but this job has 128"),
        (["model.language.trainable=false"], "language trainable parameters = 558720, but this job has 0"),
        (["planner.hardware=a40"], "costs = planner.device.flops_per_s, but this job has a40"),
    ],
)
def test_costs_of_another_job_are_refused_by_name(costs, overrides, words):
    costs.check_fits(config.load("debug_vlm.toml"), "s.json")
    with pytest.raises(ConfigError) as error:
        costs.check_fits(config.load("debug_vlm.toml", overrides), "s.json")
    assert str(error.value).startswith("s.json: written with ") and words in str(error.value)


def test_costs_of_another_source_are_refused(costs):
    read = replace(costs, job={**costs.job, "source": "elsewhere"})
    with pytest.raises(ConfigError, match=r"source = elsewhere, but this job has data/charts"):
        read.check_fits(config.load("debug_vlm.toml"), "s.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(version=2), "version = 2; this program reads version 1"),
        (lambda t: t.update(extra=1), "extra is unknown"),
        (lambda t: t.update(samples=[]), "samples is empty"),
        (lambda t: t["samples"][0].pop("ns"), r"samples[0].ns is missing"),
        (lambda t: t["samples"][0].update(size=[0]), "samples[0].size = [0] must be 1 integers of at least 1"),
        (
            lambda t: t["samples"][1]["ns"].update(language=[1.5, 2]),
            "samples[1].ns.language[0] = 1.5 must be an integer",
        ),
        (lambda t: t["samples"][0].update(images=[["vision", 1]]), "samples[0].images[0] = [1] must be 5 integers"),
    ],
)
def test_a_damaged_file_is_named_with_the_path(costs, tmp_path, change, words):
    table = json.loads(costs.to_json())
    change(table)
    path = tmp_path / "samples.json"
    path.write_text(json.dumps(table))
    with pytest.raises(PlanError) as error:
        SampleCosts.read(path)
    assert str(error.value).startswith(str(path)) and words in str(error.value)
