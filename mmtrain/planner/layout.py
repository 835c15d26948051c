"""The part of each work that each rank of a pipeline stage's submesh (context x tensor parallel) computes. Pure.

Every rank computes the same layout from the metadata.
"""

from collections.abc import Sequence
from copy import copy

from mmtrain.modality.base import Layout
from mmtrain.modality.documents import Documents, DocumentsLayout
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Indices, Submesh
from mmtrain.planner.batching import Batching
from mmtrain.spec.work_size import WorkSize


class IterationLayout:
    """The division of all works of one iteration over the ranks of a submesh."""

    def __init__(self, submesh: Submesh, batching: Batching, meta: IterationMeta) -> None:
        self.submesh = submesh
        self.batching = batching
        self.of_module: dict[str, Layout] = {}
        """Name of a module -> the division of its works."""
        kinds = batching.kinds
        reading = {name for name, kind in kinds.items() if isinstance(kind, Documents)}
        for module in batching.spec.modules:
            sharing = reading if module.name in reading else {module.name}  # tokens are divided once, for all of them
            works = {w: item for w, item in enumerate(batching.items) if batching.module_of(w) in sharing}
            made = next((self.of_module[name] for name in sharing if name in self.of_module), None)
            self.of_module[module.name] = made or kinds[module.name].layout(submesh, module, works, meta)

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows and outputs between two stages, padding included."""
        return self.of_module[self.batching.module_of(work)].local_size(work, cp_rank, tp_rank)

    def with_labelled(self, labelled: Sequence[Indices]) -> "IterationLayout":
        """This layout with the number of labelled positions of each rank. Args: labelled: ascending indices of the
        labelled tokens of each microbatch."""
        if not labelled:  # of clips
            return self
        known, documents = copy(self), self.documents.with_labelled(labelled)
        known.of_module = {
            name: documents if isinstance(layout, DocumentsLayout) else layout
            for name, layout in self.of_module.items()
        }
        return known

    @property
    def documents(self) -> DocumentsLayout:
        """The division of the modules that read documents."""
        return next(layout for layout in self.of_module.values() if isinstance(layout, DocumentsLayout))
