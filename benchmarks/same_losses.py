"""python benchmarks/same_losses.py BEFORE [--steps 20] [--configs debug_vlm.toml ...] [--section.key=value ...]

Trains each debug configuration for some steps with this tree and with the one in the folder BEFORE, and compares losses
and gradient norms: a refactoring changes no bit of them; where sums round in another order, the largest relative
difference is printed. Other arguments override all configurations. Data sets are read from the working directory, as
`make data shapes` leaves them there. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = (
    "import importlib.util as u, sys\n"
    "new = u.find_spec('mmtrain.commands') and u.find_spec('mmtrain.commands.cli')\n"
    "from importlib import import_module\n"
    "command = import_module('mmtrain.commands.cli' if new else 'mmtrain.cli')\n"
    "assert command.__file__.startswith(sys.argv.pop(1)), command.__file__\n"
    "sys.exit(command.main())"
)
"""The command, wherever a tree has it; first argument: the folder of the tree, which is the one that has to run."""


def text_data(path: Path) -> Path:
    """A file of conversations without images, for the configuration that has no data set of its own."""
    words = ["bar", "pie", "line", "red", "green", "blue", "one", "two", "three", "four"]
    draw = random.Random(0)
    rows = []
    for _ in range(2000):
        asked, answer = (" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(2))
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(
    tree: Path, config: str, steps: int, folder: Path, text: Path, more: list[str]
) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) of a job that the tree in a folder trained. Args: text: conversations."""
    overrides = [
        *more,
        f"--training.steps={steps}",
        f"--job.dump_folder={folder}",
        "--validation.enable=false",
        "--validation.generate=0",
        "--checkpoint.enable=false",
    ]
    overrides += [f"--data.source={text}"] if config == "debug_text.toml" else []
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-P",
        "-c",
        START,
        str(tree),
        "train",
        "--config",
        str(tree / "configs" / config),
        *overrides,
    ]
    subprocess.run(command, env=environment, cwd=folder.parent, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row}


def main() -> int:
    """Prints one line a configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="folder of the other tree")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--configs", nargs="+", default=sorted(p.name for p in (ROOT / "configs").glob("debug_*.toml")))
    args, more = parser.parse_known_args()
    failed = False
    for config in args.configs:
        with tempfile.TemporaryDirectory() as name:
            Path(name, "data").symlink_to(Path("data").absolute())  # in the working directory no other tree is found
            text = text_data(Path(name, "text.jsonl"))
            old = trained(args.before.resolve(), config, args.steps, Path(name, "before"), text, more)
            new = trained(ROOT, config, args.steps, Path(name, "after"), text, more)
        differing = [step for step in sorted(old | new) if old.get(step) != new.get(step)]
        failed |= bool(differing) or not new
        worst = max((abs(a / b - 1) for s in old for a, b in zip(new.get(s, ()), old[s], strict=False)), default=0.0)
        how = f"different at {differing}, by at most {worst:.1e}" if differing else "equal"
        print(f"{config}: {len(new)} steps, {how}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
