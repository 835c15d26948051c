"""The commands of docs/benchmarks.md: each is accepted as printed, and runs at a small size, on its real jobs."""

import argparse
import importlib
import re
import shlex
import sys
from functools import partial

import pytest

from mmtrain.commands import cli
from tests.guides import DOCS, ROOT, Command, make_source_tree, run_anew, small_trainings

COUNTS = ("rounds", "steps", "iterations", "repetitions", "batches", "ranks", "replicas", "limit", "wait", "gpus")
SIZES = {"--free": 0, "--training.global_batch_size": 1, "--chart": 1, "--unit-ms": 1}
SIZES |= {f"--{name}": 1 for name in (*COUNTS, "models", "setups", "workloads", "pipelines")}
"""Options that say how much is done, and not what -> number of words that follow, unless there is a `=`."""

SMALL = {
    "python benchmarks/peers.py": "--quick --models t2v_s --chart chart.png",
    "python benchmarks/emulate_peers.py": "--microbatches 8 --repetitions 1 --evaluations 20 --unit-ms 1 --free",
    "python benchmarks/planner.py": "--models vlm_s --effort 0.02",
    "python benchmarks/optima.py compare": "t2v_l-2-1+1-4-1-0 --seconds 0.1",
    "python benchmarks/planning.py": "--repetitions 1",
    "python benchmarks/joint.py": "--models vlm_s --iterations 1 --evaluations 2600 --microbatches 8",
    "python benchmarks/joint.py parts --evaluations 2600 --microbatches 16": (
        "--models t2v_s --iterations 1 --microbatches 4 --switched groups"
    ),
    "python benchmarks/accuracy.py": "--rounds 1 --steps 1",
    "python benchmarks/emulate.py": "--ranks 2 --microbatches 4 --repetitions 1 --batches 1 --unit-ms 1",
    "python benchmarks/emulate_pipelines.py": "--pipelines 1,2 --microbatches 4 --repetitions 1 --unit-ms 1",
    "python benchmarks/robust.py": "--ranks 2 --microbatches 4 --batches 1 --draws 1 --evaluations 20 --unit-ms 1",
    "torchrun --nproc-per-node 2 benchmarks/runtime_overhead.py": "--microbatches 4 --repetitions 1 --steps 1",
    "python benchmarks/one_gpu.py": "--size tiny --rounds 1 --steps 1",
    "python benchmarks/memory.py accuracy": "",
    "python benchmarks/memory.py time": "--rounds 1",
    "python benchmarks/memory.py head": "--tokens 1024 --rounds 1",
    "python benchmarks/host_memory.py": "--rounds 1 --steps 1",
    "python benchmarks/partition.py": "--jobs vlm_s --iterations 1",
    "python benchmarks/partition.py choices": "--jobs debug_text --iterations 1",
    "python benchmarks/partition.py seconds": "--jobs debug_text",
    "python benchmarks/partition.py variants": "--jobs debug_vlm/2x4x3x2 --iterations 1",
    "python benchmarks/partition.py mixtures": "--jobs vlm_s --iterations 1",
    "python benchmarks/xl.py": "vlm_xl_8k t2v_xl_3k --iterations 1 --evaluations 20",
    "python benchmarks/schedules.py": "4 8",
    "python benchmarks/stp.py": "",
    "python benchmarks/braids.py": "--repetitions 1",
    "python benchmarks/braids.py --rows whole": "--repetitions 1",
    "python benchmarks/braids.py --emulated": "--repetitions 1",
    "python benchmarks/braid.py": "--models vlm_s --evaluations 20",
    "python benchmarks/split_backward.py": "--width 64 --tokens 64 --repetitions 1",
    "python benchmarks/recipes.py": "4 8",
    "python benchmarks/tuning_flexpipe.py": "--gpus 4",
    "python benchmarks/flexpipe.py": "--parts figure2,figure12 --vocabularies 64 --gpus 4",
    "python benchmarks/tuning.py": "--models t2v_s --parts config --iterations 1 --evaluations 10 --microbatches 16",
    "python benchmarks/tuning.py --devices": "--models t2v_s --iterations 1 --evaluations 5 --microbatches 8 "
    "--repetitions 1 --unit-ms 1",
    "python benchmarks/separation.py": "2 4",
    "python benchmarks/vocabulary.py": "--models qwen2-2b-152k,vlm_s --evaluations 5",
    "python benchmarks/templates.py": "planning literal",
    "python benchmarks/elastic.py": "--pairs 1 --starts 1 --turns 1 --steps 2 --workers 0",
    "python benchmarks/failures.py": "--setups a40x4 --traces g4dn --evaluations 1",
    "python benchmarks/cornstarch.py": "--models SSS --evaluations 5",
    "python benchmarks/entrain.py": "--setups h800,a40-1b --workloads mix --iterations 1 --evaluations 20 --replicas 2 "
    "--refinements 2",
    "python benchmarks/emulate_entrain.py": "--workloads mix --microbatches 4 --ranks 2 --repetitions 1 --unit-ms 1 "
    "--evaluations 20 --refinements 4 --free",
    "mmtrain train --config debug_vlm.toml --assignment.policy=balanced --parallelism.pipeline_parallel_degree=1 "
    "--parallelism.data_parallel_shard_degree=2": "--training.steps=2",
    "mmtrain allocate --config vlm_s.toml --cluster h800": "--gpus 16 --training.global_batch_size=32",
    "python benchmarks/context_split.py": "--tokens 8192 --sequences 1 --cp 4",
    "python benchmarks/attention.py": "--tokens 256 --repetitions 1",
    "python benchmarks/operators.py": "--counts 1 2",
    "python benchmarks/compiled.py": "debug_text --rounds 1 --steps 4",
    "python benchmarks/on_gpu_blocks.py --small": "--counts 1",
    "python benchmarks/on_gpu_step.py --size tiny": "",
    "python benchmarks/images_matter.py": "--training.steps=2 --lr_scheduler.warmup_steps=1",
    "python benchmarks/video_demo.py": "--parts shift --one-process --training.steps=2 --lr_scheduler.warmup_steps=1 "
    "--validation.steps=1",
    "mmtrain train --config debug_qwen2_vl.toml": "--training.steps=2",
    "mmtrain generate outputs/debug_qwen2_vl --questions data/charts --split validation --blank-images": "--limit 2",
}
"""Job, which is a command without its sizes -> the sizes that make it small."""

ELSEWHERE = {
    "python benchmarks/peers.py --parts compare,ablation": "parts of all of it",
    "python benchmarks/peers.py --parts compare": "a part of all of it",
    "python benchmarks/flexpipe.py --parts figure12": "a part of all of it",
    "python benchmarks/flexpipe.py --parts figure13": "a part of all of it",
    "python benchmarks/flexpipe.py --parts figure16": "a part of all of it",
    "python benchmarks/flexpipe.py --parts bidirectional --evaluations 200": "a part of all of it",
    "python benchmarks/flexpipe.py --parts models": "a part of all of it",
    "python benchmarks/stp.py --parts offload": "a part of all of it",
    "python benchmarks/entrain.py --parts speed": "a part of all of it",
    "python benchmarks/entrain.py --parts packed": "a part of all of it",
    "python benchmarks/entrain.py --parts std,cpu": "parts of all of it",
    "python benchmarks/video_demo.py --parts patches,shift,rate --one-process": "parts of all of it",
    "python benchmarks/emulate.py --jobs vlm_s --microbatches 4 --schedules planned,regrouped": "a part of all of it",
    "benchmarks/on_gpu.sh pack FOLDER": "needs a network, for wheels",
    "benchmarks/on_gpu.sh wheels": "needs the folder of wheels that pack makes",
    "benchmarks/on_gpu.sh all": "needs a GPU",
    "pytest -m gpu": "needs a GPU",
    "make train": "its job, debug_qwen2_vl.toml, is on the page",
    "make train-video": "tests/guides.py trains its job, debug_square.toml",
    "python -m pytest -m nightly -rP tests/faults/...": "these are nightly tests themselves",
    "mmtrain export": "a name; the campaign is tests/faults/test_storage.py",
    "mmtrain plan": "a name; the campaign is tests/faults/test_plan_mutations.py",
}
"""Job -> why it does not run here."""

SHOWS = {
    "python benchmarks/elastic.py": r"(?s)\A(?!.*(DIFFERENT|NOT THE SAME)).*\[2, 2\] -> \[3\] .*\nmain threads",
    "python benchmarks/emulate_peers.py": r"virtual time: all actions of all 24 pipelines end as simulated",
    "python benchmarks/emulate.py": r"virtual time: 12 of 12 timelines equal to the simulated ones to the bit",
    "python benchmarks/emulate_entrain.py": r"virtual time: 40 of 40 timelines equal to the simulated ones to the bit",
    "python benchmarks/video_demo.py": r"shift 1: .* validation loss [\d.]+, shuffled [\d.]+\n +as the job samples +\d",
    "python benchmarks/one_gpu.py": r"(?s)\nplain torch loop  .*\nHugging Face Trainer  .*\nmmtrain  ",
}
"""Job -> what its output says besides figures."""


def commands(text: str) -> list[str]:
    """The commands of a page, from the top to the bottom. Options alone are those of the command before them."""
    found: list[str] = []
    command = ""
    for block, span in re.findall(r"^```\w*\n(.*?)^```$|`([^`]+)`", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines() or [" ".join(span.split())]:
            words = line.partition("  #")[0].strip()
            if re.match(r"(python|torchrun|mmtrain|make|pytest|benchmarks/\S+\.sh) ", words):
                command = words
                found.append(command)
            elif re.match(r"--\w", words) and command:
                found.append(f"{command} {words}")
    return list(dict.fromkeys(found))


def job_of(command: str) -> str:
    """The command without its sizes."""
    words, kept = iter(shlex.split(command)), list[str]()
    for word in words:
        name, _, value = word.partition("=")
        if name in SIZES:
            for _ in range(0 if value else SIZES[name]):
                next(words)
        elif not word.isdecimal() or kept[-1].startswith("--"):
            kept.append(word)
    return " ".join(kept)


def short(command: str) -> str:
    """A name of a test: pytest takes none of more than 100 letters."""
    return command[:90]


PAGE = commands((DOCS / "benchmarks.md").read_text())


def test_commands_and_their_jobs_are_read_from_a_page():
    page = (
        "`python benchmarks/a.py [X]`, `mmtrain` and `a --b`\nand `--rows 2\n--parts x`\n```sh\nmake train  # it\n```\n"
    )
    assert commands(page) == [
        "python benchmarks/a.py [X]",
        "python benchmarks/a.py [X] --rows 2 --parts x",
        "make train",
    ]
    assert job_of("torchrun --nproc-per-node 2 a.py 32 --rounds 4 --gpus=3 --free x") == (
        "torchrun --nproc-per-node 2 a.py x"
    )


def test_every_command_of_the_page_runs_small_or_says_why_not():
    jobs = {job_of(command) for command in PAGE}
    assert jobs - {*SMALL, *ELSEWHERE} == set(), "commands of docs/benchmarks.md that no test runs"
    assert {*SMALL, *ELSEWHERE} - jobs == set(), "commands that docs/benchmarks.md does not name"
    assert not SMALL.keys() & ELSEWHERE.keys()
    assert SHOWS.keys() <= SMALL.keys()


class ParsedError(Exception):
    """Arguments were accepted."""


def parser_that_stops(others):
    """Instead of a method of argparse. Args: others: pattern of the words that it leaves to its caller."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse(parser, args=None, namespace=None):
        rest = parse_known_args(parser, args, namespace)[1]
        if unknown := [word for word in rest if not re.fullmatch(others, word)]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise ParsedError

    return parse


PARSED = [command for command in PAGE if ".py" in command or job_of(command) not in ELSEWHERE]


@pytest.mark.parametrize("command", [*PARSED, *(f"{job} {sizes}" for job, sizes in SMALL.items())], ids=short)
def test_a_command_takes_its_arguments(command, monkeypatch):
    strict, lenient = parser_that_stops(r"(?!)"), parser_that_stops(r"--\w+(\.\w+)+=\S+")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", strict)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", lenient)
    script, arguments = re.fullmatch(r"(?:mmtrain|.*benchmarks/(\w+)\.py)(.*)", command).groups()
    main = importlib.import_module(script).main if script else partial(cli.main, shlex.split(arguments))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(arguments)])
    with pytest.raises(ParsedError):
        main()


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("job", SMALL, ids=short)
def test_a_command_runs(job, tmp_path, charts, shapes, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_source_tree(tmp_path, charts, shapes)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    if "outputs/" in job:
        (tmp_path / "outputs").symlink_to(small_trainings(charts, shapes))
    printed = run_anew(Command(tuple(shlex.split(f"{job} {SMALL[job]}"))), tmp_path)
    assert printed.strip()
    assert re.search(SHOWS.get(job, ""), printed), printed[-4000:]
