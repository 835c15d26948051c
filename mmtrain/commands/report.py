"""`mmtrain report`: the page of one or several runs."""

import argparse
from pathlib import Path


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="make the page of a run",
        description="Writes one HTML file about a run: numbers, charts, measured and planned timelines, config and "
        "environment (docs/dashboard.md). It needs no network and no server, and may be made while the job runs. "
        "Several runs are drawn over each other.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="job.dump_folder of a job")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default RUN/report.html; report.html of several runs)"
    )
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from mmtrain.run_page.page import write_page

    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    size = write_page(args.runs, out)
    print(f"{out}: {size / 1e6:.2f} MB; open it in a browser")
    return 0
