"""`mmtrain sample`: clips for prompts, from a checkpoint of a text-to-video job."""

import argparse
import sys
from pathlib import Path


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "sample",
        help="make video clips with a text-to-video run",
        usage="mmtrain sample [-h] RUN --prompt TEXT [--prompt TEXT ...] [options]",
        description="Makes clips for prompts with a checkpoint of a text-to-video job, in one process: a GIF each, a "
        "sheet of all with their frames side by side, and samples.json, which says how they were made. The same "
        "command makes the same files. Sizes are those of pixels, if the job has a VAE, which then decodes them; "
        "else of the model's latents, which are pixels if they have 3 channels, and otherwise written as .npy.",
    )
    parser.add_argument("source", type=Path, metavar="RUN", help="job.dump_folder of the job that trained")
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="what to show; give it again for more clips"
    )
    parser.add_argument(
        "--negative", metavar="TEXT", help="what guidance leads away from (default: no caption, as training hides them)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to make (default RUN/samples)")
    parser.add_argument(
        "--frames", type=int, metavar="N", help="(default: of the bucket nearest to half of the longest)"
    )
    parser.add_argument("--height", type=int, metavar="N", help="(default: of the job's first aspect)")
    parser.add_argument("--width", type=int, metavar="N", help="(default: of the job's first aspect)")
    parser.add_argument("--num-steps", type=int, default=30, metavar="N", help="calls of the model (default 30)")
    parser.add_argument(
        "--guidance",
        type=float,
        metavar="W",
        help="weight of the prompt against no prompt; 1: no guidance, in half of the time (default 3, or 1 if the job "
        "hid no captions: diffusion.caption_dropout = 0)",
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="K", help="clips of each prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the noise (default 0)")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to take (default: the newest)")
    parser.add_argument("--device", metavar="D", help="such as cpu or cuda (default: cuda where there is one)")
    parser.set_defaults(run=_sample)


def _sample(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from mmtrain.commands.sampling import Wanted, sample

    wanted = Wanted(
        prompts=tuple(args.prompt),
        negative=args.negative,
        frames=args.frames,
        height=args.height,
        width=args.width,
        num_steps=args.num_steps,
        guidance=args.guidance,
        num_samples=args.num_samples,
        seed=args.seed,
    )
    device = _device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = args.out or args.source / "samples"
    with tqdm(total=args.num_steps, unit="step", disable=not sys.stderr.isatty(), leave=False) as bar:
        made = sample(
            args.source, out, wanted, step=args.step, device=device, progress=lambda done, total: bar.update()
        )
    channels, frames, height, width = made.shape
    count = len(args.prompt) * args.num_samples
    print(
        f"{out}: step {made.step}, {count} clip{'s' * (count > 1)} of {frames} frames of {width} x {height}, "
        f"{args.num_steps} steps, guidance {made.guidance:g}"
    )
    for file in made.files:
        print(out / file)
    if not made.is_pixels:
        print(
            f"these are latents [{channels} channels, frames, height, width], no images: decode them with the VAE "
            "that made the job's data"
        )
    return 0


def _device(name: str) -> str:
    """A usable device. Raises: ConfigError: it cannot be used."""
    import torch

    from mmtrain.errors import ConfigError

    try:
        torch.empty(1, device=name)
    except Exception as error:  # an unknown word, a library without support for it, no such device
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"sample: --device {name} cannot be used: {reason}; name another, such as cpu") from None
    return name
