import itertools
import math
import os
import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.simulator.cut_search import FINALISTS, WORTH, microbatches_to_judge
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.partition_choice import choose_partition, partition_of
from mmtrain.simulator.typical_iterations import TypicalIterations
from mmtrain.spec.builders import model_spec

TEXT = """
[model.language]
config = { model_type = "llama", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 10, num_attention_heads = 4, num_key_value_heads = 4, vocab_size = 64 }
[data]
source = "somewhere"
[training]
steps = 1
seq_len = 512
global_batch_size = 4
[parallelism]
pipeline_parallel_degree = 2
[planner.device]
flops_per_s = 1e10
"""  # noqa: E501
VISION = """
[model.encoder]
config = { model_type = "qwen2_vl_vision", depth = 10, embed_dim = 32, hidden_size = 32, num_heads = 4, mlp_ratio = 2, patch_size = 14, spatial_merge_size = 2 }
"""  # noqa: E501
WHISPER = """
[model.encoder]
config = { model_type = "whisper_encoder", d_model = 32, encoder_ffn_dim = 64, encoder_layers = 6, encoder_attention_heads = 4, num_mel_bins = 10, max_source_positions = 12 }
"""  # noqa: E501
SCHEDULE = "parallelism.pipeline_parallel_schedule"
VAE = 'model.vae.config={ model_type = "autoencoder_kl_wan" }'


@pytest.fixture
def job(tmp_path):
    def build(*overrides: str, text: str = TEXT + VISION) -> Config:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return config.load(path, overrides)

    return build


def segments(job: Config) -> dict[str, int]:
    parts = partition_of(job, model_spec(job.model, dtype_bytes=4))
    return {m.name: len(m.stages) // parts.num_ranks for m in parts.modules}


# ----------------------------------------------------------------------------------------- the search


def test_search_finds_the_best_of_all_candidates(job) -> None:
    chosen = job()  # four microbatches on two ranks: the first look is at whole iterations
    made = make_job(chosen)
    typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
    scores = {}
    for k in range(1, 5):
        for other in range(1, 5):
            keys = (f"model.encoder.num_segments={k}", f"model.language.num_segments={other}")
            parts = partition_of(job(*keys), made.spec)
            scores[k, other] = typical.seconds(parts) * (1 + WORTH * (k + other))
    found = segments(chosen)
    assert scores[found["vision"], found["language"]] == min(scores.values())
    assert "20 tried" in made.partition_summary
    assert f"vision {found['vision']}, language {found['language']} segments" in made.partition_summary


def test_search_beats_the_papers_rule_where_one_pass_leaves_a_bubble(job) -> None:
    rule, searched = job("planner.partition=dip", text=TEXT), job(text=TEXT)
    assert segments(rule) == {"language": 1}  # the fastest module has one segment, whatever the number of ranks
    spec = model_spec(rule.model, dtype_bytes=4)
    made = make_job(searched)
    typical = TypicalIterations.draw(searched, spec, made.costs, 0)
    assert segments(searched)["language"] > 1
    # A bubble of (P - 1) / (V m) of the work becomes shorter with V: 1.25 with V = 1, at most 1.13 with V = 2.
    assert typical.seconds(made.partition) < 0.93 * typical.seconds(partition_of(rule, spec))


def test_segments_that_are_shorter_than_their_messages_do_not_pay(job) -> None:
    assert segments(job(text=TEXT))["language"] > 1
    assert segments(job("planner.device.p2p_latency_s=1.0", text=TEXT)) == {"language": 1}


def test_the_planners_search_can_judge_candidates(job) -> None:
    found = segments(job("planner.enable=true", text=TEXT))
    assert found == segments(job("planner.enable=true", text=TEXT))
    assert found["language"] > 1


def test_a_short_job_is_cut_without_the_kernels_of_the_search(job, tmp_path) -> None:
    """They take 10 s to compile on a machine that never ran them, more than hundreds of steps of such a job."""
    for flops_per_s, is_short in ((1e10, True), (1e7, False)):
        chosen = job("planner.enable=true", f"planner.device.flops_per_s={flops_per_s}")
        made = make_job(chosen)
        typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
        assert typical.is_short is is_short
    script = "import sys; from mmtrain.config import config; from mmtrain.simulator.make_job import make_job\n"
    script += "print(make_job(config.load(sys.argv[1], sys.argv[2:])).partition_summary[:10])\n"
    script += "print('numba.np.arraymath' in sys.modules)"  # which the first call of a kernel loads
    words = [
        sys.executable,
        "-c",
        script,
        str(tmp_path / "job.toml"),
        "planner.enable=true",
        "planner.device.flops_per_s=1e10",
    ]
    root = Path(__file__).resolve().parents[2]
    answer = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    assert answer.stdout.split() == ["partition:", "False"]


@pytest.mark.parametrize("name", ["debug_vlm", "debug_4d", "debug_lora", "debug_siglip_llama", "debug_t2v"])
def test_a_short_job_is_cut_in_less_than_a_second(name: str) -> None:
    """Of the constant rates by which the search chooses its microbatches."""
    chosen = config.load(f"{name}.toml", ["model.language.num_segments=0"])
    made = make_job(chosen)
    costs = chosen, made.spec, made.costs, made.sub_microbatch_size
    quick, exact = (TypicalIterations.draw(*costs, is_quick=is_quick) for is_quick in (True, False))
    rates = [[x.judging_s(made.partition)] * 24 for x in (quick, exact)]
    first, second = microbatches_to_judge(made.partition.num_ranks, exact.num_microbatches, *rates, exact.rank_s)
    assert exact.is_short
    assert exact.num_microbatches == 4
    assert first >= 4  # whole iterations
    assert first * sum(rates[0]) + second * 2 * FINALISTS * rates[1][0] < 1.0


def test_an_iteration_counts_whole_where_part_of_it_is_drawn(job) -> None:
    chosen = job("training.global_batch_size=8192", "planner.device.flops_per_s=1e10")
    made = make_job(chosen)
    few, typical = (
        TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size, most_microbatches=most)
        for most in (2, 32)
    )
    assert (few.shortened, typical.shortened) == (4096, 256)
    assert not few.is_short and not typical.is_short


@pytest.fixture
def typical(job):
    def build(*keys: str) -> tuple[TypicalIterations, Partition]:
        chosen = job("planner.enable=true", "model.language.num_segments=2", "model.encoder.num_segments=1", *keys)
        made = make_job(chosen)
        costs = made.costs, made.sub_microbatch_size
        return TypicalIterations.draw(chosen, made.spec, *costs, most_microbatches=8), made.partition

    return build


LONG = "planner.device.flops_per_s=1e7"


def test_a_cut_is_judged_by_the_options_of_the_jobs_search(typical) -> None:
    seconds = {}
    for keys in (
        "",
        "planner.search.split_backward=false",
        "planner.search.strategy=first",
        "planner.search.budget_evaluations=1",
    ):
        iterations, partition = typical(LONG, *filter(None, [keys]))
        seconds[keys] = iterations.seconds(partition)
    assert seconds[""] < seconds["planner.search.split_backward=false"] < seconds["planner.search.strategy=first"]
    assert seconds[""] < seconds["planner.search.budget_evaluations=1"]


def test_short_jobs_are_judged_by_the_orders_that_their_search_may_use(typical) -> None:
    def seconds(*keys: str) -> float:
        iterations, partition = typical(*keys)
        assert iterations.is_short
        return iterations.seconds(partition)

    fixed = seconds("planner.search.reorder=false")
    assert seconds() < fixed < seconds("planner.search.reorder=false", "planner.search.split_backward=false")
    greedy = seconds("planner.search.interleave=false", "parallelism.pipeline_parallel_schedule=interleave")
    assert seconds("planner.search.reorder=false", "planner.search.strategy=first") == greedy


@pytest.mark.parametrize("mebibytes", [6, 8, 12])
def test_scarce_memory_does_not_spoil_the_judgement_of_short_jobs(typical, mebibytes: int) -> None:
    """With recomputation, `ZB-AutoSchedule` alone would run one microbatch after another: W needs all activations."""
    seconds, full = [], "activation_checkpoint.mode=full"
    for keys in ([], ["planner.search.strategy=first"]):
        iterations, partition = typical(full, f"planner.search.activation_memory_gib={mebibytes / 1024}", *keys)
        seconds.append(iterations.seconds(partition))
    assert seconds[0] <= seconds[1]


@pytest.mark.parametrize(
    ("keys", "module", "count"),
    [
        (["model.language.num_segments=3"], "language", 3),
        (["model.encoder.num_segments=2"], "vision", 2),
        (["model.language.pipeline_layout=E|t*5|t*3|t*2L"], "language", 2),
    ],
)
def test_what_the_config_gives_is_kept(job, keys: list[str], module: str, count: int) -> None:
    assert segments(job(*keys))[module] == count


def test_nothing_is_searched_where_nothing_is_open(job) -> None:
    keys = ("model.language.num_segments=3", "model.encoder.num_segments=2")
    assert make_job(job(*keys)).partition_summary == ""
    assert make_job(job("planner.partition=dip")).partition_summary == ""
    assert segments(job("parallelism.pipeline_parallel_degree=1")) == {"vision": 1, "language": 1}


def test_modules_of_a_v_shaped_schedule_become_one_v_where_that_is_shorter() -> None:
    keys = ["model.encoder.num_segments=0", "model.language.num_segments=0", "planner.partition=search"]
    keys += ["planner.hardware=", "planner.memory_limit=", "planner.enable=false"]
    for name, passes in (("ZBV", 2), ("STP", 0)):  # without costs of exchanges, blocks hide none
        made = make_job(config.load("vlm_s.toml", [*keys, f"{SCHEDULE}={name}"]))
        assert made.partition.passes == passes
        words = r"best of 2 tried: 2 \+ 2: ([0-9.]+) s, chain x 2: ([0-9.]+) s"
        found = re.search(words, made.partition_summary)
        assert found and (float(found[2]) < 0.97 * float(found[1])) == bool(passes)


@pytest.mark.parametrize("keys", [["planner.partition=dip"], ["model.encoder.num_segments=2"]])
def test_modules_that_are_cut_by_themselves_are_several_vs(job, keys: list[str]) -> None:
    assert segments(job(f"{SCHEDULE}=STP", *keys)) == {"vision": 2, "language": 2}


@pytest.mark.parametrize("keys", [[], ["model.language.num_segments=2"]])
@pytest.mark.parametrize("how", ["latency", "parameters"])
def test_a_mixed_chain_of_a_v_shaped_schedule_is_one_v(job, how: str, keys: list[str]) -> None:
    made = make_job(job(f"{SCHEDULE}=STP", f"planner.partition=mixed-{how}", *keys))
    parts = [(stage.module, stage.segment, stage.pp_rank) for stage in made.partition.stages]
    border = [("vision", 1, 1)] if how == "parameters" else [("language", 0, 1)]  # a part of rank 1 has both modules
    assert parts == [("vision", 0, 0), ("vision", 0, 1), *border, ("language", 1, 1), ("language", 1, 0)]
    assert "one chain of all modules, 2 on each rank" in made.partition_summary


def test_an_encoder_that_reads_no_images_is_cut_by_the_rule(job) -> None:
    # No workload stands for sound.
    text = TEXT + WHISPER
    assert segments(job(text=text)) == segments(job("planner.partition=dip", text=text))


def test_a_limit_that_no_plan_keeps_leaves_the_rule(job) -> None:
    keys = ("planner.search.activation_memory_gib=1e-7",)
    assert segments(job(*keys, text=TEXT)) == {"language": 1}


def test_the_choice_follows_from_the_config_alone(job, tmp_path) -> None:
    chosen = job()
    words = make_job(chosen).partition_summary
    assert make_job(job("debug.seed=7", "data.source=elsewhere")).partition_summary == words
    script = "import sys; from mmtrain.config import config; from mmtrain.simulator.make_job import make_job\n"
    script += "print(make_job(config.load(sys.argv[1])).partition_summary)"
    for seed in ("1", "2"):  # as on other ranks
        answer = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "job.toml")],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert answer.stdout.strip() == words


# ----------------------------------------------------------------------------- chains among the candidates

OPEN = ("model.language.num_segments=0", "model.dit.num_segments=0")


def video(*overrides: str) -> Config:
    """Text to video on hardware whose memory is known; each batch has the named schedule, without a limit."""
    keys = ["planner.hardware=h800x16", "planner.enable=false", "planner.memory_limit="]
    return config.load("t2v_s.toml", [*keys, *overrides])


def test_a_vae_makes_the_modules_a_chain() -> None:
    found = make_job(video(VAE, *OPEN))
    assert found.partition.passes == 1
    assert "partition: one chain of all modules, 1 on each rank, by search" in found.partition_summary
    assert "chain x 1: " in found.partition_summary
    assert "20 tried" in found.partition_summary
    typical = TypicalIterations.draw(video(VAE), found.spec, found.costs, found.sub_microbatch_size)
    apart = [
        partition_of(video(VAE, f"model.language.num_segments={k}", f"model.dit.num_segments={n}"), found.spec)
        for k, n in itertools.product(range(1, 5), repeat=2)
    ]
    assert typical.seconds(found.partition) < 0.9 * min(map(typical.seconds, apart))
    # Without it the ranks of separated modules have equal work already.
    assert make_job(video(*OPEN)).partition.passes == 0


def test_a_chain_fits_into_a_limit() -> None:
    limit = "planner.memory_limit=21GiB"
    with pytest.raises(ConfigError, match=r'memory_limit = "21GiB" leaves pp_rank 0 nothing for activations'):
        make_job(video(VAE, *OPEN, "planner.partition=mixed-latency", limit))
    found = make_job(video(VAE, *OPEN, limit))
    assert found.partition.passes != 1
    assert "by search" in found.partition_summary


def test_a_chain_fits_into_the_device() -> None:
    keys = ("planner.hardware=h800x32", "parallelism.tensor_parallel_degree=4", "planner.enable=false", VAE, *OPEN)
    keys = ("planner.memory_limit=", *keys)
    found = make_job(config.load("t2v_l.toml", keys))
    assert found.partition.passes == 2
    chosen = config.load("t2v_l.toml", [*keys, "planner.partition=mixed-latency"])
    first = partition_of(chosen, found.spec)
    assert first.passes == 1
    typical = TypicalIterations.draw(chosen, found.spec, found.costs, found.sub_microbatch_size)
    assert typical.seconds(first) < typical.seconds(found.partition)
    # One rank holds all of the text encoder.
    assert typical.seconds(first, within=MemoryRule.of_device(chosen)) == math.inf


def test_a_chain_fits_as_the_job_is_planned() -> None:
    # The planner's orders keep a limit, if there is one: the search gives them one.
    assert make_job(video(VAE, *OPEN, "planner.enable=true")).partition.passes == 1
    keys = ("parallelism.pipeline_parallel_schedule=GPipe", "activation_checkpoint.mode=none")
    found = make_job(video(VAE, *OPEN, *keys))
    assert found.partition.passes == 0
    assert "20 tried" in found.partition_summary
    assert "inf" not in found.partition_summary


def test_chains_are_tried_whether_the_memory_is_known_or_not(job) -> None:
    for keys in ([], ["planner.memory_limit=60GiB"], ["planner.memory_limit=90%"]):
        assert "20 tried" in make_job(job(*keys)).partition_summary


def test_a_chain_takes_no_more_memory_than_separated_modules_where_it_is_not_known() -> None:
    keys = ("planner.hardware=", VAE, *OPEN)
    found = make_job(video(*keys))
    assert found.partition.passes == 0
    assert found.partition_summary.endswith("; chain x 1 takes more memory; chain x 2 takes more memory")
    typical = TypicalIterations.draw(video(*keys), found.spec, found.costs, found.sub_microbatch_size)
    chain = partition_of(video(VAE, "planner.partition=mixed-latency", *OPEN), found.spec)
    assert chain.passes == 1
    assert typical.seconds(chain) < 0.8 * typical.seconds(found.partition)
    assert typical.peak_bytes(chain) > 1.1 * typical.peak_bytes(found.partition)


@pytest.mark.parametrize(
    ("keys", "num_tried"),
    [
        (["model.language.num_segments=1"], 4),
        (["model.dit.num_segments=2"], 4),
        (["model.language.pipeline_layout=Et*7|t*8|t*8|t*9N"], 4),
        ([], 20),
        (["planner.partition=dip"], 0),
    ],
)
def test_a_job_that_cuts_a_module_has_no_chain(keys: list[str], num_tried: int) -> None:
    words = make_job(video(VAE, *OPEN, *keys)).partition_summary
    assert (f"best of {num_tried} tried" in words) if num_tried else not words
    assert ("chain" in words) == (num_tried == 20)


def test_one_module_is_no_chain(job) -> None:
    assert "best of 4 tried" in make_job(job("planner.memory_limit=60GiB", text=TEXT)).partition_summary


def test_modules_of_few_layers_can_still_be_a_chain(job) -> None:
    keys = ("parallelism.pipeline_parallel_degree=16",)  # 24 layers, 12 of each module
    with pytest.raises(ConfigError, match=r"has 12 layers .*and each chunk needs a layer"):
        partition_of(job(*keys, "planner.partition=dip"), model_spec(job().model, dtype_bytes=4))
    made = make_job(job(*keys))
    assert made.partition.passes == 1
    assert "best of 1 tried: chain x 1" in made.partition_summary


@pytest.mark.parametrize("schedule", [name for name, known in CATALOGUE.items() if known.placement == "loop"])
def test_every_schedule_can_be_tried_on_chains(job, schedule: str) -> None:
    keys = ("planner.memory_limit=60GiB", "parallelism.pipeline_parallel_degree=16")
    keys = (*keys, f"parallelism.pipeline_parallel_schedule={schedule}", "planner.enable=true")
    if CATALOGUE[schedule].least_passes == 1:
        assert make_job(job(*keys)).partition.passes == 1
    else:  # 24 layers are too few for two passes
        with pytest.raises(ConfigError, match="each chunk needs a layer"):
            make_job(job(*keys))


# ---------------------------------------------------------------------------------------------- mixed


def test_equal_parameters(job) -> None:
    chosen = job("planner.partition=mixed-parameters")
    spec = model_spec(chosen.model, dtype_bytes=4)
    params = [layer.num_params for module in spec.modules for layer in module.layers]
    parts = partition_of(chosen, spec)
    loads = [
        sum(layer.num_params for s in parts.of_rank(r) for layer in spec.module(s.module).layers[slice(*s.layers)])
        for r in range(2)
    ]
    best = min(max(sum(params[:cut]), sum(params[cut:])) for cut in range(1, len(params)))
    assert max(loads) == best
    assert "mixed-parameters" in make_job(chosen).partition_summary


@pytest.mark.parametrize("passes", [1, 2])
def test_equal_seconds(job, passes: int) -> None:
    chosen = job("planner.partition=mixed-latency", f"model.language.num_segments={passes}")
    made = make_job(chosen)
    typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
    of_module = typical.layer_seconds()
    seconds = [value for module in made.spec.modules for value in of_module[module.name]]
    loads = [
        sum(
            sum(of_module[s.module][slice(*s.layers)])
            for s in made.partition.stages
            if (s.pp_rank, s.segment) == (r, p)
        )
        for p in range(passes)
        for r in range(2)
    ]
    cuts = combinations(range(1, len(seconds)), 2 * passes - 1)
    best = min(max(sum(seconds[a:b]) for a, b in pairwise([0, *cut, len(seconds)])) for cut in cuts)
    assert max(loads) == pytest.approx(best)


def test_seconds_of_layers_are_those_that_planning_counts(job) -> None:
    for frozen in ("false", "true"):
        chosen = job(
            f"model.encoder.trainable={frozen}", "planner.partition=dip", "activation_checkpoint.mode=full",
        )  # fmt: skip
        made = make_job(chosen)
        typical = TypicalIterations.draw(chosen, made.spec, made.costs, made.sub_microbatch_size)
        total = sum(map(sum, typical.layer_seconds().values()))
        from mmtrain.planner.make_problem import make_problem

        counted = 0.0
        for batching in typical.batchings:
            problem = make_problem(
                made.spec, made.partition, batching, made.costs, chosen.planner,
                memory=made.memory,
            )  # fmt: skip
            for stage, work in problem.graph.nodes():
                option = problem.options(stage, work)[0]
                counted += option.forward_s + option.backward_input_s + option.backward_weight_s
        assert total == pytest.approx(counted, rel=1e-4)


def test_passes_of_a_mixed_chain_follow_the_schedule(job) -> None:
    keys = ("planner.partition=mixed-latency", "parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    parts = partition_of(job(*keys), model_spec(job(*keys).model, dtype_bytes=4))
    assert {stage.segment for stage in parts.stages} == {0, 1}
    with pytest.raises(ConfigError, match=r'"Interleaved1F1B" needs at least 2 chunks on .*num_segments = 1 makes 1'):
        segments(job(*keys, "model.language.num_segments=1"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.encoder.num_segments=1"], r"one chain, but model\.encoder\.num_segments = 1 cuts a module by itself"),
        (["model.language.pipeline_layout=Et*9|tL"], r"but model\.language\.pipeline_layout = 'Et\*9\|tL' cuts"),
        (["model.encoder.pipeline_layout=Et*9|tNP"], r"but model\.encoder\.pipeline_layout"),
        (
            ["parallelism.pipeline_parallel_schedule=V-half", "model.language.num_segments=3"],
            r"model\.language\.num_segments = 3: a V-shaped schedule .* set num_segments to 2",
        ),
        (["model.language.num_segments=40"], r"2 x 40 passes .* = 80 chunks, but all modules together have 24 layers"),
    ],
)
def test_mixed_partitions_that_are_refused(job, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        segments(job("planner.partition=mixed-latency", *keys))


def test_equal_seconds_need_images(job) -> None:
    with pytest.raises(ConfigError, match=r'"mixed-latency" needs the times of typical images'):
        segments(job("planner.partition=mixed-latency", text=TEXT + WHISPER))


def test_costs_are_those_of_the_chosen_partition(job) -> None:
    chosen = job()
    made = make_job(chosen)
    choice = choose_partition(chosen, made.spec, made.costs, made.sub_microbatch_size)
    assert choice.partition == made.partition
