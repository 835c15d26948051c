"""The smallest number of images in a vision work, or of clips in a DiT work, that is efficient. Pure.

Small works let a schedule interleave finely, but use the device inefficiently.

Source: DIP, arXiv:2504.14145, section 4: the smallest size with at least 95 % of the best efficiency of all tested.
"""

from dataclasses import dataclass

from mmtrain.errors import PlanError

SHARE = 0.95
"""Required fraction of the best efficiency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of works of equal images (or clips), by their number."""

    patches: int
    """Patches of each image, or latent tokens of each clip."""
    seconds: tuple[tuple[int, float], ...]
    """Numbers of images or clips, ascending, each with the seconds of the forward and backward of one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSubMicrobatch:
    """The size that the rule selects, and the efficiencies from which it follows."""

    size: int
    """Images in one vision work, or clips in one DiT work."""
    efficiency: tuple[tuple[int, float], ...]
    """Numbers of images, ascending, each with its images a second relative to the best."""
    still_rises: bool
    """Whether the largest tested size was the best, so that larger ones might be better."""


def smallest_efficient(curve: Curve, share: float = SHARE) -> ChosenSubMicrobatch:
    """The smallest tested number of images (or clips) with at least `share` of the best throughput.

    Images are equal, so the throughput in images per second is proportional to that in FLOPs per second.

    Raises: PlanError: the curve is empty, or has a work without images or without time.
    Source: DIP, arXiv:2504.14145, section 4.
    """
    if not curve.seconds:
        raise PlanError("the rule for sub-microbatches needs measured works; the curve has none")
    for number, seconds in curve.seconds:
        if number < 1 or not seconds > 0:
            raise PlanError(f"a work of {number} images or clips in {seconds} s; both must be above 0")
    rates = sorted((number, number / seconds) for number, seconds in curve.seconds)
    best_rate = max(rate for _, rate in rates)
    efficiency = tuple((number, rate / best_rate) for number, rate in rates)
    size = next(number for number, of_best in efficiency if of_best >= share)
    return ChosenSubMicrobatch(size=size, efficiency=efficiency, still_rises=rates[-1][1] == best_rate)
