"""`mmtrain generate`: answers of a vision-language run or exported folder."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.commands.sample import STEP, WEIGHTS, checkpoint_step
from mmtrain.errors import ConfigError, DataError, for_terminal

if TYPE_CHECKING:
    from mmtrain.inference.answering import Answerer, Sampling


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="answer questions about images, videos and sounds with a run or an exported model",
        usage="mmtrain generate [-h] SOURCE (--prompt TEXT [--image FILE ...] [--video PATH ...] [--audio FILE ...] | "
        "--questions DATA | --interactive) [options]",
        description="Answers with a multimodal model, in one process: of a run, or of a folder that `mmtrain export` "
        "or transformers wrote; by transformers' own `generate` where the modules make a class of it, else by the "
        "forward that training runs. Tokens are shown as they come. With --questions each record's first question is "
        "answered; a line of JSON for each, and in the end how many answers equal the record's, in all and by grade.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="job.dump_folder of a run, or a model's folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", metavar="TEXT", help="the question; `<image>`, `<video>` or `<audio>` in it says where one stands"
    )
    what.add_argument("--questions", metavar="DATA", help="conversations as in data.source: a file, folder or id")
    what.add_argument("--interactive", action="store_true", help="ask for questions, until the end of input")
    parser.add_argument(
        "--image", action="append", default=[], type=Path, metavar="FILE", help="give it again for more images"
    )
    parser.add_argument(
        "--video",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="a video file, a folder of frames, or a .npy or .npz array of them; again for more videos",
    )
    parser.add_argument(
        "--audio", action="append", default=[], type=Path, metavar="FILE", help="a sound; again for more sounds"
    )
    parser.add_argument("--split", help="of --questions (default train)")
    parser.add_argument("--limit", type=int, metavar="N", help="answer the first N questions only")
    parser.add_argument(
        "--blank-images",
        action="store_true",
        help="with --questions: answer each again with its images replaced by grey, to show what they are worth",
    )
    parser.add_argument(
        "--blank-audio", action="store_true", help="with --questions: the same with its sounds replaced by silence"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default 128)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the most likely token each time"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw among tokens that hold this probability"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of drawing (default 0)")
    parser.add_argument("--step", type=checkpoint_step, metavar="N", help=STEP)
    parser.add_argument("--weights", choices=("ema", "trained"), help=WEIGHTS + "trained)")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    _check(args)
    from transformers.utils import logging

    from mmtrain.inference.answering import Answerer, Sampling

    logging.disable_progress_bar()
    answerer = Answerer.of(args.source, args.step, args.weights)
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    (_answer_prompts if args.questions is None else _answer_questions)(args, answerer, sampling)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the options before anything is read."""
    for name, fits, rule in (
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", args.temperature >= 0, "at least 0"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
        ("limit", args.limit is None or args.limit >= 1, "at least 1"),
        ("seed", 0 <= args.seed < 2**63, "at least 0 and below 2**63"),
    ):
        if not fits:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}; it must be {rule}")
    asks = args.questions is None
    for name, items in (("image", "images"), ("video", "videos"), ("audio", "sounds")):
        if getattr(args, name) and not asks:
            raise ConfigError(f"--{name} goes with --prompt or --interactive; --questions have {items} of their own")
    for name in ("split", "limit"):
        if asks and getattr(args, name) is not None:
            raise ConfigError(f"--{name} goes with --questions; leave it out")
    for name in ("blank-images", "blank-audio"):
        if asks and getattr(args, name.replace("-", "_")):
            raise ConfigError(f"--{name} goes with --questions, whose answers it compares; leave it out")
    if args.top_p < 1 and not args.temperature:
        raise ConfigError(
            f"--top-p {args.top_p} has no effect without --temperature above 0; set that, or leave it out"
        )


def _answer_questions(args: argparse.Namespace, answerer: "Answerer", sampling: "Sampling") -> None:
    """Prints a line for each record of `--questions`, and how many answers are right."""
    from mmtrain.data.questions import is_right, text_of
    from mmtrain.inference.answering import questions

    answerers = {"answer": answerer}
    if args.blank_images:
        answerers["blanked"] = answerer.blanked()
    if args.blank_audio:
        answerers["silenced"] = answerer.blanked(images=False, audio=True)
    right: dict[str, Counter[str]] = {key: Counter() for key in answerers}
    counts: Counter[str] = Counter()
    for record, reference in questions(args.questions, args.split or "train", args.limit, answerer.kind):
        counts[record.grade] += 1
        answers = {key: one.answer(record, sampling) for key, one in answerers.items()}
        for key, answer in answers.items():
            right[key][record.grade] += is_right(answer, reference, record.tolerance)
        about = {"sample": record.sample, "question": text_of(record.messages[-1])}
        line = json.dumps(about | answers | {"reference": reference}, ensure_ascii=False)
        print(for_terminal(line), flush=True)
    for text in _results(counts, right):
        print(for_terminal(text), file=sys.stderr)


def _answer_prompts(args: argparse.Namespace, answerer: "Answerer", sampling: "Sampling") -> None:
    """Prints the answer to `--prompt`, or to each line of `--interactive`, as it is drawn."""
    from mmtrain.inference.answering import Streamer, asked

    streamer = Streamer(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompts = iter(lambda: input("> "), None) if args.interactive else [args.prompt]
    try:
        for prompt in prompts:
            try:
                answerer.answer(asked(prompt, args.image, args.video, args.audio), sampling, streamer=streamer)
            except DataError as error:
                if not args.interactive:
                    raise
                print(for_terminal(f"error: {error}"), file=sys.stderr)
    except EOFError:
        print()


_CONTROLS = {"blanked": "with blanked images", "silenced": "with silent sounds"}


def _results(counts: Mapping[str, int], right: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """How many answers are right, of all records and of those of each grade, with those of the controls.

    Args: counts: grade -> records. right: `answer` or a control -> grade -> right answers.
    """

    def controls(grades: list[str]) -> str:
        total = sum(counts[grade] for grade in grades)
        return "".join(
            f"; {text} {sum(right[key][grade] for grade in grades)} of {total}"
            for key, text in _CONTROLS.items()
            if key in right
        )

    grades = sorted(counts)
    total, equal = sum(counts.values()), sum(right["answer"].values())
    yield f"{equal} of {total} answers equal the record's{controls(grades)}"
    for grade in grades if any(grades) else ():
        name = grade or "no grade"
        yield f"  {name}: {right['answer'][grade]} of {counts[grade]}{controls([grade])}"
