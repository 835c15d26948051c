"""Video clips with captions, drawn from a distribution: what a text-to-video job would read. Pure and deterministic.

Which moments are published and which are assumed is in docs/workloads.md.
Sources: DIP, arXiv:2504.14145, section 7.1; InternVid, arXiv:2307.06942; MMTrail, arXiv:2407.20962.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmtrain.config import Config
from mmtrain.data.buckets import VideoGeometry, most_frames, video_geometry
from mmtrain.data.metadata import ClipMeta
from mmtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBins:
    """What a workload of clips fills: the microbatches of one step on one model replica, and the buckets of clips."""

    num_microbatches: int
    seq_len: int
    """Tokens of the longest caption; longer ones are cut."""
    geometry: VideoGeometry
    """The buckets, of frames and sizes of latents."""
    most_frames: int
    """Frames of all clips of a microbatch."""
    most_clips: int
    """Clips of a microbatch."""

    @classmethod
    def of(cls, config: Config) -> "ClipBins":
        """The bins of one replica of a text-to-video job.

        Raises: ConfigError: it is no such job, or its buckets do not fit the model.
        """
        if config.model.dit is None:
            raise ConfigError("a workload of video clips needs a text-to-video job, and this one has no [model.dit]")
        return cls(
            num_microbatches=config.training.global_batch_size // config.parallelism.mesh_shape.dp,
            seq_len=config.training.seq_len,
            geometry=video_geometry(config.model.dit, config.data),
            most_frames=most_frames(config.data),
            most_clips=config.data.max_clips,
        )


def video_captions(rng: np.random.Generator, bins: ClipBins) -> Iterator[list[ClipMeta]]:
    """Microbatches without end: clips in the order in which they come; one that does not fit opens the next.

    Half of the clips are like InternVid's (11.7 s on average before they are cut, short captions), half like
    MMTrail's (4.9 s, long captions). Each goes to the longest bucket that it fills; sizes are equally frequent.
    """
    taken: list[ClipMeta] = []
    room = bins.most_frames
    for clip in _clips(rng, bins):
        if len(taken) == bins.most_clips or clip.frames > room:
            yield taken
            taken, room = [], bins.most_frames
        taken.append(clip)
        room -= clip.frames


def _clips(rng: np.random.Generator, bins: ClipBins) -> Iterator[ClipMeta]:
    geometry = bins.geometry
    sample = 0
    while True:
        if rng.random() < 0.5:  # InternVid: 760,000 h and 4.1e9 words in 234e6 clips
            duration, tokens = rng.lognormal(np.log(11.7) - 0.32, 0.8), rng.lognormal(np.log(23.3) - 0.08, 0.4)
        else:  # MMTrail: 27,100 h in 20e6 clips
            duration, tokens = rng.lognormal(np.log(4.9) - 0.125, 0.5), rng.lognormal(np.log(100) - 0.08, 0.4)
        frames = geometry.longest(max(geometry.frames[-1], round(duration * geometry.fps)))
        height, width = geometry.sizes[rng.integers(len(geometry.sizes))]
        yield ClipMeta(
            sample=sample,
            frames=frames,
            height=height,
            width=width,
            num_tokens=geometry.num_tokens((frames, height, width)),
            num_text_tokens=min(max(1, round(tokens)), bins.seq_len),
        )
        sample += 1
