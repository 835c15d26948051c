"""Several ranks on one CUDA device: which device, which backend, and messages through host memory."""

from itertools import repeat
from pathlib import Path

import pytest
import torch

from mmtrain.config.sections import CommConfig
from mmtrain.data.noise_batches import noise_batch
from mmtrain.errors import ConfigError
from mmtrain.local.profiler import profile_job
from mmtrain.modality.typical import TypicalSizes
from mmtrain.parallel.mesh import backend_of, pick_device
from mmtrain.simulator.workloads import draw
from tests.jobs import layout, video_config
from tests.ranks import run_ranks

SHARED = CommConfig(share_device=True)


def test_ranks_take_their_own_device_or_share_them_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device(CommConfig()) == pick_device(SHARED) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert pick_device(SHARED) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"3 processes .* has 2 CUDA .* set comm\.share_device = true"):
        pick_device(CommConfig())


def test_nccl_carries_what_is_not_shared() -> None:
    device = torch.device("cuda", 0)
    assert [backend_of(of, device) for of in (CommConfig(), SHARED)] == ["cpu:gloo,cuda:nccl", "gloo"]
    assert backend_of(CommConfig(), torch.device("cpu")) == "gloo"


def losses(rank: int, folder: Path, share: bool) -> tuple[bool, list[float]]:
    """Of two steps on noise."""
    from mmtrain.local.driven_steps import timed_steps
    from mmtrain.training.trainer import Trainer

    options = [*layout(pp=2), f"comm.share_device={str(share).lower()}"]
    job = video_config(folder / str(rank), *(f"--{option}" for option in options))
    meta = draw("video_captions", TypicalSizes.typical(job), seed=0, iteration=0)
    trainer = Trainer(job)
    batches = repeat((noise_batch(job.model, meta, 0), meta), 2)
    found = [
        sum(map(float, step.outcome.losses.values())) for step in timed_steps(trainer, torch.device("cpu"), batches)
    ]
    return trainer.mesh.channels.through_host, found


@pytest.mark.ranks
def test_messages_through_host_memory_train_the_same(tmp_path: Path) -> None:
    found = {share: run_ranks(losses, 2, tmp_path / str(share), share) for share in (False, True)}
    assert [[through_host for through_host, _ in ranks] for ranks in found.values()] == [[False] * 2, [True] * 2]
    plain, staged = (ranks[-1][1] for ranks in found.values())
    assert staged == plain
    assert plain[1] != plain[0]


def test_a_shared_device_is_not_profiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile: comm\.share_device = true; .* remove it"):
        profile_job(video_config(tmp_path, "--comm.share_device=true"))
