"""What `planner.memory_limit` leaves for activations, against numbers by hand."""

import dataclasses
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.memory_amount import MemoryAmount, show_bytes, show_gib
from mmtrain.errors import ConfigError, PlanError
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.memory.limit import BudgetHistory, MemoryBudget, MemoryRule, least_activation_bytes
from mmtrain.simulator.make_job import make_job
from tests.examples import examples
from tests.schedule.problems import chain, option, problems

GIB = 2**30
MIB = 2**20
NOTHING = (0.0, 0.0)
"""That a batch needs."""


def budget(*overrides: str, device_bytes: float | None = None, process_bytes: float = 0.0) -> MemoryBudget:
    """That of the debug job."""
    job = config.load("debug_vlm.toml", overrides)
    made = make_job(config.load("debug_vlm.toml"))
    return MemoryRule.of(job, device_bytes).budget(made.spec, made.partition, process_bytes)


def count(pp_rank: int) -> int:
    """Parameters of a pipeline rank."""
    made = make_job(config.load("debug_vlm.toml"))
    return sum(
        layer.num_params
        for stage in made.partition.of_rank(pp_rank)
        for layer in made.spec.module(stage.module).layers[slice(*stage.layers)]
    )


# ---------------------------------------------------------------------------------------------- amounts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72GiB", 72 * GIB),
        ("500MB", 5e8),
        ("1.5TiB", 1.5 * 2**40),
        ("64kB", 64e3),
        ("1024KiB", MIB),
        ("3MiB", 3 * MIB),
        ("2GB", 2e9),
        ("1TB", 1e12),
        ("4096B", 4096),
    ],
)
def test_an_amount_is_a_number_and_a_unit(text, expected):
    amount = MemoryAmount.parse("a.key", text)
    assert amount.num_bytes == expected
    assert amount.bytes_of(None) == amount.bytes_of(1.0) == expected


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (30.2 * MIB, "30.2 MiB"),
        (GIB - 1, "1.00 GiB"),
        (9e15, "8185 TiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_suits_them(num_bytes, shown):
    assert show_bytes(num_bytes) == shown


def test_a_part_is_of_the_device():
    amount = MemoryAmount.parse("a.key", "90%")
    assert amount.bytes_of(80e9) == pytest.approx(72e9)
    assert amount.bytes_of(None) is None
    assert MemoryAmount.parse("a.key", "100%").fraction == 1
    assert MemoryAmount.parse("a.key", "12.5%").bytes_of(8.0) == 1


@pytest.mark.parametrize(
    "text",
    ["72", "GiB", "72 GiB", "72gib", "72G", "-1GiB", "1e3MB", "1,5GiB", "1.GiB", "90 %", "90%%", " 1GiB", "1GiB\n"],
)
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r"a\.key = '.*' is not an amount of memory; write") as caught:
        MemoryAmount.parse("a.key", text)
    assert repr(text) in str(caught.value)


def test_nothing_and_more_than_all_are_refused():
    for text in ("0GiB", "0%", "0.0MB"):
        with pytest.raises(ConfigError, match="it must be above 0"):
            MemoryAmount.parse("a.key", text)
    with pytest.raises(ConfigError, match="at most 100%"):
        MemoryAmount.parse("a.key", "100.1%")


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0"),
        (GIB, "1.00"),
        (71.949 * GIB, "71.9"),
        (1234.5 * GIB, "1234"),
        (0.012345 * GIB, "0.0123"),
        (0.9996 * GIB, "1.00"),
        (-0.5 * GIB, "-0.500"),
        (100, "0"),
    ],
)
def test_gib_have_three_significant_digits(num_bytes, shown):
    assert show_gib(num_bytes) == shown


# ----------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_without_fsdp_a_parameter_takes_16_bytes(pp_rank):
    rank = budget("planner.memory_limit=1GiB", process_bytes=100 * MIB).ranks[pp_rank]
    fixed = 16 * count(pp_rank) + 100 * MIB
    assert rank.fixed_bytes == fixed
    assert rank.margin_bytes == pytest.approx(0.05 * GIB)
    assert rank.activation_bytes == pytest.approx(GIB - fixed - 0.05 * GIB)
    assert rank.predicted_bytes(7 * MIB) == fixed + 7 * MIB


def test_fsdp_shards_what_rests_and_gathers_what_computes():
    keys = ("parallelism.data_parallel_shard_degree=2", "training.mixed_precision_param=bfloat16")
    rank = budget("planner.memory_limit=50%", "planner.memory_margin=0.1", *keys, device_bytes=2 * GIB).ranks[0]
    # Float32 shards, a gathered copy in bfloat16, whole gradients in float32, two sharded moments.
    fixed = count(0) * (4 / 2 + 2 + 4 + 8 / 2)
    assert rank.limit_bytes == GIB
    assert rank.activation_bytes == pytest.approx(0.9 * GIB - fixed)
    # At the end of a step reduced gradients are there, and no activations.
    assert rank.predicted_bytes(0) == fixed + count(0) * 4 / 2
    assert rank.predicted_bytes(GIB) == fixed + GIB


def test_the_table_has_a_line_a_pipeline_rank():
    found = budget("planner.memory_limit=1GiB", process_bytes=256 * MIB)
    title, head, *rows = found.table().splitlines()
    assert title == "memory in GiB:"
    columns = "pp_rank limit process parameters gradients optimizer inputs margin left for activations"
    assert " ".join(head.split()) == columns
    for pp_rank, row in enumerate(rows):
        params = 4 * count(pp_rank)
        left = GIB - 256 * MIB - 4 * params - 0.05 * GIB
        amounts = (GIB, 256 * MIB, params, params, 2 * params, 0, 0.05 * GIB, left)
        assert row.split() == [str(pp_rank), *map(show_gib, amounts)]
    assert len(rows) == 2


def test_a_limit_that_leaves_nothing_is_refused_in_one_line(capsys):
    words = ["config", "--config", "debug_vlm.toml", "--planner.memory_limit=8MB"]
    assert main(words) == 2
    (error,) = capsys.readouterr().err.splitlines()
    words = r'error: planner.memory_limit = "8MB" leaves pp_rank 0 nothing for activations \(GiB: limit 0.00745, '
    words += r"process 0, parameters \S+, gradients \S+, optimizer \S+, inputs 0, margin 0.000373\); raise it, "
    assert re.match(words, error), error
    with pytest.raises(ConfigError, match="pp_rank 0 nothing"):
        budget("planner.memory_limit=1GiB", process_bytes=GIB).check()
    budget("planner.memory_limit=1GiB", process_bytes=GIB / 2).check()
    # What is left must also hold the reduced gradients at the end of a step.
    params = count(0)
    keys = ("parallelism.data_parallel_shard_degree=2", "planner.memory_margin=0")
    tight = params * (4 / 2 + 4 + 4 + 8 / 2) + params * 4 / 2 - 1
    found = budget(f"planner.memory_limit={tight:.0f}B", *keys)
    with pytest.raises(ConfigError, match="at a step's end reduced gradients take"):
        found.check()
    assert not found.is_enough
    assert not found.holds([0.0, 0.0])


def test_a_plan_fits_if_each_rank_has_room():
    found = budget("planner.memory_limit=1GiB")
    limits = found.activation_limits
    assert limits is not None and limits[0] and limits[1]
    assert found.is_enough and found.holds([limits[0], limits[1]])
    assert not found.holds([limits[0] + MIB, 0.0])
    assert not found.holds([0.0, limits[1] + MIB])
    assert budget().is_enough and budget().holds([math.inf, math.inf])


def test_a_device_of_known_hardware_is_a_limit_for_those_who_ask():
    job = config.load("debug_vlm.toml", ["planner.hardware=a40x2"])
    assert MemoryRule.of(job).limit_bytes is None
    assert MemoryRule.of_device(job).limit_bytes == 48e9
    limited = config.load("debug_vlm.toml", ["planner.hardware=a40x2", "planner.memory_limit=1GiB"])
    assert MemoryRule.of_device(limited) == MemoryRule.of(limited)
    assert MemoryRule.of_device(config.load("debug_vlm.toml", ["planner.memory_limit=90%"])).limit_bytes is None


def test_a_part_of_hardware_is_known_before_the_job_starts():
    job = config.load("debug_vlm.toml", ["planner.memory_limit=90%", "planner.hardware=a40x2"])
    limits = make_job(job).activation_limits
    assert limits is not None
    assert MemoryRule.of(job).limit_bytes == pytest.approx(0.9 * 48e9)
    assert limits[0] == pytest.approx(0.9 * 0.95 * 48e9 - 16 * count(0) - 256 * MIB)
    assert MemoryRule.of(job, device_bytes=GIB).limit_bytes == pytest.approx(0.9 * GIB)  # what is really there counts


def test_inputs_that_wait_on_an_accelerator_are_subtracted():
    job = config.load("debug_vlm.toml", ["planner.memory_limit=2GiB", "training.inputs_ahead_mib=100"])
    made = make_job(job)
    on_cpu, on_cuda = (
        MemoryRule.of(job, device=device).budget(made.spec, made.partition) for device in ("cpu", "cuda")
    )
    for without, ranks in zip(on_cpu.ranks, on_cuda.ranks, strict=True):
        assert without.activation_bytes - ranks.activation_bytes == 100 * MIB
        assert ranks.predicted_bytes(0) - without.predicted_bytes(0) == 100 * MIB


def test_the_budget_without_a_limit_predicts_and_limits_nothing():
    found = budget(process_bytes=MIB)
    assert not found.limited
    assert found.activation_limits is None
    assert found.ranks[0].predicted_bytes(MIB) == 16 * count(0) + 2 * MIB
    found.check()


# ----------------------------------------------------------------------------------------------- problems


def meta():
    from mmtrain.modality.typical import TypicalSizes
    from mmtrain.simulator.workloads import draw

    return draw("mix", TypicalSizes.of(config.load("debug_vlm.toml"), 112), seed=0, iteration=0)


def test_problems_have_the_limits():
    planner = IterationPlanner(make_job(config.load("debug_vlm.toml", ["planner.memory_limit=1GiB"])))
    assert planner.problem(meta())[1].memory_limit_bytes == planner.job.activation_limits
    assert IterationPlanner(planner.job, (1.0, None)).problem(meta())[1].memory_limit_bytes == (1.0, None)
    free = IterationPlanner(make_job(config.load("debug_vlm.toml")))
    assert free.job.activation_limits is None
    assert free.problem(meta())[1].memory_limit_bytes == (None, None)


def test_a_part_of_an_unknown_device_is_refused_where_it_would_be_ignored():
    planner = IterationPlanner(make_job(config.load("debug_vlm.toml", ["planner.memory_limit=90%"])))
    with pytest.raises(ConfigError, match=r'memory_limit = "90%" is a part of a device whose memory is not known here'):
        planner.problem(meta())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["planner.memory_limit=1GiB", "planner.search.activation_memory_gib=1"],
            "are two limits of one memory; remove",
        ),
        (["planner.memory_limit=lots"], "'lots' is not an amount of memory"),
        (["planner.memory_limit=1GiB", "planner.enable=false", "SCHEDULE"], r"with planner\.enable = false is kept by"),
        (
            ["planner.memory_limit=1GiB", "planner.search.memory=false", "SCHEDULE"],
            r"with planner\.search\.memory = false is kept by",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    schedule = "parallelism.pipeline_parallel_schedule=1F1B"
    with pytest.raises(ConfigError, match=message) as caught:
        config.load("debug_vlm.toml", [schedule if key == "SCHEDULE" else key for key in keys])
    assert "\n" not in str(caught.value)
    if "SCHEDULE" in keys:  # a schedule that keeps limits, or a planner that chooses memory, is enough
        config.load("debug_vlm.toml", [key for key in keys if key != "SCHEDULE"])
        config.load("debug_vlm.toml", ["planner.memory_limit=1GiB", schedule])


# ---------------------------------------------------------------------------------------------- overshoot


def history(*overrides: str) -> BudgetHistory:
    found = budget("planner.memory_limit=1GiB", *overrides, process_bytes=128 * MIB)
    return BudgetHistory(budget=found, device="cpu")


def test_a_margin_covers_what_the_prediction_missed_from_the_second_next_step_on():
    start = history()
    after = start.after(5, [0.0, 0.2 * GIB], NOTHING)
    base = 0.05 * GIB
    assert after.at(6).margin_bytes == (base, base)
    assert after.at(7).margin_bytes == after.newest.margin_bytes == (base, 0.2 * GIB)
    old, new = start.newest.ranks[1].activation_bytes, after.newest.ranks[1].activation_bytes
    assert old is not None and new is not None
    assert old - new == pytest.approx(0.15 * GIB)
    assert after.after(6, [0.0, 0.1 * GIB], NOTHING) == after  # covered already
    assert after.after(6, [0.0, 0.0], NOTHING) == after


def test_one_step_takes_no_more_than_half_of_what_was_left():
    start = history()
    left = start.newest.ranks[0].activation_bytes
    assert left is not None
    after = start.after(1, [50 * GIB, 0.0], NOTHING)
    assert after.newest.ranks[0].activation_bytes == pytest.approx(left / 2)
    after.newest.check()


def test_a_margin_leaves_room_for_a_microbatch_of_every_batch_so_far():
    found = history()
    left = found.newest.ranks[0].activation_bytes
    assert left is not None
    for step in range(1, 40):
        found = found.after(step, [50 * GIB, 0.0], [0.1 * left, 0.0])
        found.newest.check()
    assert found.newest.ranks[0].activation_bytes == pytest.approx(0.1 * left, abs=2)
    assert len(found.margins) == 4  # 1/2, 1/4, 1/8, 1/10
    larger = found.after(40, [50 * GIB, 0.0], [0.3 * left, 0.0])
    assert larger.newest.ranks[0].activation_bytes == pytest.approx(0.3 * left, abs=2)
    assert larger.after(41, [50 * GIB, 0.0], [0.1 * left, 0.0]) == larger
    resumed = history().resumed(larger.to_dict())
    assert resumed == larger
    too_large = found.after(40, [50 * GIB, 0.0], [9 * left, 0.0])  # no margin helps this batch
    assert too_large.newest.margin_bytes == history().newest.margin_bytes


def test_a_margin_leaves_room_for_reduced_gradients():
    found = history("parallelism.data_parallel_shard_degree=2")
    reduced = found.newest.ranks[0].state.reduced_bytes
    assert reduced > MIB / 4
    for step in range(1, 40):
        found = found.after(step, [50 * GIB, 50 * GIB], NOTHING)
    found.newest.check()
    assert found.newest.ranks[0].activation_bytes == pytest.approx(reduced, abs=2)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), data=st.data())
def test_with_the_least_bytes_there_is_a_plan_and_with_less_there_is_none(problem, data):
    least = least_activation_bytes(problem)
    assert make_plan(dataclasses.replace(problem, memory_limit_bytes=least), "interleave").has_plan
    rank = data.draw(st.integers(0, problem.graph.num_ranks - 1))
    if least[rank] > 0:
        less = (*least[:rank], 0.99 * least[rank], *least[rank + 1 :])
        tight = dataclasses.replace(problem, memory_limit_bytes=less)
        assert make_plan(tight, "interleave").status == "infeasible"


def test_what_a_backward_brings_back_needs_room_too():
    cost = dataclasses.replace(option(activation_bytes=3.0), restored_bytes=4.0)
    assert least_activation_bytes(chain(2, 5, num_segments=2, cost=cost)) == (10.0, 10.0)


def test_a_batch_that_does_not_fit_beside_grown_margins_is_planned_without_them():
    planner = IterationPlanner(make_job(config.load("debug_vlm.toml", ["planner.memory_limit=1GiB"])))
    least = least_activation_bytes(planner.problem(meta(), searched=True)[1])
    tight, wide = [0.9 * needed for needed in least], [1.1 * needed for needed in least]
    first = IterationPlanner(planner.job, tight).prepare(meta(), searched=True).first
    assert not first.has_plan
    assert re.fullmatch(
        r"over the memory limit: the activations of one microbatch take at least 3\.\d\d MiB on pp_rank 0, but "
        r'planner\.memory_limit = "1GiB" leaves them 2\.\d\d MiB; raise it, lower planner\.memory_margin, or make '
        r"microbatches smaller \(training\.seq_len, for clips data\.max_total_seconds\)",
        first.message,
    ), first.message
    with pytest.raises(PlanError, match="over the memory limit"):
        IterationPlanner(planner.job, tight).plan(meta())
    iteration = IterationPlanner(planner.job, tight, wide).prepare(meta(), searched=True)
    assert iteration.first.has_plan
    assert iteration.problem.memory_limit_bytes == tuple(wide)
    roomy = IterationPlanner(planner.job, wide, [9 * limit for limit in wide])
    assert roomy.prepare(meta(), searched=True).problem.memory_limit_bytes == tuple(wide)


def test_a_resumed_run_goes_on_with_margins_and_process():
    import json

    stopped = history().after(3, [0.0, 0.2 * GIB], [MIB, 2 * MIB]).after(5, [0.3 * GIB, 0.0], [MIB, MIB])
    saved = json.loads(json.dumps(stopped.to_dict()))
    other = dataclasses.replace(history(), budget=history().budget.with_process(192 * MIB))
    resumed = other.resumed(saved)
    for step in range(1, 10):
        assert resumed.at(step) == stopped.at(step)
    assert other.resumed({}) == other
    assert dataclasses.replace(other, device="cuda").resumed(saved).margins == ()
    raised = history("planner.memory_margin=0.25").resumed(saved)  # a larger one of the config counts
    assert raised.newest.margin_bytes == (pytest.approx(0.3 * GIB), pytest.approx(0.25 * GIB))


def test_another_limit_or_another_pipeline_starts_anew():
    saved = history().after(3, [0.0, 0.2 * GIB], NOTHING).to_dict()
    other = BudgetHistory(budget=budget("planner.memory_limit=2GiB"), device="cpu")
    assert other.resumed(saved) == other
    short = saved | {"margins": [[5, [1.0]]]}
    assert history().resumed(short) == history()


def test_the_partition_search_knows_the_limit():
    """Candidates whose parameters alone are over the limit have no plan."""
    from mmtrain.simulator.typical_iterations import TypicalIterations

    made = make_job(config.load("debug_vlm.toml"))
    for text, finite in (("8MB", False), ("1GiB", True)):
        job = config.load("debug_vlm.toml", [f"planner.memory_limit={text}"])
        typical = TypicalIterations.draw(job, made.spec, made.costs, 8, most_microbatches=2)
        assert math.isfinite(typical.seconds(made.partition)) == finite


def test_a_limit_that_neither_orders_nor_options_can_keep_is_refused() -> None:
    base = [
        "planner.enable=true", "planner.search.interleave=false", "planner.memory_limit=4GiB",
        "parallelism.pipeline_parallel_schedule=1F1B",
    ]  # fmt: skip
    config.load("debug_vlm.toml", [f"--{key}" for key in base])
    for more in ('activation_checkpoint.mode="full"', 'planner.search.memory_strategies=["keep"]'):
        with pytest.raises(ConfigError, match="no choice of memory either"):
            config.load("debug_vlm.toml", [f"--{key}" for key in (*base, more)])


def test_margins_of_another_number_of_pipeline_ranks_are_not_taken_over():
    job = config.load("debug_vlm.toml", ["planner.memory_limit=4GiB", "planner.enable=true"])
    histories = {}
    for pp in (2, 3):
        own = config.with_values(job, {"parallelism.pipeline_parallel_degree": pp})
        made = make_job(own)
        histories[pp] = BudgetHistory(budget=MemoryRule.of(own).budget(made.spec, made.partition), device="cpu")
    two = histories[2].after(1, [0.0, 0.0], [1.0, 2.0])
    assert two.to_dict()["needed_bytes"] == [1.0, 2.0] and not two.margins
    assert histories[3].resumed(two.to_dict()) == histories[3]
    assert histories[2].resumed(two.to_dict()).needed_bytes == (1.0, 2.0)
