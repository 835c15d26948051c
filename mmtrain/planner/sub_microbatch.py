"""How many images a vision work, or clips a DiT work, needs to run well. Pure.

Small works let a schedule interleave finely, but use the device badly.

Source: DIP, arXiv:2504.14145, section 4: the smallest size with at least 95 % of the best efficiency of all tested.
"""

from dataclasses import dataclass

from mmtrain.errors import PlanError

SHARE = 0.95
"""Of the best efficiency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What works of equal images (or clips) take, by their number."""

    patches: int
    """Of each image; latent tokens of each clip."""
    seconds: tuple[tuple[int, float], ...]
    """(images or clips, seconds of the forward and backward of one stage), ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubMicrobatch:
    """The size that the rule picks, and what it rests on."""

    size: int
    """Images in one vision work, or clips in one DiT work."""
    efficiency: tuple[tuple[int, float], ...]
    """(images, images a second relative to the best), ascending."""
    still_rises: bool
    """Whether the largest tested size was the best, so that larger ones might be better."""


def smallest_efficient(curve: Curve, share: float = SHARE) -> SubMicrobatch:
    """The smallest tested number of images whose images a second are at least `share` of the best ones.

    Images are equal, so images a second stand for FLOPs a second. Of clips the same.

    Raises: PlanError: nothing was measured, or a work of no image or no time.
    """
    if not curve.seconds:
        raise PlanError("the rule for sub-microbatches needs measured works; the curve has none")
    for number, seconds in curve.seconds:
        if number < 1 or not seconds > 0:
            raise PlanError(f"a work of {number} images or clips in {seconds} s; both must be above 0")
    rates = sorted((number, number / seconds) for number, seconds in curve.seconds)
    best = max(rate for _, rate in rates)
    efficiency = tuple((number, rate / best) for number, rate in rates)
    size = next(number for number, of_best in efficiency if of_best >= share)
    return SubMicrobatch(size=size, efficiency=efficiency, still_rises=rates[-1][1] == best)
