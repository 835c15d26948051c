"""The part of each work that each rank of a pipeline stage's submesh (context x tensor parallel) computes. Pure.

Every rank computes the same layout from the metadata.
"""

from mmtrain.modality.base import Layout
from mmtrain.modality.documents import DocumentsLayout
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching
from mmtrain.spec.work_size import WorkSize


class IterationLayout:
    """The division of all works of one iteration over the ranks of a submesh."""

    def __init__(self, submesh: Submesh, batching: Batching, meta: IterationMeta) -> None:
        self.submesh = submesh
        self.batching = batching
        self.of_module: dict[str, Layout] = {}
        """Name of a module -> the division of its works."""
        for module in batching.spec.modules:
            works = {w: item for w, item in enumerate(batching.items) if batching.module_of(w) == module.name}
            self.of_module[module.name] = batching.kinds[module.name].layout(submesh, module, works, meta)

    def local_size(self, work: int, cp_rank: int, tp_rank: int) -> WorkSize:
        """The size of one rank's rows and outputs between two stages, padding included."""
        return self.of_module[self.batching.module_of(work)].local_size(work, cp_rank, tp_rank)

    @property
    def documents(self) -> DocumentsLayout:
        """The division of the module that reads documents."""
        return next(layout for layout in self.of_module.values() if isinstance(layout, DocumentsLayout))
