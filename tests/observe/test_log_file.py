"""What the run folder keeps of the log, and Weights & Biases."""

import logging
import sys
import time
from pathlib import Path

import pytest

from mmtrain.config.sections import MetricsConfig
from mmtrain.errors import ConfigError
from mmtrain.observe.log_file import LogFile, setup_logging
from mmtrain.observe.metrics import Reporter
from mmtrain.observe.validation import Validation

logger = logging.getLogger("mmtrain")


@pytest.fixture(autouse=True)
def _restored():
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


def lines(path: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_it_has_all_lines_from_the_first_on_and_a_resumed_run_adds_to_them(tmp_path, capsys):
    for run in ("first", "second"):
        setup_logging(0)
        logger.info("%s run begins", run)
        file = LogFile(tmp_path, 0)
        logger.info("a step")
        file.write("error: it fails")
        file.close()
        logger.info("not in the folder any more")
    expected = [f"{run} run begins, a step, error: it fails" for run in ("first", "second")]
    assert ", ".join(lines(tmp_path / "log.txt")) == ", ".join(expected)
    assert "it fails" not in capsys.readouterr().out, "the screen has errors from elsewhere, once"


def test_other_ranks_have_a_file_if_they_have_something_to_say(tmp_path):
    for rank in (1, 2):
        setup_logging(rank)
        logger.info("nothing that matters")
        file = LogFile(tmp_path, rank)
        if rank == 2:
            logger.warning("slow")
        file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log-rank-2.txt"]
    assert lines(tmp_path / "log-rank-2.txt") == ["slow"]


@pytest.fixture
def _new_wandb():
    """Its settings are those of its first run in a process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("_new_wandb")
def test_wandb_keeps_a_run_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    section = MetricsConfig(enable_tensorboard=False, progress_bar=False, enable_wandb=True)
    reporter = Reporter(section, tmp_path, enabled=True, steps=1, start=0, config={"training": {"steps": 1}})
    reporter.validation(1, Validation(loss=2.5, accuracy={"easy": (1, 2)}))
    reporter.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    for _ in range(100):  # its process may write behind the end of the run
        if b"validation_metrics/accuracy/easy" in (stored := run.read_bytes()):
            break
        time.sleep(0.2)
    assert b"validation_metrics/accuracy/easy" in stored and b"training" in stored


@pytest.mark.usefixtures("_new_wandb")
def test_wandb_without_an_account_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    section = MetricsConfig(enable_tensorboard=False, progress_bar=False, enable_wandb=True)
    with pytest.raises(ConfigError, match=r"metrics.enable_wandb: no run could be started: .*WANDB_MODE=offline"):
        Reporter(section, tmp_path, enabled=True, steps=1, start=0)


def test_a_name_in_the_log_cannot_steer_the_terminal(tmp_path, capsys):
    setup_logging(0)
    file = LogFile(tmp_path, 0)
    logger.info("source %s\nits table\tends", "a\x1b[2J\r\x9bé")
    file.close()
    shown = "source a\\u001b[2J\\u000d\\u009bé\nits table\tends\n"
    assert capsys.readouterr().out.endswith(shown) and (tmp_path / "log.txt").read_text().endswith(shown)


def test_a_full_disk_costs_the_file_its_lines_and_nothing_else(tmp_path, capfd):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    setup_logging(0)
    logger.info("before the file")
    log = LogFile(tmp_path, 0)
    logger.info("with the file")
    log.write("an error")
    log.close()
    out, err = capfd.readouterr()
    assert [line[9:] for line in out.splitlines()] == ["before the file", "with the file"]
    assert err == ""


def test_a_screen_that_is_gone_costs_no_traceback(tmp_path, capfd, monkeypatch):
    gone = open("/dev/full", "w")  # noqa: SIM115  # as a pipe whose reader has ended
    monkeypatch.setattr(sys, "stdout", gone)
    setup_logging(0)
    log = LogFile(tmp_path, 0)
    logger.info("a line")
    log.close()
    logger.handlers = []
    with pytest.raises(OSError):
        sys.stdout.close()
    assert capfd.readouterr().err == ""
    assert (tmp_path / "log.txt").read_text().endswith(" a line\n")
