"""The guides under docs/ work as printed: their files are written and their commands run, from the top to the bottom.

Trainings have two steps. Every second page is followed daily, and trainings that nothing later on it reads are only
checked as a config; `make nightly` follows all pages and runs all trainings.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.commands import cli
from mmtrain.config import config
from mmtrain.launch.processes import end_with_parent
from tests.guides import (
    DOCS,
    MADE_BEFORE,
    NO_WORKERS,
    ROOT,
    SHORT,
    Command,
    File,
    advised,
    blocks,
    make_source_tree,
    run,
    small_trainings,
    steps,
)
from tests.lighthouse import need_torchft

GUIDES = ("quickstart.md", "fine_tuning.md", "bringing_data.md", "tuning.md", "recipes.md")
NOT_RUN = ("make", "pip", "tensorboard")


@pytest.fixture
def trained(charts: Path, shapes: Path) -> Path:
    """The runs of the two small trainings."""
    return small_trainings(charts, shapes)


@pytest.fixture
def checkout(tmp_path: Path, charts: Path, shapes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree to work in; it is the working directory."""
    make_source_tree(tmp_path, charts, shapes)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_and_commands_are_found() -> None:
    found = steps("bringing_data.md")
    names = [step.name for step in found if isinstance(step, File)]
    assert names[:3] == ["make_images.py", "my_images.toml", "my_images/llava.json"]
    assert Command(("python", "make_images.py")) in found
    assert all(any(isinstance(step, Command) for step in steps(page)) for page in GUIDES)


@pytest.mark.parametrize("page", ["bringing_data.md", "fine_tuning.md"])
def test_settings_that_a_guide_advises_fit_its_own_job(page: str, checkout: Path) -> None:
    for step in steps(page):
        if isinstance(step, File) and step.name.endswith(".toml"):
            (checkout / step.name).write_text(step.text)
    found = advised(page)
    assert found
    for job, settings in found:
        config.load(checkout / job, settings)


ROWS = re.findall(
    r"^\| (\d+) x (\d+) x (\d+) \| (full|selective) \| (.*) \|$", (DOCS / GUIDES[3]).read_text(), re.MULTILINE
)


@pytest.mark.parametrize("row", [ROWS[0], *(pytest.param(row, marks=pytest.mark.nightly) for row in ROWS[1:])])
def test_figures_of_layouts_are_those_of_the_simulator(
    row: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    pp, dp, tp, mode, figures = row
    words = [
        f"--parallelism.{name}_degree={n}"
        for name, n in zip(("pipeline_parallel", "data_parallel_shard", "tensor_parallel"), (pp, dp, tp), strict=True)
    ]
    unlimited = ["--planner.memory_limit="] if mode == "selective" else []
    command = ["simulate", "--config", "vlm_s.toml", "--cluster", "h800x16"]
    command += ["--iterations", "4", "--schedule", "interleave"]
    assert cli.main([*command, *words, f"--activation_checkpoint.mode={mode}", *unlimited]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("interleave "))
    seconds, _, _, mfu, _, bubble, _, _, _, _, gib, *_ = line.split()[1:]
    assert figures == f"{float(seconds):.1f} | {mfu} % | {bubble} % | {float(gib):.0f}"


@pytest.mark.ranks
@pytest.mark.parametrize("page", GUIDES[::2])
def test_a_guide_works(page: str, trained: Path, checkout: Path) -> None:
    shutil.copytree(trained, checkout / "outputs")
    walk(page, checkout, everything=False)


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_works_with_all_of_its_trainings(page: str, trained: Path, checkout: Path) -> None:
    if page != "quickstart.md":  # which makes them itself
        shutil.copytree(trained, checkout / "outputs")
    walk(page, checkout, everything=True)


def walk(page: str, folder: Path, *, everything: bool) -> None:
    """Follows a page as a reader does."""
    all_steps = steps(page)
    for place, step in enumerate(all_steps):
        if isinstance(step, File):
            (folder / step.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.name).write_text(step.text)
            continue
        if step.words[0] in NOT_RUN:
            continue
        words = list(step.words)
        if words[1] == "data":
            words[3] += "-anew"
            words[words.index("--num-samples") + 1] = "60"
        if "--limit" in words:
            words[words.index("--limit") + 1] = "2"
        later = [word for other in all_steps[place:] if isinstance(other, Command) for word in other.words]
        if words[1] in ("train", "check-parity") and not everything and not _is_read(words, later):
            words = ["mmtrain", "config", *(word for word in words[2:] if word != "--synthetic")]
        run(replace(step, words=tuple(words)), folder)


def _is_read(words: list[str], later: list[str]) -> bool:
    """Whether a later command reads the run of a `mmtrain train` command, which is not there yet."""
    job = words[words.index("--config") + 1].removesuffix(".toml")
    return words[1] == "train" and job not in MADE_BEFORE and f"outputs/{job}" in later


@pytest.mark.nightly
@pytest.mark.ranks
def test_the_worked_schedule_is_added_shown_tested_and_run(tmp_path: Path, charts: Path) -> None:
    page = "schedule.md"
    for name in ("mmtrain", "tests", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "charts").symlink_to(charts)
    for step in steps(page):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.text)
    imported, entry = [body for body in blocks(DOCS / page, "python") if len(body.splitlines()) == 1]
    _insert(tmp_path / "mmtrain/schedule/library/catalogue.py", imported, before="from mmtrain.schedule.library.zbv")
    _insert(tmp_path / "mmtrain/schedule/library/catalogue.py", entry, before='    "1F1B": Schedule(')
    _insert(
        tmp_path / "mmtrain/schedule/library/names.py", '    "Rounds",\n', before='    "1F1B",\n    "Interleaved1F1B",'
    )
    for example in blocks(DOCS / page, "console"):
        command, _, shown = example.partition("\n")
        assert _output(command.removeprefix("$ ").split(), tmp_path) == shown, f"{command} prints something else now"
    for step in steps(page):
        if isinstance(step, Command) and "check-parity" not in step.words:
            _output([*step.words, *((*SHORT, *NO_WORKERS) if "train" in step.words else ())], tmp_path)


def _insert(file: Path, text: str, before: str) -> None:
    old = file.read_text()
    assert old.count(before) == 1
    file.write_text(old.replace(before, text + before))


def _output(words: list[str], folder: Path) -> str:
    """What a command prints that runs the copy of the package in a folder."""
    start = ["-m", "mmtrain.commands.cli"] if words[0] == "mmtrain" else []
    done = subprocess.run([sys.executable, *start, *words[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.nightly
@pytest.mark.ranks
def test_two_nodes_on_one_machine_train_together(checkout: Path) -> None:
    commands = [
        step for step in steps("multi_node.md") if isinstance(step, Command) and "localhost:29500" in step.words
    ]
    started = []
    for command in commands:
        words = [word for word in command.words[1:] if word != "&"]
        words[words.index("localhost:29500")] = str(checkout / "rendezvous")  # in the place of a port that may be taken
        words = ["-m", "torch.distributed.run", "--rdzv-conf", "store_type=file", *words, *SHORT]
        started.append(
            subprocess.Popen(
                [sys.executable, *words], cwd=checkout, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
            )
        )
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sum("mesh: pp 2" in text for text in printed) == 1, "rank 0 lives on one of the nodes"
    assert (checkout / "outputs" / "two_nodes" / "metrics.jsonl").is_file()


def test_the_files_for_clusters_are_well_formed(tmp_path: Path) -> None:
    import yaml

    files = {step.name: step.text for step in steps("multi_node.md") if isinstance(step, File)}
    service, job = yaml.safe_load_all(files["job.yaml"])
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29500" in command
    for name in ("job.sbatch", "elastic.sbatch"):
        (tmp_path / name).write_text(files[name])
        assert subprocess.run(["bash", "-n", str(tmp_path / name)], capture_output=True).stderr == b""


def test_the_parts_of_an_elastic_job_in_a_cluster_find_each_other() -> None:
    import yaml
    from torch.distributed.run import get_args_parser

    text = next(step.text for step in steps("multi_node.md") if isinstance(step, File) and step.name == "elastic.yaml")
    lighthouse, service, policy, job = yaml.safe_load_all(text)
    labels = lighthouse["spec"]["template"]["metadata"]["labels"]
    assert lighthouse["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (only,) = policy["spec"]["ingress"]
    reached = policy["spec"]["podSelector"]["matchLabels"]
    assert only["from"] == [{"podSelector": {"matchLabels": reached}}]
    template = job["spec"]["template"]
    assert template["metadata"]["labels"] == reached and reached.items() <= labels.items()
    assert job["spec"]["completionMode"] == "Indexed" and template["spec"]["restartPolicy"] == "Never"
    args = get_args_parser().parse_args(template["spec"]["containers"][0]["command"][1:])
    assert args.nnodes == "1" and args.training_script == "train.py"
    words = [word for word in args.training_script_args if word.startswith("--elastic")]
    (port,) = service["spec"]["ports"]
    assert words == [f"--elastic.lighthouse=http://{service['metadata']['name']}:{port['port']}"]
    on = ["--parallelism.pipeline_parallel_degree=1", "--elastic.enable=true", *words]
    assert config.load("debug_vlm.toml", on).elastic.lighthouse == "http://lighthouse:29510"


def test_torchrun_knows_the_options_of_the_guide() -> None:
    from torch.distributed.run import get_args_parser

    for step in steps("multi_node.md"):
        if isinstance(step, Command) and step.words[0] == "torchrun":
            args = get_args_parser().parse_args([word for word in step.words[1:] if word != "&"])
            assert args.training_script == "train.py"


def test_the_lighthouse_knows_the_options_of_the_guide() -> None:
    need_torchft()
    server = Path(sys.executable).parent / "torchft_lighthouse"
    text = subprocess.run([server, "--help"], capture_output=True, text=True).stdout
    known = set(re.findall(r"--\w+", text))
    commands = [step.words for step in steps("multi_node.md") if isinstance(step, Command)]
    used = {word for words in commands if words[0] == "torchft_lighthouse" for word in words if word[:2] == "--"}
    assert used <= known and "--heartbeat_timeout_ms" in used
