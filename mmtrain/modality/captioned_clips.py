"""Video clips with captions, drawn from a distribution instead of data. Pure and deterministic.

docs/simulator.md lists the published and the assumed moments of the distribution.
Sources: DIP, arXiv:2504.14145, section 7.1; InternVid, arXiv:2307.06942; MMTrail, arXiv:2407.20962.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FRAMES_PER_S = 16
"""Frames per second of every clip (DIP, section 7.1, after MovieGen)."""
MOST_S = 16.0
"""Seconds of the longest clip, and of all clips of one microbatch."""
MOST_CLIPS = 8
"""Largest number of clips of one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedClip:
    """One video clip with its caption, before sampling and tokenization."""

    sample: int
    """The index of the sample in the iteration."""
    num_frames: int
    caption_tokens: int

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.num_frames / FRAMES_PER_S


def video_captions(
    num_microbatches: int, *, seed: int, iteration: int, replica: int = 0
) -> tuple[tuple[CaptionedClip, ...], ...]:
    """[microbatch] -> its clips, for one iteration on one model replica; deterministic.

    A microbatch has up to 8 clips with a total duration of at most 16 s, in the order in which they are drawn; a clip
    that does not fit starts the next microbatch. Half of the clips are like InternVid's (11.7 s on average before they
    are cut to 16 s, short captions), half like MMTrail's (4.9 s, long captions).

    Args: seed, iteration, replica: keys of the random stream.
    Source: DIP, arXiv:2504.14145, section 7.1.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, iteration, replica))))
    clips = _clips(rng)
    groups: list[tuple[CaptionedClip, ...]] = []
    microbatch = [next(clips)]
    while len(groups) < num_microbatches:
        clip = next(clips)
        frames = clip.num_frames + sum(earlier.num_frames for earlier in microbatch)
        if len(microbatch) == MOST_CLIPS or frames > MOST_S * FRAMES_PER_S:
            groups.append(tuple(microbatch))
            microbatch = []
        microbatch.append(clip)
    return tuple(groups)


def _clips(rng: np.random.Generator) -> Iterator[CaptionedClip]:
    sample = 0
    while True:
        if rng.random() < 0.5:  # InternVid: 760,000 h and 4.1e9 words in 234e6 clips
            duration, tokens = rng.lognormal(np.log(11.7) - 0.32, 0.8), rng.lognormal(np.log(23.3) - 0.08, 0.4)
        else:  # MMTrail: 27,100 h in 20e6 clips
            duration, tokens = rng.lognormal(np.log(4.9) - 0.125, 0.5), rng.lognormal(np.log(100) - 0.08, 0.4)
        frames = max(1, round(min(duration, MOST_S) * FRAMES_PER_S))
        yield CaptionedClip(sample=sample, num_frames=frames, caption_tokens=max(1, round(tokens)))
        sample += 1
