"""The results of validation: mean loss, and answers by grade."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.data.questions import Key
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import IGNORE_INDEX
from mmtrain.observe.by_source import source_totals
from mmtrain.observe.step_metrics import Validation
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.iteration import IterationPlan


def count_answers(
    plan: IterationPlan,
    meta: IterationMeta,
    labels: Sequence[Tensor],
    predictions: Mapping[int, Tensor],
    counts: dict[str, tuple[int, int]],
) -> None:
    """Adds the results of one batch's predictions to grade -> (answers right, answers).

    Args:
        labels: [T] of each microbatch.
        predictions: work -> [L] predicted token of each labelled position of its microbatch, in order.
    """
    for work, predicted in predictions.items():
        index = plan.batching.works[work].microbatch
        targets = labels[index][labels[index] != IGNORE_INDEX]
        hits = (predicted.cpu() == targets).tolist()
        position = 0
        for document in meta.microbatches[index].documents:
            for length in document.answers:
                right = all(hits[position : position + length])
                before = counts.get(document.grade, (0, 0))
                counts[document.grade] = (before[0] + right, before[1] + 1)
                position += length


def whole_predictions(
    plan: IterationPlan, labels: Sequence[Tensor], predictions: Mapping[int, Tensor], mesh: Mesh
) -> dict[int, Tensor]:
    """work -> [L] predicted token of each labelled position, from those of each cp rank's tokens.

    Collective over cp. Args: labels: [T] of each microbatch. predictions: of this rank's labelled positions.
    """
    if mesh.cp_group is None:
        return dict(predictions)
    parts: list[dict[int, Tensor]] = [{}] * mesh.shape.cp
    dist.all_gather_object(parts, {work: values.cpu() for work, values in predictions.items()}, group=mesh.cp_group)
    whole = {}
    for work in predictions:
        microbatch = plan.batching.works[work].microbatch
        tokens = torch.full_like(labels[microbatch], IGNORE_INDEX)
        labelled = labels[microbatch] != IGNORE_INDEX
        for part, positions in zip(parts, plan.layout.documents.tokens(microbatch), strict=True):
            rows = torch.from_numpy(positions)
            tokens[rows[labelled[rows]]] = part[work]
        whole[work] = tokens[labelled]
    return whole


def next_tokens(plan: IterationPlan, meta: IterationMeta, predictions: Mapping[int, Tensor]) -> dict[Key, int]:
    """The predicted token of each document with a label, which is one, over all replicas. Collective over the job.

    Args: predictions: as of `whole_predictions`, on one rank of each submesh; elsewhere empty.
    """
    local: dict[Key, int] = {}
    for work, predicted in predictions.items():
        documents = meta.microbatches[plan.batching.works[work].microbatch].documents
        keys = [(document.source, document.sample) for document in documents if document.num_targets]
        local |= zip(keys, predicted.tolist(), strict=True)
    parts: list[dict[Key, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return {key: token for part in parts for key, token in part.items()}


def validation_of_all(
    loss_sum: float,
    num_targets: int,
    counts: Mapping[str, tuple[int, int]],
    sources: Sequence[str],
    by_source: Tensor,
) -> Validation:
    """The validation over all replicas. Collective over the job.

    Args:
        loss_sum: of this rank.
        num_targets, counts: labelled positions, and grade -> (answers right, answers); on one rank of each submesh.
        sources: names of several sources.
        by_source: [S, 4] of `source_sums`.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (loss_sum, num_targets, counts, by_source))
    accuracy: dict[str, tuple[int, int]] = {}
    for _, _, counts, _ in parts:
        for grade, (right, count) in counts.items():
            before = accuracy.get(grade, (0, 0))
            accuracy[grade] = (before[0] + right, before[1] + count)
    return Validation(
        loss=sum(p[0] for p in parts) / max(1, sum(p[1] for p in parts)),
        accuracy=accuracy,
        sources=source_totals(sources, torch.stack([p[3] for p in parts]).sum(0)),
    )
