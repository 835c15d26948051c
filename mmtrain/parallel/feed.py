"""The arguments of each chunk's forward in one step, taken from the batch, its metadata and this rank's part of it."""

from collections.abc import Callable

from mmtrain.parallel.feeds.clips import CaptionsFeed, FramesFeed, LatentsFeed
from mmtrain.parallel.feeds.documents import DocumentsFeed, LabelsFeed, PairsFeed, TextsFeed, TokenIdsFeed
from mmtrain.parallel.feeds.images import ImagesFeed
from mmtrain.parallel.feeds.inputs import Arguments, StepInputs
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModuleSpec

ModuleFeed = Callable[[bool, bool, int], Arguments]
"""A function (whether the module begins and ends with a stage, work) -> the arguments of that stage's chunk."""

FEEDS: dict[str, Callable[[StepInputs, ModuleSpec], ModuleFeed]] = {
    "images": ImagesFeed,
    "documents": DocumentsFeed,
    "texts": TextsFeed,
    "token_ids": TokenIdsFeed,
    "labels": LabelsFeed,
    "pairs": PairsFeed,
    "captions": CaptionsFeed,
    "latents": LatentsFeed,
    "frames": FramesFeed,
}
"""The feeds by what a module consumes, as in `modality.catalogue.MODALITIES`."""


class StepFeed:
    """The feed of `PipelineScheduleRuntime.step`: the arguments (args, kwargs) of a stage's chunk for a work.

    A rank needs only the data of its stages: pixels and token ids for the modules' first stages, labels for the last
    language stage, latents where a DiT begins and ends; lengths and grids come from the metadata.
    """

    def __init__(self, partition: Partition, inputs: StepInputs) -> None:
        self._partition = partition
        self._feeds = {m.name: FEEDS[m.consumes](inputs, m) for m in inputs.layout.batching.spec.modules}

    def __call__(self, stage: int, work: int) -> Arguments:
        placed = self._partition.stages[stage]
        return self._feeds[placed.module](placed.first, placed.last, work)
