"""The command as a user types it: what works, and one line for everything that does not."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mmtrain.commands import cli
from mmtrain.commands.cli import main, train_main
from mmtrain.config.sections import CommConfig
from mmtrain.errors import ConfigError
from mmtrain.launch.folder_owner import owned
from tests.jobs import layout, metrics, write_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(tmp_path, charts):
    return write_config(tmp_path, charts)


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--parallelism.pipeline_parallel_degree=2"], "pp=2 = 2 ranks, but the job has 1"),
        (["--trainig.steps=3"], "unknown key trainig; did you mean training?"),
        (["--training.steps=many"], 'training.steps = "many" is a string'),
        (["--data.source=/nowhere/at/all"], "/nowhere/at/all"),
        (["--tokenizer.path=/nowhere/at/all"], "/nowhere/at/all"),
        (["--model.language.num_segments=7"], "needs a layer"),
        (["--training.seq_len=8"], "training.seq_len"),
        (["--model.language.config={model_type='qwen9'}"], "qwen9"),
        (["--data.split=nothing"], "nothing"),
    ],
)
def test_bad_input_ends_with_one_line(job, capsys, monkeypatch, overrides, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert train_main(["--config", str(job), *overrides]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error [rank 0]: ")
    assert message in lines[0]


def test_an_override_with_a_space_is_no_name_of_a_schedule(job, capsys):
    sources = '--data.sources=[{source="a", weight=0}]'
    assert cli.main(["schedule", "show", "--config", str(job), "--data.source=", sources]) == 2
    assert one_line(capsys).endswith('data.sources: "a" has weight = 0.0; it must be above 0 and at most 1e+21, so '
                                     "remove the source if none of its samples is wanted")  # fmt: skip


def nothing_starts(monkeypatch):
    def started(*_):
        raise AssertionError("processes were started")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "train_on_ranks", started)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--parallelism.tensor_parallel_degree=3"], "does not divide model.language: num_attention_heads = 4"),
        (["--parallelism.tensor_parallel_degree=4"], "num_key_value_heads = 2; .* up to 4 that fits this model is 2"),
        (["--parallelism.pipeline_parallel_degree=9"], "needs a layer"),
        (
            [
                "--parallelism.context_parallel_degree=2", "--parallelism.encoder_context_parallel=patches",
                "--model.encoder.config={model_type='siglip_vision_model'}",
            ],
            "stay together",
        ),
    ],
)  # fmt: skip
def test_bad_degrees_are_refused_before_any_process_starts(job, capsys, monkeypatch, overrides, message):
    nothing_starts(monkeypatch)
    for command in ("train", "config"):
        assert main([command, "--config", str(job), *overrides]) == 2
        assert re.search(message, one_line(capsys))


def test_a_run_folder_that_cannot_be_used_is_refused_before_any_process_starts(job, capsys, monkeypatch, tmp_path):
    nothing_starts(monkeypatch)
    (tmp_path / "file").touch()
    assert main(["train", "--config", str(job), f"--job.dump_folder={tmp_path}/file/run"]) == 2
    assert f"job.dump_folder = '{tmp_path}/file/run' cannot be written: Not a directory" in one_line(capsys)
    monkeypatch.setattr(cli, "owned", lambda folder: owned(folder, patience_s=0.0))
    command = "import sys, pathlib; from mmtrain.launch.folder_owner import owned; o = owned(pathlib.Path(sys.argv[1]))"
    command += "; o.__enter__(); print(1, flush=True); input()"
    words = [sys.executable, "-c", command, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main(["train", "--config", str(job)]) == 2
        assert f"belongs to process {other.pid} on" in capsys.readouterr().err.splitlines()[-1]
        other.kill()


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    from mmtrain.parallel.meeting import meet

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as caught:
            meet(CommConfig())
    assert f"the ranks cannot meet at RANK=0, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_processes_of_torchrun_say_the_same_once(capsys, monkeypatch, tmp_path):
    """On the screen, and in the summary that torchrun ends with, the root cause last."""
    failures = {}
    for rank in (1, 0, 2):
        (tmp_path / str(rank)).mkdir()
        report = tmp_path / str(rank) / "error.json"
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
        assert cli._print_error("something else" if rank == 2 else "the same", 2) == 2
        failures[rank] = ProcessFailure(local_rank=rank, pid=rank, exitcode=2, error_file=str(report))
    assert capsys.readouterr().err == "error [rank 1]: the same\nerror [rank 2]: something else\n"
    summary = str(ChildFailedError("train.py", dict(sorted(failures.items()))))
    assert summary.count("the same") == summary.count("something else") == 1
    assert "the same" in summary.splitlines()[-2]


def test_a_missing_config_is_one_line(capsys):
    assert main(["train", "--config", "nothing.toml"]) == 2
    assert 'config file "nothing.toml" does not exist; configs/ has' in one_line(capsys)


def test_a_folder_is_no_config_and_a_file_no_folder_in_one_line(capsys, tmp_path):
    assert main(["config", "--config", str(tmp_path)]) == 2
    assert f'config file "{tmp_path}" is a folder; name a file in it' in one_line(capsys)
    (tmp_path / "file").touch()
    assert main(["data", "charts", str(tmp_path / "file" / "x"), "--num-samples", "4"]) == 2
    said = f"{tmp_path}/file/x cannot be made: Not a directory; name another folder"
    assert one_line(capsys) == f"error: {said}"


def test_config_prints_what_load_reads(job, capsys, tmp_path):
    assert main(["config", "--config", str(job), "--training.steps=7"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    from mmtrain.config import config

    assert config.load(path) == config.load(job, ["training.steps=7"])


def test_every_shipped_config_is_valid():
    from mmtrain.config import config

    for path in sorted((ROOT / "configs").glob("*.toml")):
        assert path.read_text().startswith("# "), f"{path.name}: line 1 is its command"
        assert path.name in path.read_text().splitlines()[0]
        config.load(path)


def test_data_charts(tmp_path, capsys):
    out = tmp_path / "charts"
    assert main(["data", "charts", str(out), "--num-samples", "60", "--seed", "1"]) == 0
    assert "54 training and 6 validation samples" in capsys.readouterr().out
    assert main(["data", "charts", str(out)]) == 2
    assert "exists already" in one_line(capsys)


def test_data_shapes(tmp_path, capsys):
    out, preview = tmp_path / "shapes", tmp_path / "p.gif"
    assert main(["data", "shapes", str(out), "--num-samples", "30", "--seed", "1", "--preview", str(preview)]) == 0
    shown = capsys.readouterr().out
    assert "27 training and 3 validation clips" in shown
    assert preview.read_bytes().startswith(b"GIF")
    assert main(["data", "shapes", str(out)]) == 2
    assert "exists already" in one_line(capsys)
    assert main(["data", "shapes", str(tmp_path / "new"), "--preview", "p.mp4"]) == 2
    assert "name a file that ends in .png" in one_line(capsys)
    assert not (tmp_path / "new").exists()  # refused before anything is drawn


def test_no_command_lists_them(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert {"train", "check-parity", "simulate"} <= {line.split()[0] for line in shown.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["schedule", "show", "1f1b"], "1F1B"),
        (["schedule", "compare", "zb-h1"], "ZB-H1"),
        (["schedule", "list", "Interleave"], "interleave"),
        (["config", "--config", "debug_vlm.toml", "--parallelism.pipeline_parallel_schedule=gpipe"], "GPipe"),
        (["simulate", "--config", "debug_vlm.toml", "--schedule", "1f1b,planned"], "1F1B"),
        (["simulate", "--config", "debug_vlm.toml", "--schedule", "Planned"], "planned"),
        (["simulate", "--config", "debug_vlm.toml", "--cluster", "H800x2"], "h800"),
        (["simulate", "--config", "debug_vlm.toml", "--workload", "MIX", "--image-side", "112"], "mix"),
        (["tune", "--config", "debug_vlm.toml", "--cluster", "h800x2", "--schedules", "1f1b"], "1F1B"),
        (["tune", "--config", "debug_vlm.toml", "--cluster", "h800x2", "--axes", "Memory"], "memory"),
        (["config", "--config", "Debug_VLM.toml"], "debug_vlm.toml"),
        (["config", "--config", "debug_vlm.toml", "--Optimizer.lr=1"], "optimizer"),
        (["config", "--config", "debug_vlm.toml", "--activation_checkpoint.mode=FULL"], "full"),
        (["config", "--config", "debug_vlm.toml", "--model.language.config.model_type=Qwen2"], "qwen2"),
    ],
)
def test_a_name_in_another_case_gets_a_suggestion(capsys, words, near):
    assert main(words) == 2
    line = one_line(capsys)
    assert re.search(rf"did you mean ['\"]?{near}['\"]?\?", line), line


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'?"),
        (["check_parity", "--config", "x"], "did you mean 'check-parity'?"),
        (["data", "chart"], "there is no command 'chart'; did you mean 'charts'?"),
        (["xyzzy"], "there is no command 'xyzzy'; there are finetune, train, doctor"),
        (["Train"], "did you mean 'train'?"),
        (["schedule", "show", "--format", "SVG"], "argument --format: there is no choice 'SVG'; did you mean 'svg'?"),
        (["generate", "x", "--prompt", "y", "--weights", "old"], "there is no choice 'old'; there are ema, trained"),
    ],
)
def test_a_misspelt_command_or_choice_gets_a_suggestion(capsys, words, hint):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert hint in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_word_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["config", "show"])
    assert caught.value.code == 2


@pytest.mark.ranks
def test_train_py_needs_no_launcher_for_one_process(job, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "train.py", "--config", str(job), "--training.steps=2"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert sorted(metrics(job.parent)) == [1, 2]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE = 'x'"),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x'"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_of_a_launcher_that_are_wrong_are_one_line_at_once(job, capsys, monkeypatch, variables, message):
    monkeypatch.setattr("mmtrain.training.trainer.Trainer.__init__", lambda *_: pytest.fail("the job was planned"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    degree = f"--parallelism.data_parallel_shard_degree={variables['WORLD_SIZE'].replace('x', '1')}"
    for start in (train_main, lambda words: main(["train", *words])):
        assert start(["--config", str(job), degree]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


@pytest.mark.nightly  # daily the README's commands start jobs both ways
@pytest.mark.ranks
def test_mmtrain_train_starts_all_ranks(job):
    """`mmtrain train` launches the job itself; torchrun starts train.py with the same result."""
    words = [f"--{o}" for o in layout(pp=2)] + ["--training.steps=2"]
    subprocess.run(
        [sys.executable, "-m", "mmtrain.commands.cli", "train", "--config", str(job), *words], check=True, cwd=ROOT
    )
    ours = metrics(job.parent)
    assert sorted(ours) == [1, 2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    subprocess.run([*torchrun, "--config", str(job), *words], check=True, cwd=ROOT)
    assert metrics(job.parent) == ours
