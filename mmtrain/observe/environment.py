"""The environment of a run: versions, devices, ranks, commit, for later inspection of the run."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mmtrain import __version__
from mmtrain.launch.atomic_files import write_whole
from mmtrain.launch.launched import local_world_size
from mmtrain.parallel.mesh import Mesh


def environment(mesh: Mesh) -> dict[str, Any]:
    """The environment of one start of a job."""
    layout = mesh.layout
    record: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "mmtrain": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": _device_name(mesh.device),
        "ranks": layout.world_size,
        "ranks_per_host": local_world_size(layout.world_size),
        "mesh": layout.divided,
        "system": platform.platform(terse=True),
    }
    if mesh.device.type == "cuda":
        record["cuda"] = str(torch.version.cuda)
    return record


def write_environment(path: Path, mesh: Mesh, step: int) -> None:
    """Writes environment.json; a resumed run appends its start.

    Args: step: the run continues after it; records of starts at this step or later are removed.
    """
    starts: list[dict[str, Any]] = []
    if step and path.exists():
        try:
            starts = [start for start in json.loads(path.read_text())["starts"] if start["step"] < step]
        except (ValueError, KeyError, TypeError):  # for inspection only: must not stop a run
            starts = []
    text = json.dumps({"starts": [*starts, {"step": step, **environment(mesh)}]}, indent=2)
    write_whole(path, text + "\n")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def _commit() -> str | None:
    """The commit of the running checkout, with `+` if files differ from it; None: no checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, changed = _git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command. Raises: OSError, SubprocessError: no git, or it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
