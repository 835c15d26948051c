"""An sdist and a wheel, as they are published: whole, and running without a source tree."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mmtrain
from mmtrain.config.config import find_file

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "constraints-cpu.txt",
    "train.py",
)
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel of what the sdist holds."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    for name in ("mmtrain", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    sdist = folder / build("sdist", tree, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked")  # our own; `filter` came with Python 3.11.4
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, folder / build("wheel", unpacked, folder)


def build(what: str, tree: Path, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", BUILD, what, folder], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_sdist_and_wheel_hold_what_runs(built):
    sdist, wheel = built
    assert wheel.name == f"mmtrain-{mmtrain.__version__}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"train.py", "configs/vlm_s.toml", "constraints-cpu.txt", "CHANGELOG.md", "LICENSE"} <= in_sdist
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    files = [path.relative_to(ROOT) for path in (ROOT / "mmtrain").rglob("*") if "__pycache__" not in path.parts]
    wanted = {str(path) for path in files if path.suffix not in ("", ".md")}
    wanted |= {f"mmtrain/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert not wanted - in_wheel
    assert not [name for name in in_wheel if name.startswith(("tests", "benchmarks", "configs"))]


def test_a_wheel_runs_the_readmes_first_job(built, tmp_path):
    """`make train`'s job, two steps of it, from a folder in which there is nothing but the installed package."""
    packages, work = tmp_path / "packages", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(packages)  # what pip does with a wheel of pure Python
    variables = {**os.environ, "PYTHONPATH": str(packages)}

    def ran(*words: str) -> str:
        command = [sys.executable, "-c", "import sys; from mmtrain.commands.cli import main; sys.exit(main())", *words]
        done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    place = "import mmtrain; print(mmtrain.__file__)"
    where = subprocess.check_output([sys.executable, "-c", place], cwd=work, env=variables, text=True)
    assert Path(where.strip()).is_relative_to(packages)
    ran("data", "charts", "data/charts", "--num-samples", "60", "--seed", "0")
    short = [
        "--training.steps=2",
        "--validation.enable=false",
        "--validation.generate=0",
        "--lr_scheduler.warmup_steps=1",
        "--planner.enable=false",  # whose kernels would be compiled in this folder, too
        "--planner.partition=dip",
    ]
    said = ran("train", "--config", find_file("debug_qwen2_vl.toml").name, *short)
    assert "step 2" in said
    assert (work / "outputs/debug_qwen2_vl/config.toml").is_file()
