"""python benchmarks/failures.py [--setups NAME,...] [--traces NAME,...] [--evaluations N]

Throughput of VLM-S over traces of spot instances (benchmarks/traces): `mmtrain simulate --failures` for several traces
with the same templates. For each setup and trace, of each system: microbatches a second over those of literal Oobleck,
the least of that ratio of all intervals, and over the ideal, which is the throughput of all nodes in proportion to
nodes. `bubbles kept`: re-routing that fills no bubble. Systems that begin with `+` are Oobleck with one part of ours
after the other: microbatches divided for the shortest step, compositions by simulated seconds, the best composition at
each loss, our schedules and memory options; with our cuts and numbers of nodes that is ours.

h800x2  nodes of two H800, 256 microbatches, no division of a stage
a40x4   nodes of four A40, 256 microbatches, no division of a stage, 16-bit moments
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mmtrain.commands.sample_files import drawn_costs
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.simulator.allocation.compositions import Composition, Template, Templates
from mmtrain.simulator.allocation.templates import TemplateMaker
from mmtrain.simulator.failures.comparison import OOBLECK, OURS, compare, systems
from mmtrain.simulator.failures.oobleck import LiteralTemplates, Oobleck, literal_templates
from mmtrain.simulator.failures.systems import BestComposition, LocalRule, ReRouting, System
from mmtrain.simulator.failures.trace import read_trace
from mmtrain.simulator.failures.trace_replay import FailureCosts, Replay

TRACES = Path(__file__).parent / "traces"
NODES = 80
"""The most of any trace."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Nodes, and templates that are made on them."""

    hardware: str
    gpus_per_node: int
    sizes: range
    """Nodes of templates, as far as they fit."""
    overrides: tuple[str, ...] = ()


SETUPS = {
    "h800x2": Setup(hardware="h800", gpus_per_node=2, sizes=range(3, 12)),
    "a40x4": Setup(
        hardware="a40", gpus_per_node=4, sizes=range(2, 7), overrides=('optimizer.moments_dtype="bfloat16"',)
    ),
}


class ExactlyDealt(Oobleck):
    """Oobleck with microbatches divided for the shortest step."""

    def dealt(self, composition: Composition) -> Composition:
        return self.templates.composed(composition.pipelines)


class WithBubbles(ReRouting):
    """Re-routing that fills no bubble."""

    def re_routed_s(self, grid: Composition, alive: int) -> float:
        """The undisturbed step, and what a stage has to do in addition."""
        one, count = grid.pipelines[0], max(grid.microbatches)
        more = count * (len(grid.pipelines) / alive - 1)
        return grid.seconds + more * (one.seconds(count) - one.seconds(1)) / max(1, count - 1)


def played(templates: Templates, literal: LiteralTemplates, searched: Templates) -> dict[str, System]:
    """All systems, and the steps from Oobleck to ours. Args: searched: Oobleck's mapping with our schedules."""
    theirs, estimated = literal.simulated, literal.estimated
    parts: dict[str, System] = {
        "bubbles kept": WithBubbles(templates=templates, live=True),
        "+ division": ExactlyDealt(templates=theirs, estimated=estimated),
        "+ compositions": LocalRule(templates=theirs),
        "+ at each loss": BestComposition(templates=theirs),
        "+ schedules": BestComposition(templates=searched),
    }
    return systems(templates, literal) | parts


def least_ratio(ours: Replay, theirs: Replay) -> float:
    """The least of all intervals in which theirs trains."""
    pairs = zip(ours.intervals, theirs.intervals, strict=True)
    return min((one.rate / two.rate for one, two in pairs if two.samples), default=float("inf"))


def made(setup: Setup, evaluations: int, folder: Path) -> tuple[Templates, LiteralTemplates, Templates, TemplateMaker]:
    """Templates of ours, of Oobleck, and of Oobleck with our schedules and memory options."""
    file = folder / f"{setup.hardware}x{setup.gpus_per_node}.toml"
    file.write_text(f'extends = "{setup.hardware}"\ngpus_per_node = {setup.gpus_per_node}\n')
    changed = ("training.global_batch_size=256", "parallelism.tensor_parallel_degree=1", *setup.overrides)
    job = config.load("vlm_s.toml", [f'planner.hardware="{file}"', *changed])
    costs = drawn_costs(job, 1024)
    maker = TemplateMaker(config=job, costs=costs, nodes=NODES, max_failures=1, evaluations=evaluations)
    found = [maker.template(JobLayout.grid(), nodes) for nodes in setup.sizes]
    ours = maker.joined([one for one in found if isinstance(one, Template)])
    searched = literal_templates(maker, setup.sizes, {}).simulated
    return ours, literal_templates(maker, setup.sizes), searched, maker


def main() -> None:
    """Prints a table for each setup."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS), metavar="NAME,...")
    parser.add_argument("--traces", default="p3,g4dn,a100,v100", metavar="NAME,...")
    parser.add_argument("--evaluations", type=int, default=5, metavar="N", help="plans tried for each template")
    args = parser.parse_args()
    for name in args.setups.split(","):
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            templates, literal, searched, maker = made(SETUPS[name], args.evaluations, Path(folder))
        spent = time.process_time() - begin
        known = {"ours": templates, "Oobleck's": literal.simulated, "with our schedules": searched}
        sizes = ", ".join(f"{key} {of.templates[0].nodes}" for key, of in known.items())
        print(f"\n{name}: nodes of the smallest pipeline: {sizes}; templates took {spent:.0f} s of CPU")
        costs = FailureCosts(
            detection_s=3.0,
            change_s=4.0,
            bytes_per_s=maker.node_bytes_per_s,
            restart_s=40.0,
            checkpoint_s=2.0,
            checkpoint_every=10,
        )
        for file in args.traces.split(","):
            play(file, templates, literal, searched, costs)


def play(name: str, templates: Templates, literal: LiteralTemplates, searched: Templates, costs: FailureCosts) -> None:
    """Prints the rows of one trace."""
    begin, trace = time.process_time(), read_trace(TRACES / f"{name}.csv")

    def of_trace(of: Templates) -> Templates:
        return replace(of, max_nodes=trace.most_nodes, _knapsacks={})

    ours = of_trace(templates)
    theirs = LiteralTemplates(simulated=of_trace(literal.simulated), estimated=of_trace(literal.estimated))
    found = compare(trace, played(ours, theirs, of_trace(searched)), ours, costs)
    spent = time.process_time() - begin
    print(f"\n{name}: {len(found.ideal)} intervals, up to {trace.most_nodes} nodes, {spent:.1f} s of CPU")
    print("system            over Oobleck  least interval  of the ideal  restarts")
    base = found.replays[OOBLECK]
    for system, one in found.replays.items():
        ratio = f"{one.rate / base.rate:12.3f}  {least_ratio(one, base):14.3f}"
        print(f"{system:16}  {ratio}  {100 * one.rate / found.ideal_rate:10.1f} %  {one.restarts:8d}")
    worse = [i for i, j in zip(found.replays[OURS].intervals, base.intervals, strict=True) if i.samples < j.samples]
    for span in worse:
        print(f"  ours is slower at {span.start_s:.0f} s, {span.nodes} nodes, for {span.seconds:.0f} s")


if __name__ == "__main__":
    main()
