"""`data.validation_part`: samples that are held out of the training split."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from mmtrain.checkpoint.state import TrainState
from mmtrain.config.config import Config
from mmtrain.data.conversations import Conversations
from mmtrain.data.packing import LoaderState
from mmtrain.errors import ConfigError
from tests.data.samples import make_config
from tests.data.test_loader import steps
from tests.data.test_mixture import documents, mixed_config, mixture
from tests.ranks import run_ranks

__all__ = ["mixture"]
TRAIN, HELD_OUT = "train", "validation"


def part_of(config: Config, split: str) -> list[tuple[int, str]]:
    """(index, source) of each sample of a split."""
    sources = Conversations(config, split).sources
    counts = sources.num_samples
    numbers = [index * len(counts) + which for which, count in enumerate(counts) for index in range(count or 0)]
    return [sources.sample(number) for number in numbers]


@pytest.mark.parametrize(("part", "held_out"), [(0.1, 18), (0.07, 12), (1 / 180, 1), (0.5, 90)])
def test_two_parts_share_the_training_split(charts: Path, part: float, held_out: int) -> None:
    config = make_config(charts, validation_part=part)
    found = {split: [index for index, _ in part_of(config, split)] for split in (TRAIN, HELD_OUT)}
    assert len(found[HELD_OUT]) == held_out
    assert sorted(found[TRAIN] + found[HELD_OUT]) == list(range(180))
    assert part_of(make_config(charts), TRAIN) == [(index, "") for index in range(180)]


def test_each_source_of_a_mixture_is_divided(mixture) -> None:
    config = mixed_config(mixture, validation_part=0.25)
    train, held_out = (set(part_of(config, split)) for split in (TRAIN, HELD_OUT))
    assert not train & held_out
    assert {name: sum(source == name for _, source in held_out) for name in ("charts", "squares")} == {
        "charts": 45,
        "squares": 5,
    }


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_no_replica_trains_on_what_is_held_out_also_after_a_resume(charts: Path, degree: int) -> None:
    """An epoch of the 36 samples that train, on any number of replicas and from any step on."""
    config = make_config(charts, validation_part=0.8, global_batch_size=3)
    expected = {split: set(part_of(config, split)) for split in (TRAIN, HELD_OUT)}
    whole = steps(config, 4)
    saved = LoaderState.from_dict(json.loads(json.dumps(whole[1][2].to_dict())))
    read: list[tuple[str, int]] = documents(whole[:2])
    for rank in range(degree):
        read += documents(steps(config, 2, state=saved, dp_rank=rank, dp_degree=degree))
        held_out = documents(steps(config, 2, split=HELD_OUT, dp_rank=rank, dp_degree=degree))
        assert held_out and {(index, source) for source, index in held_out} <= expected[HELD_OUT]
    assert sorted(read) == sorted(documents(whole))
    assert {(index, source) for source, index in read} <= expected[TRAIN]
    assert saved.num_samples == 36 and saved.epochs == Fraction(len(documents(whole[:2])), 36)


def test_parts_that_leave_nothing_are_refused(charts: Path) -> None:
    with pytest.raises(ConfigError, match=r"of the 180 samples of .* is less than one sample to validate on"):
        part_of(make_config(charts, validation_part=0.001), TRAIN)
    assert len(part_of(make_config(charts, validation_part=0.9999), TRAIN)) == 1
    for wrong, rule in (
        ({"validation_part": 1.0}, "it must be below 1"),
        ({"validation_part": -0.1}, "validation_part = -0.1"),
        ({"validation_part": 0.1, "streaming": True, "shuffle": False}, "a stream has no number of samples"),
        ({"validation_part": 0.1, "validation_split": TRAIN}, "nothing tells the two parts apart"),
    ):
        with pytest.raises(ConfigError, match=rule):
            make_config(charts, **wrong)


def resumed(rank: int, saved: dict[str, object], part: float) -> list[str]:
    """The warnings of a job that goes on from a state with these settings."""
    import mmtrain.checkpoint.state as state

    found: list[str] = []
    state.logger.warning = lambda text, *args: found.append(text % args)  # type: ignore[method-assign, assignment]
    TrainState(step=2, loader={}, settings=saved).resumed({**saved, "data.validation_part": part})
    return found


@pytest.mark.ranks
def test_a_checkpoint_from_before_the_key_trained_on_all_samples() -> None:
    said = "data.validation_part was 0.0 when step 2 was saved and is 0.1 now: the data do not go on where they stopped"
    older = {"data.split": TRAIN}
    assert run_ranks(resumed, 1, older, 0.1) == [[said]]
    assert run_ranks(resumed, 1, older, 0.0) == [[]]
    assert run_ranks(resumed, 1, {**older, "data.validation_part": 0.1}, 0.1) == [[]]
