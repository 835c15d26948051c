"""python docs/make_errors_page.py > docs/errors.md (`make docs` runs it; the page is not committed)

Prints the page of all errors that mmtrain raises on purpose, read from its source: the fixed words of each message, by
the part of the program that it comes from. `GROUPS` says what each part's errors are about, `NOTES` what to do about
messages that do not say it themselves.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mmtrain import errors

ROOT = Path(__file__).resolve().parent.parent
ERRORS = (
    "ConfigError",
    "DataError",
    "TooLongError",
    "RecipeError",
    "PlanError",
    "TrainingError",
    "RankLostError",
    "CheckpointError",
    "MMTrainError",
)

INTRODUCTION = """\
# Errors

*Made by `python docs/make_errors_page.py > docs/errors.md` from the source; do not edit it by hand.*

A mistake in what you gave ends the program with exit status 2 and one sentence: where it is, the value, the rule, and
what to change. Under torchrun it begins with the rank: `error [rank 3]: ...`; an error of all ranks is printed once
on each machine, and again as the root cause at the end of torchrun's own lines. Names in braces stand for values. To
find a message, search this page for a few of its fixed words. Many messages are printed after a location: the file of
the config, the sample, the file of a plan.

The seven kinds are classes of `mmtrain/errors.py`, for programs that call mmtrain:

| class | what is wrong |
|---|---|
| `ConfigError` | the TOML file, an override, an option of a command, or a file that they name |
| `DataError` | a sample, a file of the data, or a batch that breaks a rule |
| `PlanError` | a schedule, plan or problem: incomplete, deadlocked, over a memory limit, or its file is damaged |
| `TrainingError` | a step that must not be applied |
| `RankLostError` | a rank that does not answer any more: stopped, dead, cut off, or failed by a bug of its own |
| `CheckpointError` | a checkpoint that must not be loaded: damaged, not verified, or one that would run a program |
| `MMTrainError` | anything else that the program says on purpose; the base of the others |

Any other exception, with Python's traceback, is a bug of mmtrain or of a library. What has no message at all (hangs,
slow steps, a loss that does not fall) is under [troubleshooting](troubleshooting.md).
"""


@dataclass(frozen=True)
class Message:
    """The shape of one error message."""

    file: str
    line: int
    error: str
    text: str
    """Its fixed words; what differs from case to case in braces."""


@dataclass(frozen=True)
class Group:
    """Messages that are about one thing."""

    title: str
    places: tuple[str, ...]
    """How the names of its files begin, below mmtrain/."""
    text: str
    errors: tuple[str, ...] = ERRORS
    advises: bool = False
    """Whether `text` says what to do about each of them."""


GROUPS = (
    Group(
        "The configuration",
        ("config/",),
        "The file is checked before any process starts. `mmtrain config --config FILE` does the same check alone; "
        "every key is under [configuration](config.md).",
    ),
    Group(
        "Models and weights",
        ("models/", "families/", "spec/"),
        "From `[model.*]`: inline configs, `config.json` files, stored weights, frozen parts and adapters; see "
        "[models](models.md) and [swapping models](fine_tuning.md#swapping-parts).",
        errors=("ConfigError",),
    ),
    Group(
        "How the model is cut and divided",
        (
            "planner/partition/partition.py",
            "simulator/cuts.py",
            "simulator/partition_choice.py",
            "planner/partition/pipeline_layout.py",
            "costs/sub_microbatch.py",
            "modality/token_split.py",
            "modality/clips.py",
            "parallel/tensor.py",
            "parallel/mesh.py",
            "parallel/activation_memory.py",
        ),
        "Degrees that do not fit the model, layouts by hand, recomputation; see [choosing "
        "parallelism](tuning.md), [how modules are cut](parallelism.md#how-modules-are-cut) and "
        "[parallelism](parallelism.md).",
    ),
    Group(
        "Memory",
        (
            "planner/memory/limit.py",
            "planner/make_problem.py",
            "planner/iteration.py",
            "schedule/library/",
            "observe/out_of_memory.py",
        ),
        "A limit that nothing fits into, or a device that is full; see [memory](memory.md).",
    ),
    Group(
        "Data: batches",
        ("models/batch.py", "modality/bitfield.py"),
        "These compare the tensors of a batch with its metadata, before each step. Data from `mmtrain`'s own "
        "loader cannot break them: if you wrote a source or loader, it made a batch whose parts disagree at the "
        "place that is named; otherwise it is a bug, to be reported with the config and the message.",
        advises=True,
    ),
    Group(
        "Data: sources and samples",
        ("data/", "modality/metadata.py", "modality/geometry.py", "modality/buckets.py", "parallel/replica_data.py"),
        "Where samples come from and what each must be: [bringing your own data](bringing_data.md) has examples "
        'that work, [data](data.md) the rules. With `data.on_error = "skip"` a bad sample is left out and counted '
        "instead of ending the job.",
    ),
    Group(
        "Works of a batch",
        ("planner/batching.py", "modality/", "models/", "families/", "spec/"),
        "These prove that every image, clip and token of a batch is processed exactly once, and that a chunk "
        "gets the rows that its metadata names. A model of another kind than the data is named with the section to "
        "add; all others are bugs, unless you wrote the data source or the chunk: report them with the config and "
        "the message.",
        errors=("DataError",),
        advises=True,
    ),
    Group(
        "Ranks that miss each other",
        ("parallel/roll_call.py",),
        "After comm.timeout_seconds, or as soon as a connection breaks, see [hanging](troubleshooting.md#hanging). The "
        "message names the ranks that do not answer, with process and machine: look at these.",
        advises=True,
    ),
    Group(
        "Plans and programs",
        (
            "schedule/action.py",
            "schedule/chain.py",
            "schedule/passes/lower.py",
            "schedule/plan.py",
            "schedule/passes/split.py",
            "schedule/transport.py",
            "schedule/io/wire.py",
            "planner/scheduled.py",
            "planner/search/",
            "spec/memory_strategies.py",
            "parallel/",
        ),
        "A plan is checked when it is made, when it is lowered and while it runs. You meet these messages with a "
        "plan or schedule of your own ([writing one](schedule.md#writing-a-schedule)): it is wrong at the rank, step "
        "or action that is named, and `mmtrain schedule show` draws it. With a built-in schedule they are bugs: "
        "report the config, and the batch's problem (`mmtrain schedule show --config FILE --batch K --format "
        "problem --out problem.json`).",
        advises=True,
    ),
    Group(
        "Files of problems and plans",
        (
            "schedule/io/strict_json.py",
            "schedule/problem.py",
            "schedule/graph.py",
            "schedule/io/torch_csv.py",
            "planner/plan_json.py",
            "planner/judge.py",
        ),
        "A `.json` problem or plan, or torch's CSV, that another program wrote: what is wrong stands in the file "
        "at the dotted place that is named. Correct the program that wrote it; the form is under [the planning "
        "problem](schedule.md#the-planning-problem).",
        advises=True,
    ),
    Group(
        "Costs: profiles, hardware, the simulator",
        (
            "costs/profile/profile.py",
            "planner/assignment/sample_costs.py",
            "simulator/allocation/",
            "commands/allocate.py",
            "commands/tune.py",
            "costs/machine.py",
            "costs/operator_costs.py",
            "costs/operators/",
            "simulator/workloads.py",
            "simulator/whole_iteration.py",
            "local/profiler.py",
            "simulator/study.py",
            "run_page/line_chart.py",
            "run_page/breakdown_chart.py",
        ),
        "A profile that is damaged is best measured anew with `mmtrain profile` ([costs](costs.md#measured-costs)). A "
        "hardware file of your own is wrong at the key that is named ([describing your "
        "cluster](costs.md#describing-your-cluster)). Messages about operators and subgraphs are for those who "
        "call the simulator from Python.",
        advises=True,
    ),
    Group(
        "Nodes of elastic jobs",
        (
            "launch/hub.py",
            "launch/lighthouse.py",
            "launch/member.py",
            "launch/membership.py",
            "parallel/generation.py",
            "parallel/stores.py",
        ),
        "See [a job that survives lost nodes](multi_node.md#a-job-that-survives-lost-nodes). A node that cannot go on "
        "ends alone, and its launcher starts it again; a lighthouse that does not answer ends the job at the next "
        "change: start it again, and the job, which goes on from its newest checkpoint. Messages about members and "
        "logs that are malformed mean that something else than a node of this job writes there.",
        advises=True,
    ),
    Group(
        "Training, checkpoints, run folders",
        (
            "training/trainer.py",
            "training/steps.py",
            "training/elastic_job.py",
            "training/rank_state.py",
            "training/elastic_values.py",
            "checkpoint/checkpoint.py",
            "checkpoint/files.py",
            "checkpoint/run_folder.py",
            "launch/folder_owner.py",
        ),
        "While a job starts, runs or is read again; see [checkpoints](checkpoints.md).",
    ),
    Group(
        "Commands and the rest",
        ("",),
        "Options of commands; `mmtrain COMMAND --help` says what there is.",
    ),
)

NOTES: dict[str, str] = {
    # configuration
    "{path}: not valid TOML": "On the command line a string needs no quotes.",
    "{path}: extends = {base}, but": "The name is relative to the file that extends.",
    "override {override}: {section} is a value": "Name the key in full, as in `--planner.enable=true`.",
    "'{value}' of type": "Only for programs that dump a config: use numbers, texts, booleans, arrays and tables.",
    "{where}: the {kind}": (
        "Write it; [configuration](config.md) has its meaning. A file often gets it from another by `extends`."
    ),
    "compile.enable = true with {key}": "Leave one of the two out; its end says what compiled blocks cannot do yet.",
    "the processes of this job differ": "Its end says what to make alike: config, versions, files or devices.",
    "rank {rank} is outside of a mesh": "Only for programs that ask for the place of a rank: ranks count from 0.",
    "train: --nodes {nodes}: {reason}": "Its end says what to add or change.",
    # recipes
    "{path}{line}: not a Python file": "Correct the line that the message names.",
    "{where} raises {name}": "Correct the recipe's function; file and line are in the message.",
    "the recipe gets stuck after": "The rest of the message says what holds up which rank, and what to change.",
    # models
    "{key}: {path} is not valid JSON": "The file is damaged, or a Git LFS pointer: fetch it again.",
    "{key}: {path} holds no JSON object": "It is another file of that name: name the folder of a published model.",
    "{name} cannot be built from the config": (
        "The Hugging Face class says why; compare with the `config.json` of a published model."
    ),
    "{module}: layers {lo}..": "Only for programs that build chunks: name layers that exist.",
    # cutting
    "{where} = '{text}' has more than": "A number behind `*` is too large.",
    # memory
    "step {step}: rank {rank} (pp_rank {pp_rank}) is out of memory": (
        "The message goes on with the option to change first; the folder that it names has the plan and what was "
        "predicted, see [out of memory](memory.md#out-of-memory)."
    ),
    # data
    "its latents have {length}": "Cut or pad them where they are made, or choose a DiT with a smaller patch.",
    "{where}: its caption": (
        "It is made of characters that the tokenizer drops: write a caption, or leave the record out."
    ),
    "frame {index}: {error}": "See the second half of the message. The image can be opened alone to look at it.",
    "frame 0: {error}": "See the second half of the message. The image can be opened alone to look at it.",
    "frame {index} has": "All frames of a clip have one size: write the record's frames anew.",
    "the content of its latents": "The header is fine, the rest is not: make the file again.",
    "its latents hold values": "Look for overflow in the VAE that made them (in float16?), and make the file again.",
    "the shape of its latents changed to": "Files must not change while a job runs: write new ones beside them.",
    "its {what} are a damaged": "Make the file again with `numpy.savez`.",
    "its .npz file cannot": "Make the file again with `numpy.savez`.",
    "its {what} are no .npy": (
        "Write it with `numpy.save`: latents as floats [channels, frames, height, width], frames as uint8 [frames, "
        "height, width, 3]."
    ),
    "the array of its frames": "Cut short or damaged: make the file again.",
    "its header lacks the number of frames": "Write the video again with `ffmpeg -i old.mp4 new.mp4`.",
    "the content of its video": "Cut short or damaged: fetch it again, or leave it out.",
    "its video cannot be opened": "FFmpeg does not know the file, or it is damaged: try `ffprobe` on it.",
    "image of {width} x {height}": "An image without pixels: leave the record out.",
    "a data worker died": (
        "Mostly memory: lower `data.num_workers` or `data.prefetch`. `data.num_workers = 0` shows an error of the "
        "worker's own."
    ),
    "loader state": "The checkpoint's `train_state.json` was changed by hand: restore it, or take an older checkpoint.",
    "loader state: it is a position in the sources": "The run's `config.toml` has them.",
    "{split} has no usable sample": (
        "The example says why one was left out; the policies are `data.on_error` and `data.too_long`."
    ),
    "its content is corrupt": "The image's header is fine, the rest is not: fetch it again, or leave it out.",
    "it decodes to": "A damaged file, or one whose format Pillow reads in another way: write the image anew.",
    "its {number} bytes are not": "Not an image, or a format that Pillow does not know: write it as PNG or JPEG.",
    "{where}: a message has the role": (
        "`human` and `gpt` are for turns of `from` and `value`, see [records](data.md#records). `tool` needs a chat "
        "template that knows it."
    ),
    "its header is corrupt": "Fetch the file again, or leave the record out.",
    "{where}: the chat template refuses it": (
        "Its words follow. Many templates want user and assistant in turns, and a system message at the beginning only."
    ),
    "its file {path} cannot be read": (
        "Check that the path exists on every machine; a relative one starts at the folder of the file that names it."
    ),
    "data.source {name} has the columns": "[Records](data.md#records) has an example of each form.",
    "{path}: its list is not closed": "Fetch or write the file again.",
    "{where}: `{column}` is not a list": "[Records](data.md#records) has an example of each form.",
    "{where}: it has neither bytes": "A row whose image is empty: leave the record out, or its `images` away.",
    "{where}: its base64": "Write the `data:` URL anew.",
    "sample {index} of {path}: not valid JSON": (
        "Each line of a .jsonl file is one JSON object, without line breaks inside."
    ),
    "sample {index}: its row": "Its text is not UTF-8, or the file is damaged: write it anew, or leave the row out.",
    "{name} cannot be used": (
        "A library's error that has no message of its own here; its kind and words follow. Look at the sample alone."
    ),
    "{key} = {value} does not exist; {instead}": (
        "Paths start where the job was started. The nearest name, or all names beside it, follow."
    ),
    "{key} = {value} does not exist; {instead} (": (
        "Local paths come first. For an id of the hub whose owner is called like a folder start the job elsewhere."
    ),
    "data.source = '{source}': no such folder, and the hub": (
        "A path is misspelt, or there is no network: download the data set before, and name its folder."
    ),
    "data.source = '{path}' is one file": (
        "Name a folder with both splits, or set `validation.enable = false` and `validation.generate = 0`."
    ),
    "data.source = '{source}': a file must end": (
        "Convert it with `datasets` or pandas: `to_parquet`, or `to_json(lines=True)`."
    ),
    "data.source = '{source}', split '{split}' cannot": (
        "The reason is that of the library `datasets`. Offline, an id works only if it was downloaded before; a "
        "private one needs a login to the hub. An interrupted download is repaired by clearing its folder in the "
        "cache of `datasets`."
    ),
    "data.source cannot be read": (
        "The file system's reason follows. Every job's leaders read the data: is it there on their machines?"
    ),
    "the tokenizer has": "Only for programs that train a tokenizer: give more text, or ask for a smaller vocabulary.",
    # training
    "checkpoint: ": "The file system's reason follows: permissions, space, or a mount that only some machines have?",
    "{folder} is damaged: ": (
        "The file was changed after it was written: look at the disk; bring back a copy, or take another checkpoint. "
        "`checkpoint.load_step` and `--step` name one; a resume without either takes the newest that is whole."
    ),
    "{folder} is refused: ": (
        "mmtrain never writes such a file: whoever gave you the checkpoint, or changed it, wants to run something."
    ),
    "step {step}: the batch has": (
        "No answer, or no clip that can be read, is in the whole batch: look for skipped samples in the log."
    ),
    # commands
    "no plan: ": "The reason follows; under a memory limit raise it or take a schedule that keeps limits.",
    "schedule show: {path}: cannot be read": "The file system's reason follows.",
}
"""Beginning of a message -> what to do, where the message does not say it."""


_FIXED = re.compile(r"[a-z]{3}")
_ADVICE = re.compile(r"; |\. [A-Z]|: (write|give|name) |must end in|needs --|not both")
"""How messages say what to do: behind a semicolon or in a sentence of its own, or as an order."""


def page() -> str:
    """The whole page as Markdown."""
    parts, used = [INTRODUCTION], set()
    by_group: dict[str, list[Message]] = {group.title: [] for group in GROUPS}
    for message in messages():
        by_group[group_of(message).title].append(message)
    for group in GROUPS:
        parts.append(f"## {group.title}\n\n{group.text}\n")
        file, shown = "", set()
        for message in by_group[group.title]:
            if (message.error, message.text) in shown:
                continue
            shown.add((message.error, message.text))
            if message.file != file:
                file = message.file
                parts.append(("\n" if parts[-1].startswith("-") else "") + f"From `{file}`:\n")
            found = note_of(message)
            used.add(found)
            note = f". {NOTES[found]}" if found else ""
            parts.append(f"- `{message.error}`: {_code(message.text)}{note}")
        parts.append("")
    if stale := set(NOTES) - used:
        raise SystemExit(f"NOTES of messages that no longer exist: {sorted(stale)}")
    return "\n".join(parts).rstrip() + "\n"


def messages() -> Iterator[Message]:
    """Every message of the package, by file and line."""
    for path in sorted((ROOT / "mmtrain").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if _is_error(node)]
        for call in sorted(calls, key=lambda call: call.lineno):
            assert isinstance(call.func, ast.Name)
            text = shape(call.args[0]).partition("\n")[0]
            if _FIXED.search(re.sub(r"{[^}]*}", "", text)):  # else it puts a place before another message
                yield Message(file, call.lineno, _kind(call.func.id), text)


def group_of(message: Message) -> Group:
    """The first group that its file and class belong to."""
    name = message.file.removeprefix("mmtrain/")
    return next(g for g in GROUPS if message.error in g.errors and any(map(name.startswith, g.places)))


def note_of(message: Message) -> str:
    """The key of its note, or the empty string."""
    found = [key for key in NOTES if message.text.startswith(key)]
    return max(found, key=len, default="")


def shape(node: ast.expr) -> str:
    """The fixed words of an expression that makes a text, with names in braces for the rest."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(shape, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return shape(left) + shape(right)
        case ast.FormattedValue(value=value, conversion=114):  # !r
            return f"'{{{_name(value)}}}'"
        case ast.FormattedValue(value=value):
            return f"{{{_name(value)}}}"
    return f"{{{_name(node)}}}"


def says_what_to_do(message: Message) -> bool:
    """Whether the message, its note or its group's text does."""
    return group_of(message).advises or bool(note_of(message)) or bool(_ADVICE.search(message.text))


def _is_error(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and bool(_kind(node.func.id) and node.args)


def _kind(name: str) -> str:
    """The class of `ERRORS` that a class is, or is one of; empty: none."""
    bases = getattr(errors, name).__mro__ if isinstance(getattr(errors, name, None), type) else ()
    return next((base.__name__ for base in bases if base.__name__ in ERRORS), "")


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Subscript(value=value):
            return _name(value)
        case ast.Call(func=ast.Name(id="len")):
            return "number"
        case ast.Call(func=ast.Name(id="getattr")):
            return "value"
        case ast.Call(func=ast.Name(), args=[first, *_]):
            return _name(first)
    return "..."


def _code(text: str) -> str:
    """Text as Markdown code, whatever backticks it has."""
    if "`" not in text:
        return f"`{text}`"
    return f"`` {text} ``"


if __name__ == "__main__":
    print(page(), end="")
