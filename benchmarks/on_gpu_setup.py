"""python benchmarks/on_gpu_setup.py [--only-install] WHEELS SITE    (benchmarks/on_gpu.sh setup runs it)

Installs into the folder SITE those wheels of the folder WHEELS whose package is not there yet, and prints what the
machine has: devices, versions, and what mmtrain does without. Exit status 1 if it lacks what nothing can stand in for.
"""

import importlib.util
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NEEDED = (
    "torch",
    "transformers",
    "numpy",
    "PIL",
    "safetensors",
    "tokenizers",
    "tqdm",
    "huggingface_hub",
    "torchtitan",
    "numba",
    "tensorboard",
)
WITHOUT = {
    "diffusers": "no text-to-video models",
    "peft": "no adapters",
    "accelerate": "no comparison with Hugging Face's Trainer",
    "datasets": "jsonl and local parquet files alone",
    "pyarrow": "jsonl files alone",
    "hypothesis": "no tests",
    "pytest": "no tests",
}
"""Module -> what is done without it."""


def install(wheels: Path, site: Path) -> list[str]:
    """Names of the wheels that were installed."""
    names = (found.metadata["Name"] or "" for found in metadata.distributions())
    there = {re.sub(r"[-_.]+", "_", name).lower() for name in names}
    new = [wheel for wheel in sorted(wheels.glob("*.whl")) if wheel.name.split("-")[0].lower() not in there]
    if new:
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "pip", "install", *words, "--target", site, *new], check=True)
        sys.path.append(str(site))
        importlib.invalidate_caches()
    return [wheel.name for wheel in new]


def main() -> None:
    wheels, site = (Path(word) for word in sys.argv[-2:])
    print("installed:", *install(wheels, site) or ["nothing"], sep="\n  ")
    if "--only-install" in sys.argv:
        return
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}")
    for name, instead in WITHOUT.items():
        if not importlib.util.find_spec(name):
            print(f"without {name}: {instead}")
    import torch
    import transformers

    print(f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        print(f"device {index}: {of.name}, {of.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        print("no CUDA device: the parts run on the CPU, as far as they can")


if __name__ == "__main__":
    main()
