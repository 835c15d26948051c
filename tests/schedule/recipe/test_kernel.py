"""The compiled kernel needs no folder that can be written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.schedule import numba_start
from mmtrain.schedule.recipe import kernel

SCRIPT = (
    "from mmtrain.schedule.recipe import kernel; print(kernel.is_cached(), type(kernel.compiled().run._cache).__name__)"
)


@pytest.mark.parametrize(("writable", "cache"), [(True, "FunctionCache"), (False, "NullCache")])
def test_the_kernel_is_kept_on_disk_where_a_folder_can_be_written(tmp_path: Path, writable: bool, cache: str) -> None:
    """A copy of the kernel alone, in a process of its own; that numba cannot make a folder holds for root too."""
    folder = tmp_path / "mmtrain" / "schedule" / "recipe"
    folder.mkdir(parents=True)
    shutil.copy(str(kernel.__file__), folder)
    shutil.copy(numba_start.__file__, folder.parent)
    if not writable:
        (folder / "__pycache__").write_text("not a folder")
    nowhere = {"XDG_CACHE_HOME": "/dev/null", "HOME": "/dev/null", "PYTHONPATH": str(tmp_path)}
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    answer = subprocess.run(
        [sys.executable, "-B", "-c", SCRIPT],
        env=kept | nowhere,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert answer.stdout.split() == ["False", cache]
