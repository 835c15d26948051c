"""`mmtrain simulate`: simulates a job on a cluster."""

import argparse
import json
import sys
from pathlib import Path

from mmtrain.commands.simulate_failures import add_options, check_options, print_failures
from mmtrain.config import config
from mmtrain.costs.job_costs import on_hardware

ITERATIONS, REPLICAS, EVALUATIONS = 40, 2, 100
"""Defaults of --iterations, --replicas and --evaluations."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="simulate a job on a cluster",
        usage="mmtrain simulate [-h] --config CONFIG [--cluster NAME] [options] [--section.key=value ...]",
        description="Simulates iterations of a job on hardware that need not be there: their time, model FLOPs "
        "utilisation (MFU), bubble and memory, under one or several schedules, on batches drawn from a workload. "
        "With --failures: throughput while nodes are lost and join. Trains nothing and reads no data. Any "
        "--section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--cluster", metavar="NAME", help="such as h800x16; sets planner.hardware")
    parser.add_argument(
        "--schedule",
        metavar="A,B,...",
        help="see docs/schedule.md; `planned`: plans of the planner's search (default: "
        "parallelism.pipeline_parallel_schedule, and planned with planner.enable)",
    )
    parser.add_argument(
        "--evaluations", type=int, metavar="N", help="plans that a search tries (default 100; 20 with --failures)"
    )
    parser.add_argument(
        "--workload", default="", metavar="NAME", help="see docs/simulator.md (default mix, or video_captions)"
    )
    parser.add_argument("--iterations", type=int, metavar="N", help="iterations to simulate (default 40)")
    parser.add_argument("--replicas", type=int, metavar="R", help="data-parallel replicas (default 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the workload (default 0)")
    parser.add_argument(
        "--image-side", type=int, metavar="PX", help="of every image (default 728) or video clip (default 256)"
    )
    parser.add_argument("--json", action="store_true", help="print every iteration as JSON instead of a table")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the first iteration for Perfetto")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw iteration time over iterations")
    parser.add_argument(
        "--breakdown", type=Path, metavar="FILE", help=".svg or .png: draw where the time goes, a bar a schedule"
    )
    add_options(parser)
    parser.set_defaults(run=_simulate, takes_overrides=True, overrides=[])


def _simulate(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from mmtrain.errors import ConfigError
    from mmtrain.planner.search_settings import PLANNED
    from mmtrain.run_page import breakdown_chart, line_chart
    from mmtrain.schedule.view.draw import document, painted, trace_events
    from mmtrain.simulator.study import SimulationQuestion, simulate_job
    from mmtrain.simulator.study_report import table, to_json

    failures = check_options(args)
    iterations = ITERATIONS if args.iterations is None else args.iterations
    for option, path in (("--trace", args.trace), ("--png", args.png), ("--breakdown", args.breakdown)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"simulate: {option} {path}: the folder {path.parent} does not exist; make it")
    if args.breakdown and args.breakdown.suffix not in (".svg", ".png"):
        raise ConfigError(f"simulate: --breakdown {args.breakdown}: name a file that ends in .svg or .png")
    if args.cluster and any("planner.hardware" in override for override in args.overrides):
        raise ConfigError("simulate: --cluster sets planner.hardware; give one of the two")
    overrides = [*args.overrides, *([f'planner.hardware="{args.cluster}"'] if args.cluster else [])]
    job = on_hardware(config.load(args.config, overrides))
    if failures:
        print_failures(args, job)
        return 0
    schedules = [job.parallelism.pipeline_parallel_schedule, *([PLANNED] if job.planner.enable else [])]
    question = SimulationQuestion(
        config=job,
        schedules=tuple(args.schedule.split(",") if args.schedule else schedules),
        evaluations=EVALUATIONS if args.evaluations is None else args.evaluations,
        workload=args.workload,
        num_iterations=iterations,
        num_replicas=REPLICAS if args.replicas is None else args.replicas,
        seed=args.seed,
        image_side=args.image_side,
    )
    total = iterations * len(question.schedules)
    with tqdm(total=total, unit="iteration", disable=not sys.stderr.isatty(), leave=False) as bar:
        report = simulate_job(question, progress=lambda schedule, done: bar.update())
    print(json.dumps(to_json(report), indent=1) if args.json else table(report), end="\n" if args.json else "")
    if args.trace:
        firsts = {answer.schedule: answer.first for answer in report.answers if answer.first is not None}
        args.trace.write_text(json.dumps(trace_events(firsts)))
    feasible = [answer for answer in report.answers if not answer.problem]
    title = f"{job.job.description}: workload {question.drawn_workload} on {report.machine.name}"
    if args.breakdown:
        bars = breakdown_chart.drawing({a.schedule: a.breakdown for a in feasible}, title=title)
        image = document(bars).encode() if args.breakdown.suffix == ".svg" else painted(bars)
        args.breakdown.write_bytes(image)
    if args.png:
        curves = {a.schedule: [step.iteration_s for step in a.iterations] for a in feasible}
        images = (f"{question.counted} a microbatch", report.images) if any(report.images) else None
        args.png.write_bytes(line_chart.png(curves, title=title, unit="seconds an iteration", backdrop=images))
    needed = report.answers if args.schedule else report.answers[-1:]  # the last one is what the job trains
    return 0 if all(not answer.problem for answer in needed) else 1
