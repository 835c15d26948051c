"""What a job with several sources reports of each: samples, tokens and mean loss, of a step or a validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmtrain.modality.metadata import DocumentMeta, IterationMeta
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.metrics import Metrics
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.iteration import IterationPlan


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """Sums over the samples of one source, over all replicas."""

    samples: int
    tokens: int
    """Tokens of documents, captions and latents."""
    targets: int
    """Labelled positions of documents."""
    loss_sum: float

    @property
    def loss(self) -> float | None:
        """Mean over its labelled positions; None: it has none, as clips, whose losses are not told apart."""
        return self.loss_sum / self.targets if self.targets else None


def source_sums(
    names: Sequence[str],
    plan: IterationPlan,
    meta: IterationMeta,
    labels: Sequence[Tensor],
    losses: Mapping[int, Tensor],
    mesh: Mesh,
) -> Tensor:
    """[S, 4] float64: this rank's part of the fields of `SourceTotals`, whose sum over all ranks is that of the job.

    Args:
        names: of the S sources; of a job with one source empty.
        labels: [T] of each microbatch.
        losses: work -> [L] loss of each labelled position among this rank's tokens, on the host.
    """
    sums = torch.zeros(len(names), 4, dtype=torch.float64)
    if not names:
        return sums
    index = {name: i for i, name in enumerate(names)}
    if mesh.is_leader:
        for microbatch in meta.microbatches:
            for document in microbatch.documents:
                sums[index[document.source], :3] += torch.tensor((1, document.num_tokens, document.num_targets))
            for clip in microbatch.clips:
                sums[index[clip.source], :3] += torch.tensor((1, clip.num_tokens + clip.num_text_tokens, 0))
    works = {} if mesh.place.tp else losses  # tp ranks have equal losses
    for work, losses_L in works.items():
        documents = [unit for unit in plan.batching.items[work].units if isinstance(unit, DocumentMeta)]
        counts = torch.tensor([document.num_targets for document in documents])
        source_L = torch.tensor([index[document.source] for document in documents]).repeat_interleave(counts)
        if mesh.layout.cp > 1:  # its microbatch is one
            number = plan.batching.works[work].microbatch
            labelled_T = labels[number] != IGNORE_INDEX
            rows = torch.from_numpy(plan.layout.documents.tokens(number)[mesh.place.cp])
            source_L = source_L[(labelled_T.cumsum(0) - 1)[rows][labelled_T[rows]]]
        sums[:, 3].index_add_(0, source_L, losses_L.double())
    return sums


def source_totals(names: Sequence[str], sums: Tensor) -> dict[str, SourceTotals]:
    """Name -> its totals. Args: sums: [S, 4] of `source_sums`, summed over all ranks."""
    rows = zip(names, sums.tolist(), strict=True)
    return {name: SourceTotals(int(s), int(tokens), int(t), loss_sum) for name, (s, tokens, t, loss_sum) in rows}


def record_sources(metrics: Metrics, names: Sequence[str], sums: Tensor) -> None:
    """Records what is known of each source. Args: sums: [S, 4] of `source_sums`, summed over all ranks."""
    for name, totals in source_totals(names, sums).items():
        if totals.loss is not None:
            metrics.record("loss/{}", totals.loss, name)
        metrics.record("samples/{}", totals.samples, name)
        metrics.record("tokens/{}", totals.tokens, name)
