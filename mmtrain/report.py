"""What validation and traces are computed from: answers by grade, measured beside planned timelines."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.data.batch import IGNORE_INDEX
from mmtrain.data.metadata import IterationMeta
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.iteration import IterationPlan
from mmtrain.schedule.action import Action
from mmtrain.schedule.draw import trace_events
from mmtrain.schedule.timeline import Timeline


def count_answers(
    plan: IterationPlan,
    meta: IterationMeta,
    labels: Sequence[Tensor],
    predictions: Mapping[int, Tensor],
    counts: dict[str, tuple[int, int]],
) -> None:
    """Adds to grade -> (answers right, answers) what one batch's predictions say.

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
    dist.all_gather_object(parts, {work: found.cpu() for work, found in predictions.items()}, group=mesh.cp_group)
    whole = {}
    for work in predictions:
        microbatch = plan.batching.works[work].microbatch
        tokens = torch.full_like(labels[microbatch], IGNORE_INDEX)
        labelled = labels[microbatch] != IGNORE_INDEX
        for part, places in zip(parts, plan.layout.tokens(microbatch), strict=True):
            mine = torch.from_numpy(places)
            tokens[mine[labelled[mine]]] = part[work]
        whole[work] = tokens[labelled]
    return whole


def write_trace(path: Path, plan: IterationPlan, rows: Sequence[Sequence[tuple[Action, float, float]]]) -> None:
    """Writes a Chrome / Perfetto trace with two groups of rows: measured and planned.

    Args: rows: [pp_rank] -> (action, start, end) in seconds on a clock that the ranks share.
    """
    flat = [(rank, *row) for rank, found in enumerate(rows) for row in found]
    measured = Timeline.from_rows(plan.problem.graph, flat)
    assert plan.result.timeline is not None
    events = trace_events({"measured": measured, "planned": plan.result.timeline})
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(events))
    os.replace(aside, path)
