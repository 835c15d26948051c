"""The numbers of a run that a checkpoint holds: read back, of older versions, and what they say is due."""

import json
from pathlib import Path

import pytest

from mmtrain.checkpoint.files import StoredCheckpoint
from mmtrain.checkpoint.state import TrainState
from mmtrain.config import config
from mmtrain.config.intervals import Interval
from mmtrain.errors import CheckpointError
from mmtrain.observe.validated import Validated

JOB = config.load("debug_vlm.toml")


def after(state: TrainState, epoch: int, cursor: int, num_samples: int = 20) -> TrainState:
    """The state one step later, at a position of the loader."""
    known = {"num_samples": num_samples} if num_samples else {}
    loader = {"seed": 0, "epoch": epoch, "cursor": cursor} | known
    return state.after(loader=loader, tokens=100, clips=0, samples=8, skipped=False)


def stored(raw: dict) -> StoredCheckpoint:
    """A checkpoint whose state this is, as JSON gives it back."""
    checkpoint = StoredCheckpoint(Path("run/step-1"), None)
    checkpoint.state = json.loads(json.dumps(raw))
    return checkpoint


def test_a_state_is_read_back_equal():
    state = after(TrainState.first(JOB), 0, 8)
    assert (state.samples, state.loader_before["cursor"]) == (8, 0)
    assert TrainState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert TrainState.read(stored(state.to_dict())) == state


def test_the_state_of_an_older_version_is_read():
    """Its samples are not known, its validation counts as done, and its epoch is known after the next step."""
    raw = {"step": 7, "loader": {"seed": 0, "epoch": 2, "cursor": 5}, "tokens": 700, "data": {"a": 1}}
    state = TrainState.read(stored(raw))
    assert state.samples is None and state.clips is None and state.settings == {"a": 1}
    assert state.validated == Validated(step=7)
    assert after(state, 2, 13).samples is None
    for wrong in ({"samples": "8"}, {"loader_before": [1]}, {"validated": 3}, {"validated": {"steps": 3}}):
        with pytest.raises(CheckpointError, match="does not say the"):
            TrainState.read(stored(raw | wrong))


def test_what_is_due_after_a_step_follows_from_the_state_alone():
    states = [TrainState.first(JOB)]
    for epoch, cursor in ((0, 8), (0, 16), (1, 4), (1, 12), (1, 20), (2, 20)):
        states.append(after(states[-1], epoch, cursor))
    due = {
        text: [state.step for state in states if state.reaches(Interval.parse("k", text))]
        for text in ("2 steps", "1 epoch", "0.5 epochs", "0.1 epochs", "2 epochs")
    }
    assert due == {
        "2 steps": [2, 4, 6],
        "1 epoch": [3, 5, 6],
        "0.5 epochs": [2, 3, 4, 5, 6],
        "0.1 epochs": [1, 2, 3, 4, 5, 6],
        "2 epochs": [5],
    }
    assert [TrainState.from_dict(state.to_dict()).reaches(Interval(steps=3)) for state in states[2:5]] == [0, 1, 0]
