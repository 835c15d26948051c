"""Traces of lost nodes: the reader's errors, and systems on traces whose throughput is computed by hand."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from mmtrain.commands.cli import main
from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.compositions import Template, Templates
from mmtrain.simulator.allocation.mapping import MappedStage, StageMapping
from mmtrain.simulator.allocation.templates import TemplateMaker, layer_bytes
from mmtrain.simulator.failures.comparison import compare, systems
from mmtrain.simulator.failures.oobleck import Oobleck, least_variance, literal_templates, mapped_partition
from mmtrain.simulator.failures.systems import BestComposition, EqualPipelines, LocalRule, ReRouting
from mmtrain.simulator.failures.trace import Event, Trace, drawn_trace, read_trace, seconds_of
from mmtrain.simulator.failures.trace_replay import FailureCosts, replay
from mmtrain.spec.builders import model_spec

TRACES = Path(__file__).parent.parent.parent / "benchmarks" / "traces"
LAYERS = 12
COSTS = FailureCosts(
    detection_s=1.0, change_s=2.0, bytes_per_s=2.0, restart_s=50.0, checkpoint_s=0.0, checkpoint_every=10
)


def template(nodes, per_microbatch):
    """A pipeline without bubbles, of which each node holds an equal part of 12 layers of one byte."""
    each = np.array_split(range(LAYERS), nodes)
    held = tuple(frozenset(("language", int(layer)) for layer in part) for part in each)
    points = ((1, per_microbatch), (2, 2 * per_microbatch))
    return Template(nodes=nodes, depth=nodes, points=points, held=held)


def templates(sizes=(1, 2, 3), max_failures=1, microbatches=12, max_nodes=8):
    """In proportion: n nodes take 12 / n seconds for a microbatch."""
    made = tuple(template(n, 12 / n) for n in sizes)
    return Templates(templates=made, max_failures=max_failures, microbatches=microbatches, max_nodes=max_nodes)


def trace(*events):
    return Trace(tuple(Event(time_s=t, lost=tuple(lost), joined=tuple(joined)) for t, lost, joined in events))


# ------------------------------------------------------------------------------------------------ reader


def written(tmp_path, *lines):
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["time,event,node", *lines]) + "\n")
    return file


def test_a_trace_is_read(tmp_path):
    file = written(tmp_path, "5,joined,a", "5,joined,b", "20,lost,b", "20,joined,c", "65.5,lost,a")
    assert read_trace(file) == trace((0, "", "ab"), (15, "b", "c"), (60.5, "a", ""))


def test_a_node_may_come_and_go_at_one_time(tmp_path):
    file = written(tmp_path, "0,joined,a", "7,joined,b", "7,lost,b", "7,lost,a", "7,joined,a")
    assert read_trace(file) == trace((0, "", "a"), (7, "a", "a"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["0,joined,a", "9,lost,a", "8,joined,b"], ":4: time 8 is before 9; sort the lines by time"),
        (["0,joined,a", "9,lost,b"], ":3: node 'b' is lost, which never joined"),
        (["0,joined,a", "0,joined,b", "9,lost,a", "10,lost,a"], ":5: node 'a' was lost twice"),
        (["0,joined,a", "9,joined,a"], ":3: node 'a' joined twice"),
        (["0,joined,a", "9,lost,a", "10,lost,b"], ":4: node 'b' is lost, more losses than nodes"),
        (["0,joined,a", "soon,lost,a"], ":3: time 'soon' is no number of seconds from 0 on"),
        (["-1,joined,a", "9,lost,a"], ":2: time '-1' is no number of seconds from 0 on"),
        (["nan,joined,a", "9,lost,a"], ":2: time 'nan'"),
        (["0,joined,a", "9,died,a"], ":3: event 'died' is neither lost nor joined"),
        (["0,joined,a", "9,lost"], ":3: 2 values; a line is time,event,node"),
        (["0,joined,"], ":2: the node has no name"),
        ([], ": 0 times have events"),
        (["0,joined,a"], ": 1 times have events; a trace has those of the beginning and a later one"),
    ],
)
def test_a_wrong_trace_is_named_in_one_line(tmp_path, lines, words):
    with pytest.raises(ConfigError) as caught:
        read_trace(written(tmp_path, *lines))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_trace(tmp_path):
    (tmp_path / "a.csv").write_text("seconds,node\n")
    with pytest.raises(ConfigError, match=r"a\.csv:1: its columns are 'seconds,node'; write time,event,node"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "most", "hours"), [("p3", 32, 11.0), ("g4dn", 24, 10.5), ("a100", 64, 26.5), ("v100", 80, 22.4)]
)
def test_public_traces_are_read(name, most, hours):
    read = read_trace(TRACES / f"{name}.csv")
    assert read.most_nodes == most and read.events[-1].time_s / 3600 == pytest.approx(hours, abs=0.1)


def test_waiting_nodes_join_when_a_used_one_is_lost():
    whole = trace((0, "", "abc"), (10, "c", ""), (20, "a", ""), (30, "", "de"), (40, "d", ""))
    assert whole.most(2) == trace((0, "", "ab"), (20, "a", ""), (30, "", "d"), (40, "d", "e"))
    with_spare = trace((0, "", "abc"), (10, "a", ""), (20, "b", ""))
    assert with_spare.most(2) == trace((0, "", "ab"), (10, "a", "c"), (20, "b", ""))


def test_a_drawn_trace_has_its_rate_and_repairs():
    drawn = drawn_trace(20, 600, 900, hours=1000, seed=0)
    losses = [event for event in drawn.events if event.lost]
    assert len(losses) == pytest.approx(6000, rel=0.05)
    back = {event.joined[0]: event.time_s for event in drawn.events if event.joined and event.time_s}
    assert drawn.events[-1].time_s == 3.6e6
    assert all(one.time_s <= two.time_s for one, two in zip(drawn.events, drawn.events[1:], strict=False))
    node = losses[0].lost[0]
    first_back = next(e.time_s for e in drawn.events if e.joined == (node,) and e.time_s)
    assert first_back == losses[0].time_s + 900 and node in back


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("6h", 21600)])
def test_durations(text, seconds):
    assert seconds_of(text, "--repair") == seconds


@pytest.mark.parametrize("text", ["", "0", "-3m", "ten", "3d"])
def test_no_durations(text):
    with pytest.raises(ConfigError, match=r"--repair .* is no positive duration"):
        seconds_of(text, "--repair")


# ------------------------------------------------------------------------------ two events, by hand

LOSS = trace((0, "", "abcd"), (130, "d", ""), (330, "", ""))
"""Four nodes, of which one is lost after 130 s, for another 200 s."""


def samples(played):
    return [one.samples for one in played.intervals]


def test_ours_loses_half_a_step_and_copies():
    """Pipelines 2 + 2: a step of 12 microbatches takes 36 s. Pipelines 1 + 2: 48 s
    (4 + 8 microbatches). The whole pipeline stays; the single node of the other has half of the layers and lacks 6
    bytes, 3 s. So 194 s are left for 194 / 48 steps, of which half of a step is done again."""
    played = replay(LOSS, BestComposition(templates=templates(sizes=(1, 2))), COSTS)
    assert samples(played) == pytest.approx([12 * 130 / 36, 12 * (194 / 48 - 0.5)])
    assert [one.step_s for one in played.intervals] == pytest.approx([36, 48]) and played.restarts == 0
    assert played.intervals[1].lost_s == pytest.approx(1 + 2 + 3 + 48 / 2)


def test_the_local_rule_does_the_same_here():
    played = replay(LOSS, LocalRule(templates=templates(sizes=(1, 2))), COSTS)
    assert samples(played) == pytest.approx([12 * 130 / 36, 12 * (194 / 48 - 0.5)])


def test_a_restart_loses_all_since_the_checkpoint():
    """Templates of two nodes alone: a grid of 1 x 2, 72 s a step. All of 130 s is unsaved, and takes longer again."""
    played = replay(LOSS, EqualPipelines(templates=templates(sizes=(2,)), live=False), COSTS)
    assert samples(played) == [pytest.approx(12 * 130 / 36), 0]
    assert played.restarts == 1
    assert played.intervals[1].lost_s == 200


def test_a_restart_after_a_checkpoint_loses_less():
    costs = FailureCosts(
        detection_s=1.0, change_s=2.0, bytes_per_s=2.0, restart_s=50.0, checkpoint_s=3.0, checkpoint_every=2
    )
    played = replay(LOSS, EqualPipelines(templates=templates(sizes=(2,)), live=False), costs)
    rate = 24 / (72 + 3)
    assert samples(played) == pytest.approx([130 * rate, (200 - 51) * 24 / (144 + 3) - 24 / 2])


def test_a_grid_leaves_nodes_idle():
    """2 x 2 at 36 s; of three nodes 3 x 1 are best, 48 s; with templates of 2 alone nothing is left of f + 1."""
    played = replay(LOSS, EqualPipelines(templates=templates(sizes=(1, 2)), live=True), COSTS)
    assert [one.step_s for one in played.intervals] == pytest.approx([36, 48])
    played = replay(LOSS, EqualPipelines(templates=templates(sizes=(2,)), live=True), COSTS)
    assert samples(played) == [pytest.approx(12 * 130 / 36), 0]


def test_re_routing_gives_a_stage_to_its_peers():
    """A grid of 2 x 2 whose second stage has one node left: 72 s without a bubble."""
    played = replay(LOSS, ReRouting(templates=templates(sizes=(2,)), live=True), COSTS)
    assert [one.step_s for one in played.intervals] == pytest.approx([36, 72])
    assert samples(played)[1] == pytest.approx(12 * ((200 - 3) / 72 - 0.5))


def test_oobleck_by_hand():
    """Estimated 3 to 1 although both are as fast as their nodes: of 1 + 2 nodes, (2.6) gives 12 microbatches 3 to 9."""
    simulated = templates(sizes=(1, 2))
    estimated = Templates(templates=(template(1, 12), template(2, 4)), max_failures=1, microbatches=12, max_nodes=8)
    played = replay(LOSS, Oobleck(templates=simulated, estimated=estimated), COSTS)
    assert [one.step_s for one in played.intervals] == pytest.approx([36, 54])
    assert samples(played)[1] == pytest.approx(12 * (194 / 54 - 0.5))


def test_state_that_is_lost_comes_from_a_checkpoint():
    """Both second halves are lost at once."""
    of = templates(sizes=(2, 4))
    both = trace((0, "", "abcd"), (40, "bd", "ef"), (400, "", ""))
    played = replay(both, BestComposition(templates=of), COSTS)
    assert played.restarts == 1
    assert samples(played)[1] == pytest.approx(12 * ((360 - 51) / 36 - 40 / 36))
    one = trace((0, "", "abcd"), (40, "b", "e"), (400, "", ""))
    assert replay(one, BestComposition(templates=of), COSTS).restarts == 0


def test_a_job_ends_and_begins_again():
    few = trace((0, "", "ab"), (50, "b", ""), (150, "", "c"), (250, "", ""))
    played = replay(few, BestComposition(templates=templates(sizes=(1,))), COSTS)
    assert samples(played) == pytest.approx([50 / 6, 0, 50 / 6 - 50 / 6])
    assert played.restarts == 1


# -------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("seed", range(5))
def test_no_system_beats_the_ideal_without_bubbles_and_ours_beats_grids(seed):
    of = templates(sizes=(1, 2, 3, 4), microbatches=24, max_nodes=8)
    drawn = drawn_trace(8, 300, 600, hours=20, seed=seed)
    free = FailureCosts(detection_s=0, change_s=0, bytes_per_s=1e12, restart_s=0, checkpoint_s=0, checkpoint_every=1000)
    literal = type("Literal", (), {"simulated": of, "estimated": of})()
    found = compare(drawn, systems(of, literal), of, free)
    for index, ideal in enumerate(found.ideal):
        rates = {name: one.intervals[index] for name, one in found.replays.items()}
        for one in rates.values():
            assert one.rate <= ideal * (1 + 1e-9)
            assert not one.step_s or 24 / one.step_s <= ideal * (1 + 1e-9)
        if rates["grid"].step_s:
            assert rates["ours"].step_s <= rates["grid"].step_s * 1.0051
            assert rates["ours"].step_s <= rates["local rule"].step_s * 1.0051


@pytest.mark.parametrize("seed", range(30))
def test_least_variance_is_that_of_all_divisions(seed):
    rng = np.random.default_rng(seed)
    times, total = rng.uniform(1, 4, rng.integers(2, 5)), int(rng.integers(6, 16))
    every = (c for c in product(range(1, total + 1), repeat=len(times)) if sum(c) == total)
    least = min(np.var(np.array(c) * times) for c in every)
    counts = least_variance(list(times), total)
    assert sum(counts) == total and min(counts) >= 1
    assert np.var(np.array(counts) * times) == pytest.approx(least)


def test_templates_of_oobleck_are_cut_as_mapped_and_take_about_as_long():
    job = config.load(
        "debug_text.toml", ["planner.hardware=a40", "training.global_batch_size=16", "planner.enable=false"]
    )
    maker = TemplateMaker(config=job, costs=drawn_costs(job, 256), nodes=4, max_failures=1)
    made = literal_templates(maker, range(1, 4))
    layers = set(layer_bytes(job))
    assert made.simulated.templates
    for simulated, estimated in zip(made.simulated.templates, made.estimated.templates, strict=True):
        assert simulated.nodes == estimated.nodes and simulated.partition.num_ranks == simulated.depth
        held = [layer for node in simulated.held for layer in node]
        assert set(held) == layers and len(held) == len(layers)
        assert simulated.seconds(1) >= estimated.seconds(1) * 0.9  # what a rank sends and applies comes in addition


def test_a_mapping_becomes_a_partition():
    spec = model_spec(config.load("debug_vlm.toml").model, dtype_bytes=2)
    total = sum(len(module.layers) for module in spec.modules)
    cuts = [0, 1, total // 2, total]
    stages = tuple(
        MappedStage(layers=(low, high), gpus=(rank, rank + 1), seconds=1.0)
        for rank, (low, high) in enumerate(pairwise(cuts))
    )
    partition = mapped_partition(spec, StageMapping(stages))
    counts = [sum(high - low for low, high in (s.layers for s in partition.of_rank(rank))) for rank in range(3)]
    assert counts == [1, total // 2 - 1, total - total // 2]
    for module in spec.modules:
        of = partition.of_module(module.name)
        assert [layer for stage in of for layer in range(*stage.layers)] == list(range(len(module.layers)))
        assert of[0].first and of[-1].last and sorted(s.pp_rank for s in of) == [s.pp_rank for s in of]


# --------------------------------------------------------------------------------------------- command

ON_A40 = ["--config", "debug_text.toml", "--cluster", "a40", "--training.global_batch_size=16", "--evaluations", "2"]


def test_the_command_prints_all_systems(capsys, tmp_path):
    file = written(tmp_path, *(f"0,joined,n{i}" for i in range(4)), "600,lost,n1", "1200,joined,n1", "1800,lost,n0")
    assert main(["simulate", *ON_A40, "--planner.enable=false", "--failures", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "3 events in 0.5 h, at most 4 nodes of 8 GPUs" in shown
    lines = [line for line in shown.splitlines() if "%" in line]
    assert [line[:10].strip() for line in lines] == ["ours", "local rule", "Oobleck", "restart", "grid", "re-routing"]
    assert shown.splitlines()[-1].split()[:3] == ["1200", "1800", "4"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--nodes", "4"], "--nodes has no effect without --failures or --failure-every"),
        (["--failure-every", "10m"], "--failure-every without --nodes"),
        (["--failure-every", "soon", "--nodes", "4"], "--failure-every 'soon' is no positive duration"),
        (["--failure-every", "10m", "--nodes", "4", "--png", "a.png"], "--png has no effect with --failures"),
        (["--failure-every", "10m", "--nodes", "0"], "--nodes 0; it is at least 1"),
        (["--failure-every", "10m", "--nodes", "4", "--restart-s", "-1"], "--restart-s -1.0"),
        (["--failure-every", "10m", "--nodes", "4", "--hours", "0"], "--hours 0.0; it is above 0"),
        (["--failure-every", "10m", "--failures", "a.csv"], "two sources of events"),
        (["--failures", "a.csv", "--hours", "3"], "--hours has no effect with --failures"),
        (["--failures", "none.csv"], "none.csv cannot be read"),
    ],
)
def test_wrong_options_are_named_in_one_line(capsys, words, hint):
    assert main(["simulate", *ON_A40, *words]) == 2
    shown = capsys.readouterr().err.strip()
    assert hint in shown and "\n" not in shown
