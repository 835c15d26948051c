"""`mmtrain profile`: measures the costs of a job's layers on this machine."""

import argparse
import os
from pathlib import Path

from mmtrain.config import config


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "profile",
        help="measure a job's layers on this machine",
        usage="mmtrain profile [-h] --config CONFIG [options] [--section.key=value ...]",
        description="Measures what the layers of a job, its actions, transfers and ends of steps take on this machine, "
        "with random weights and noise for data, and writes a file for planner.profile. Prints the fits with their "
        "errors and the smallest efficient sub-microbatch. Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: profile.json in job.dump_folder")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="over all measurements (default 3)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of each trainer in a round (default 4)")
    parser.add_argument(
        "--hardware", metavar="NAME", help="hardware profile to compare with (default: planner.hardware, or cpu on one)"
    )
    parser.add_argument("--hardware-out", type=Path, metavar="FILE", help="write it with fitted efficiencies, as TOML")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="instead: write the seconds of each module for N samples of the job's data, by its cost model, from "
        "headers and token counts alone (--out, default samples.json in job.dump_folder)",
    )
    parser.add_argument("--workload", metavar="NAME", help="with --samples: of a drawn workload in place of the data")
    parser.set_defaults(run=_profile, takes_overrides=True, overrides=[])


def _profile(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from mmtrain.costs.operators.hardware import load_hardware
    from mmtrain.errors import ConfigError
    from mmtrain.simulator.make_job import job_spec, make_job

    for name, value in (("--rounds", args.rounds), ("--steps", args.steps), ("--samples", args.samples)):
        if value is not None and value < 1:
            raise ConfigError(f"profile: {name} {value}; it is at least 1")
    if args.workload is not None and args.samples is None:
        raise ConfigError(f"profile: --workload {args.workload} has no effect without --samples N; add it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mmtrain.parallel.mesh import on_own_device

    job = on_own_device(config.load(args.config, args.overrides))
    job = config.of_pipeline(job, job.parallelism.layout.deepest)  # layers take the same time in all
    what = "profile.json" if args.samples is None else "samples.json"
    out: Path = args.out or Path(job.job.dump_folder) / what
    if not out.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"profile: --out {out}: the name must end in .json or .json.gz")
    for path in (args.out, args.hardware_out):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"profile: {path}: the folder {path.parent} does not exist; make it")
    if args.samples is not None:
        return _samples(job, args.samples, args.workload, out)
    hardware = args.hardware or job.planner.hardware
    job = replace(
        job,
        planner=replace(job.planner, hardware="", profile=""),
        parallelism=replace(job.parallelism, vocabulary_parallel="tensor"),  # layers are measured whole
    )
    # Raises if a model cannot be built, cut or divided.
    spec = job_spec(job) if job.elastic.enable else make_job(job).spec
    if hardware:
        load_hardware(hardware)  # raises if it does not exist
    from mmtrain.costs.profile.calibration import calibrate
    from mmtrain.costs.profile.profile_table import table
    from mmtrain.local.profiler import profile_job
    from mmtrain.modality.submesh import Submesh

    profile = profile_job(job, rounds=args.rounds, steps=args.steps, say=lambda text: print(text, flush=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    profile.write(out)
    if not hardware and profile.machine["device"] == "cpu":
        hardware = "cpu"
    calibration = calibrate(profile, job, spec, hardware) if hardware else None
    print(f"\n{table(profile, spec, Submesh.of(job), calibration)}")
    print(f'{out}: written; set planner.profile = "{out}" to plan with it')
    if args.hardware_out is not None:
        if calibration is None:
            raise ConfigError("profile: --hardware-out needs --hardware NAME, the profile that it starts from")
        args.hardware_out.write_text(calibration.to_toml())
        print(f'{args.hardware_out}: written; set planner.hardware = "{args.hardware_out}" to simulate with it')
    return 0


def _samples(job: config.Config, most: int, workload: str | None, out: Path) -> int:
    from mmtrain.commands.sample_files import drawn_costs, read_costs

    costs = read_costs(job, most) if workload is None else drawn_costs(job, most, workload)
    out.parent.mkdir(parents=True, exist_ok=True)
    costs.write(out)
    totals: dict[str, int] = {}
    for sample in costs.samples:
        for name, passes in sample.ns.items():
            totals[name] = totals.get(name, 0) + passes.total
    shares = ", ".join(f"{name} {100 * total / sum(totals.values()):.1f} %" for name, total in totals.items())
    which = "all" if costs.is_whole else "the first"
    print(f"{out}: {which} {len(costs.samples)} samples of {costs.job['source']}; of their seconds: {shares}")
    return 0
