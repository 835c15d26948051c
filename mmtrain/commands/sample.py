"""`mmtrain sample`: clips for prompts, from a checkpoint of a text-to-video job."""

import argparse
import sys
from pathlib import Path
from typing import Literal

WEIGHTS = "averages of the weights (optimizer.ema_decay), or the weights of the last step (default: "
"""Help of the option --weights, up to its default."""
STEP = "checkpoint to take, or best: that of the best validation (checkpoint.keep_best) (default: the newest)"
"""Help of the option --step."""


def checkpoint_step(text: str) -> int | Literal["best"]:
    """The value of the option --step. Raises: ValueError: it is neither a number nor "best"."""
    return "best" if text == "best" else int(text)


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "sample",
        help="make video clips with a text-to-video run",
        usage="mmtrain sample [-h] RUN --prompt TEXT [--prompt TEXT ...] [options]\n"
        "       mmtrain sample [-h] RUN --judge [options]",
        description="Makes clips for prompts with a checkpoint of a text-to-video job, in one process: a GIF each, a "
        "sheet of all with their frames side by side, and samples.json, which says how they were made. The same "
        "command makes the same files. Sizes are those of pixels, if the job has a VAE, which then decodes them; "
        "else of the model's latents, which are pixels if they have 3 channels, and otherwise written as .npy.",
    )
    parser.add_argument("source", type=Path, metavar="RUN", help="job.dump_folder of the job that trained")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="what to show; give it again for more clips"
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
        help="weight of the prompt against no prompt; 1: no guidance, in half of the time (default 2, or 1 if the job "
        "hid no captions: diffusion.caption_dropout = 0)",
    )
    parser.add_argument(
        "--num-samples", type=int, metavar="K", help="clips of each prompt (default 1, or 2 with --judge)"
    )
    parser.add_argument(
        "--judge",
        action="store_true",
        help="count the clips whose pixels show what their prompts say, of a run that learns the easy level of "
        "`mmtrain data shapes`; without --prompt all 12 captions are prompts",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the noise (default 0)")
    parser.add_argument("--step", type=checkpoint_step, metavar="N", help=STEP)
    parser.add_argument("--weights", choices=("ema", "trained"), help=WEIGHTS + "ema where there are any)")
    parser.add_argument("--device", metavar="D", help="such as cpu or cuda (default: cuda where there is one)")
    parser.set_defaults(run=_sample)


def _sample(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from mmtrain.data.toy.easy_judge import PROMPTS
    from mmtrain.inference.sampling import SamplingRequest, sample

    wanted = SamplingRequest(
        prompts=tuple(args.prompt) or (PROMPTS if args.judge else ()),
        negative=args.negative,
        frames=args.frames,
        height=args.height,
        width=args.width,
        num_steps=args.num_steps,
        guidance=args.guidance,
        num_samples=(2 if args.judge else 1) if args.num_samples is None else args.num_samples,
        seed=args.seed,
        judged=args.judge,
    )
    device = _device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = args.out or args.source / "samples"
    with tqdm(total=args.num_steps, unit="step", disable=not sys.stderr.isatty(), leave=False) as bar:
        made = sample(
            args.source,
            out,
            wanted,
            step=args.step,
            weights=args.weights,
            device=device,
            progress=lambda done, total: bar.update(),
        )
    channels, frames, height, width = made.shape
    count = len(wanted.prompts) * wanted.num_samples
    averaged = ", averages of the weights" if made.weights == "ema" else ""
    print(
        f"{out}: step {made.step}{averaged}, {count} clip{'s' * (count > 1)} of {frames} frames of "
        f"{width} x {height}, {args.num_steps} steps, guidance {made.guidance:g}"
    )
    for file in made.files:
        print(out / file)
    if made.verdict is not None:
        print(made.verdict.text())
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
