"""The number of images in a vision work of a job, or of clips in a DiT work. Pure.

Source: DIP, arXiv:2504.14145, section 4 (sub-microbatch size).
"""

import math

from mmtrain.config.config import Config
from mmtrain.config.model import LanguageConfig
from mmtrain.costs.cost_model import CostModel, FlopsCosts
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.sub_microbatch import Curve, smallest_efficient
from mmtrain.errors import ConfigError
from mmtrain.modality.typical import TypicalSizes, reference_sizes
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.simulator.typical_iterations import layer_seconds
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of images of the works in the simulated curve; numbers that exceed a microbatch are left out."""


def sub_microbatch_size(config: Config, spec: ModelSpec, costs: CostModel) -> SubMicrobatch:
    """Images in one vision work of a job, or clips in one DiT work; 0: all of a microbatch. Of several encoders by
    their names: a further one has as many as its section says.

    The number of clips is `model.dit.sub_microbatch_size`; `mmtrain profile` prints the number that the rule selects.

    The number of images is `model.encoder.sub_microbatch_size`. If that is 0, it is the smallest number with 95 % of
    the best efficiency, on the measured curve of the job's profile or on the curve that the cost model gives for images
    of typical size. `FlopsCosts` does not model efficiency: a work then takes at most as long as the language model
    takes for a full microbatch.

    Source: DIP, arXiv:2504.14145, section 4.
    """
    if spec.counted is None or not config.planner.search.sub_microbatch:
        return 0
    if config.model.reads_pairs:
        captions = config.model.language.sub_microbatch_size
        return {spec.counted.name: _of_counted(config, spec, costs), spec.text.name: captions}
    if config.model.modules:
        given = {name: section.sub_microbatch_size for name, section in config.model.encoders.items()}
        return given | {name: _of_counted(config, spec, costs) for name in given if name not in config.model.modules}
    return _of_counted(config, spec, costs)


def _of_counted(config: Config, spec: ModelSpec, costs: CostModel) -> int:
    assert spec.counted is not None
    section = config.model.cut_modules[spec.counted.name]
    assert not isinstance(section, LanguageConfig)
    if section.sub_microbatch_size or config.model.reads_clips:
        return section.sub_microbatch_size
    if isinstance(costs, MeasuredCosts) and costs.profile.curve is not None:
        return smallest_efficient(costs.profile.curve).size
    try:
        bins = TypicalSizes.typical(config)
    except ConfigError:  # the encoder does not read images
        return 0
    if bins.grid is None:
        return 0
    if isinstance(costs, FlopsCosts):
        return _balanced(spec, bins, config.training.seq_len)
    curve = simulated_curve(spec, costs, Recomputation.of(config.activation_checkpoint), bins)
    return smallest_efficient(curve).size


def simulated_curve(spec: ModelSpec, costs: CostModel, recomputation: Recomputation, bins: TypicalSizes) -> Curve:
    """Seconds of a module's forward and backward as a function of the number of images of a work.

    Args: bins: sizes of typical works; they have images.
    """
    module = spec.counted
    assert module is not None and bins.grid is not None
    seconds = [
        (number, sum(layer_seconds(module, size, costs, recomputation, input_grad=False)))
        for number in NUMBERS
        if (size := bins.work(module, number)) is not None
    ]
    return Curve(patches=math.prod(bins.grid), seconds=tuple(seconds))


def _balanced(spec: ModelSpec, bins: TypicalSizes, seq_len: int) -> int:
    """The largest number of images with no more FLOPs than a full microbatch of the language model; at least 1."""
    assert spec.counted is not None
    size, sizes = bins.work(spec.counted, 1), reference_sizes(spec, seq_len)
    image = spec.flops(spec.counted.name, size).total if size else 0
    text = sum(spec.flops(module.name, sizes[module.name]).total for module in spec.text_modules)
    return max(1, int(text // image)) if image else 0
