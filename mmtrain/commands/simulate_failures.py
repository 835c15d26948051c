"""`mmtrain simulate --failures` and `--failure-every`: throughput while nodes are lost and join."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.commands.allocate import DRAWN, MOST_NODES

if TYPE_CHECKING:
    from mmtrain.config.config import Config
    from mmtrain.simulator.failures.trace import Trace

OF_FAILURES = {
    "nodes": None,
    "max_failures": 1,
    "repair": "",
    "hours": 12.0,
    "detection_s": 3.0,
    "change_s": 4.0,
    "restart_s": 40.0,
    "checkpoint_s": 2.0,
    "checkpoint_every": 10,
}
"""Options that are read with --failures and --failure-every alone, with their defaults."""
EVALUATIONS = 20
"""Default of --evaluations, as of `mmtrain allocate`."""
WITHOUT = ("schedule", "iterations", "replicas", "image_side", "json", "trace", "png", "breakdown")
"""Options that are not read then."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to those of `mmtrain simulate`."""
    group = parser.add_argument_group(
        "failures", "throughput of several systems while nodes are lost and join, see docs/tuning.md"
    )
    group.add_argument(
        "--failures", type=Path, metavar="CSV", help="columns time (seconds), event (lost, joined), node"
    )
    group.add_argument("--failure-every", metavar="TIME", help="mean time between losses, drawn, such as 10m or 6h")
    group.add_argument("--nodes", type=int, metavar="N", help="used at most (default: the most of --failures)")
    group.add_argument("--max-failures", type=int, metavar="F", help="at least F + 1 pipelines (default 1)")
    group.add_argument("--repair", metavar="TIME", help="until a lost node joins again (default: as --failure-every)")
    group.add_argument("--hours", type=float, metavar="H", help="of a drawn trace (default 12)")
    seconds = {
        "detection-s": "from a loss until it is noticed (default 3: the patience with which a stopped process was "
        "noticed after 2.7 s; a killed one after 0.1 s)",
        "change-s": "of a new layout without copying (default 4: 2 to 4 were measured with 4 processes)",
        "restart-s": "of a restart, without reading weights (default 40: 39.7 were measured with 4 processes)",
        "checkpoint-s": "that a checkpoint stops training for (default 2: 50 GB of a GPU over PCIe; it is written "
        "while training goes on)",
    }
    for name, text in seconds.items():
        group.add_argument(f"--{name}", type=float, metavar="S", help=f"seconds {text}")
    group.add_argument("--checkpoint-every", type=int, metavar="K", help="steps between checkpoints (default 10)")


def check_options(args: argparse.Namespace) -> bool:
    """Whether failures are simulated; fills in their defaults. Raises: ConfigError: options do not fit together."""
    from mmtrain.errors import ConfigError

    asked = args.failures is not None or args.failure_every is not None
    given = [name for name in OF_FAILURES if getattr(args, name) is not None]
    if not asked:
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"simulate: --{option} has no effect without --failures or --failure-every; give one")
        return False
    if args.failures is not None and args.failure_every is not None:
        raise ConfigError("simulate: --failures and --failure-every are two sources of events; give one of the two")
    for name in WITHOUT:
        if getattr(args, name) not in (None, "", False):
            option = name.replace("_", "-")
            raise ConfigError(f"simulate: --{option} has no effect with --failures or --failure-every; leave it out")
    for name in ("repair", "hours") if args.failures is not None else ():
        if name in given:
            raise ConfigError(
                f"simulate: --{name} has no effect with --failures, which has its own times; leave it out"
            )
    if args.failure_every is not None and args.nodes is None:
        raise ConfigError("simulate: --failure-every without --nodes; say how many nodes there are")
    for name, default in (*OF_FAILURES.items(), ("evaluations", EVALUATIONS)):
        if getattr(args, name) is None:
            setattr(args, name, default)
    _check_numbers(args)
    return True


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises: ConfigError: a number is out of range."""
    import math

    from mmtrain.errors import ConfigError

    for name, least in (("nodes", 1), ("max_failures", 0), ("checkpoint_every", 1), ("evaluations", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"simulate: --{name.replace('_', '-')} {value}; it is at least {least}")
    if (args.nodes or 0) > MOST_NODES:
        raise ConfigError(f"simulate: --nodes {args.nodes}; it is at most {MOST_NODES}")
    for name in ("detection_s", "change_s", "restart_s", "checkpoint_s"):
        value = getattr(args, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"simulate: --{name.replace('_', '-')} {value}; it is a number of seconds from 0 on")
    if not math.isfinite(args.hours) or args.hours <= 0:
        raise ConfigError(f"simulate: --hours {args.hours}; it is above 0")


def print_failures(args: argparse.Namespace, job: "Config") -> None:
    """Templates of the job, and the systems over the trace. Raises: ConfigError: no pipeline fits; a wrong trace."""
    from tqdm import tqdm

    from mmtrain.commands.sample_files import drawn_costs
    from mmtrain.errors import ConfigError, for_terminal
    from mmtrain.simulator.allocation.template_report import described
    from mmtrain.simulator.allocation.templates import TemplateMaker
    from mmtrain.simulator.failures import comparison
    from mmtrain.simulator.failures.oobleck import literal_templates
    from mmtrain.simulator.failures.trace_replay import FailureCosts

    trace = _trace(args)
    nodes = trace.most_nodes
    if nodes > MOST_NODES:
        raise ConfigError(f"simulate: --failures has up to {nodes} nodes; use at most {MOST_NODES} of them by --nodes")
    with tqdm(unit="template", disable=not sys.stderr.isatty(), leave=False) as bar:
        maker = TemplateMaker(
            config=job,
            costs=drawn_costs(job, DRAWN, args.workload, args.seed),
            nodes=nodes,
            max_failures=args.max_failures,
            evaluations=args.evaluations,
            seed=args.seed,
            progress=lambda: bar.update(),
        )
        stage, templates = maker.chosen()
        literal = literal_templates(maker, [one.nodes for one in templates.templates])
    costs = FailureCosts(
        detection_s=args.detection_s,
        change_s=args.change_s,
        bytes_per_s=maker.node_bytes_per_s,
        restart_s=args.restart_s,
        checkpoint_s=args.checkpoint_s,
        checkpoint_every=args.checkpoint_every,
    )
    found = comparison.compare(trace, comparison.systems(templates, literal), templates, costs)
    events, hours = len(trace.events) - 1, trace.events[-1].time_s / 3600
    print(for_terminal(f"{events} events in {hours:.1f} h, at most {nodes} nodes of {maker.per_node} GPUs"))
    sizes = f"n_0 = {templates.templates[0].nodes} (Oobleck's {literal.simulated.templates[0].nodes})"
    print(f"stages of {described(stage)}; {sizes}; at least {args.max_failures + 1} pipelines\n")
    print(comparison.table_of_systems(found))
    print(comparison.table_of_intervals(found), end="")


def _trace(args: argparse.Namespace) -> "Trace":
    from mmtrain.simulator.failures.trace import drawn_trace, read_trace, seconds_of

    if args.failures is not None:
        trace = read_trace(args.failures)
        return trace if args.nodes is None else trace.most(args.nodes)
    every_s = seconds_of(args.failure_every, "--failure-every")
    repair_s = seconds_of(args.repair, "--repair") if args.repair else every_s
    return drawn_trace(args.nodes, every_s, repair_s, args.hours, args.seed)
