"""python benchmarks/images_matter.py

Trains the same model twice from the same seed: once with the images, once with their content
blanked (sizes and everything else unchanged), and prints answer accuracy by grade for both. If
images, and their gradients, arrive, the easy grade is far above the blanked run's. `blind` is what
a guess scores that knows the question but not the image.

Any --section.key=value is passed on to both runs. The data set is read from the working directory, as `make train`
leaves it there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mmtrain.config import config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="debug_vlm.toml")
    parser.add_argument("--out", type=Path, help="folder to keep both runs in (default: a temporary one)")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        found = {}
        for name, blank in (("images", "false"), ("blanked", "true")):
            extra = [
                f"--data.blank_images={blank}",
                f"--job.dump_folder={folder / name}",
                "--checkpoint.enable=false",
                "--validation.enable=true",
            ]
            command = [
                sys.executable,
                "-m",
                "mmtrain.commands.cli",
                "train",
                "--config",
                args.config,
                *overrides,
                *extra,
            ]
            print(f"training: {name}", file=sys.stderr, flush=True)
            subprocess.run(command, check=True, stdout=sys.stderr)
            found[name] = last_validation(folder / name)
    job = config.load(args.config, overrides)
    print(f"{job.training.steps} steps of {args.config}; accuracy on held-out charts after the last step")
    print(f"{'grade':8s} {'images':>9s} {'blanked':>9s}")
    for grade in sorted(found["images"]["accuracy"]):
        row = [100 * found[name]["accuracy"].get(grade, 0.0) for name in ("images", "blanked")]
        print(f"{grade:8s} {row[0]:8.1f}% {row[1]:8.1f}%")
    print(f"{'loss':8s} {found['images']['validation_loss']:9.4f} {found['blanked']['validation_loss']:9.4f}")


def last_validation(folder: Path) -> dict:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_loss" in line][-1]


if __name__ == "__main__":
    main()
