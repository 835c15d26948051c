"""One HTML file of one or several runs, with its style, scripts and data; it loads no other file."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from mmtrain import __version__
from mmtrain.errors import ConfigError
from mmtrain.run_page.numbers import numbers
from mmtrain.run_page.page_charts import HUES, chart_json, charts
from mmtrain.run_page.runs import RunContents, read_run
from mmtrain.schedule.view.drawing import COLOURS


def write_page(folders: Sequence[Path], out: Path) -> int:
    """Writes the page of the runs in some folders; returns its size in bytes.

    Raises: ConfigError: a folder without a run or without a step yet, or a file that cannot be written.
    """
    made = page([read_run(folder) for folder in folders]).encode()
    try:
        out.write_bytes(made)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"report: --out {out} cannot be written: {reason}; name a file in a folder of yours"
        ) from None
    return len(made)


def page(runs: Sequence[RunContents]) -> str:
    """The page of some runs."""
    assets = resources.files("mmtrain") / "assets" / "run_page"
    names = ", ".join(run.name for run in runs)
    data = json.dumps(_data(runs), separators=(",", ":")).replace("<", "\\u003c")  # no end tag within a script
    text = (assets / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(f"{names} - mmtrain"),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": data,
        "script": "".join(
            (assets / f"{name}.js").read_text(encoding="utf-8") for name in ("chart", "timeline", "page")
        ),
    }
    assert all(text.count(f"@{name}@") == 1 for name in parts), "page.html has each mark once"
    return re.sub(f"@({'|'.join(parts)})@", lambda mark: parts[mark[1]], text)  # at once: names of runs may have marks


def _data(runs: Sequence[RunContents]) -> dict[str, Any]:
    return {
        "version": __version__,
        "colours": [{str(kind): colour for kind, colour in kinds.items()} for kinds in COLOURS],
        "runs": [
            {
                "name": run.name,
                "colour": HUES[index % len(HUES)],
                "description": run.setting("job", "description") or "",
                "numbers": [asdict(number) for number in numbers(run)],
                "config": run.config_text,
                "starts": run.starts,
                "timelines": run.timelines,
                "answers": run.answers,
                "samples": run.samples,
            }
            for index, run in enumerate(runs)
        ],
        "charts": [chart_json(chart) for chart in charts(runs)],
    }
