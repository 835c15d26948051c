"""Validation: mean loss, and answers by grade, on held-out data."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.config.sections import ValidationConfig
from mmtrain.data.questions import Answer, QuestionKey
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import IGNORE_INDEX, with_other_captions
from mmtrain.models.diffusion import ClipNoise
from mmtrain.observe.by_source import SourceTotals, source_sums, source_totals
from mmtrain.observe.own_metric import answer_numbers
from mmtrain.observe.recall import HeldOutPairs, contents, recalls
from mmtrain.observe.validated import Validated
from mmtrain.observe.validation_clips import ClipSamples, sampled
from mmtrain.parallel.batch_runner import BatchRunner
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.planner.iteration import IterationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Results of one validation, over all replicas."""

    loss: float
    """Mean over labelled tokens, or over all numbers of the latents."""
    accuracy: Mapping[str, tuple[int, int]]
    """Grade -> (answers right, answers)."""
    recall: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """What `recalls` finds for pairs."""
    shuffled_loss: float | None = None
    """Loss with each clip under the caption of another one; None: not measured."""
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)
    """The part of each of several sources, by name."""
    answers: tuple[Answer, ...] = ()
    """The answers to held-out questions (`validation.generate`), on rank 0."""
    samples: ClipSamples | None = None
    """Clips for held-out prompts (`validation.samples`)."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers of these answers by name: exact_match, and those of `validation.metric`."""
    so_far: Validated = field(default_factory=Validated)
    """The validations up to this one; without a best one if the job does not compare them."""

    @property
    def figures(self) -> Mapping[str, float]:
        """All by which validations may be compared, by name."""
        right, count = (sum(counts[i] for counts in self.accuracy.values()) for i in range(2))
        return {"loss": self.loss} | ({"accuracy": right / count} if count else {}) | dict(self.numbers)


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Validates a job at one layout. All methods are collective over the job."""

    section: ValidationConfig
    sources: Sequence[str]
    """Names of several sources; empty of one."""
    runner: BatchRunner
    plan: Callable[[IterationMeta], IterationPlan]
    """Plans a batch, without gradients."""

    def validate(self) -> Validation:
        """Loss and answers on held-out data.

        An answer is right if every one of its tokens is the most likely one after the right prefix, which
        is when greedy decoding would write it.
        """
        with self.runner.placement.optimizers.averaged() if self.section.weights == "ema" else nullcontext():
            return self._validated()

    def _validated(self) -> Validation:
        data = self.runner.placement.data
        result = self._of(data.validation(self.section.steps))
        if self.section.shuffled_captions:
            shuffled = self._of(data.validation(self.section.steps, with_other_captions))
            result = dataclasses.replace(result, shuffled_loss=shuffled.loss)
        if self.section.generate:
            answers = data.answers(self._next_tokens)
            numbers = on_rank_zero(lambda: answer_numbers(answers, self.section.metric))
            result = dataclasses.replace(result, answers=answers, numbers=numbers)
        if self.section.samples:
            samples = sampled(data.prompts(), self.runner, self.plan)
            result = dataclasses.replace(result, samples=samples)
        return result

    def _next_tokens(self, item: Item) -> dict[QuestionKey, int]:
        """The most likely next token of each question, over all replicas."""
        plan, _, predictions = self._predicted(item, noise=None)
        return next_tokens(plan, item.meta, predictions)

    def _predicted(
        self, item: Item, *, noise: ClipNoise | None
    ) -> tuple[IterationPlan, StepOutcome, dict[int, Tensor]]:
        """A forward pass, and work -> predicted token of each labelled position; the latter on one rank of a submesh,
        elsewhere empty."""
        plan, mesh = self.plan(item.meta), self.runner.placement.mesh
        outcome, _ = self.runner.run(plan, item, noise=noise, want_predictions=True).on_host()
        predictions = whole_predictions(plan, item.labels, outcome.predictions, mesh)
        return plan, outcome, predictions if mesh.place.cp == mesh.place.tp == 0 else {}

    def _of(self, items: Iterator[Item]) -> Validation:
        runner, mesh = self.runner, self.runner.placement.mesh
        loss_sum, num_targets = 0.0, 0
        accuracy: dict[str, tuple[int, int]] = {}
        embeddings: list[Tensor] = []
        of_pairs: list[Tensor] = []
        by_source = torch.zeros(len(self.sources), 4, dtype=torch.float64)
        for number, item in enumerate(items):
            plan, outcome, predictions = self._predicted(item, noise=runner.noise(-1 - number, hides=False))
            loss_sum += runner.loss_sum(outcome)
            by_source += source_sums(self.sources, plan, item.meta, item.labels, outcome.position_losses, mesh)
            if runner.job.spec.reads_pairs and mesh.is_leader and item.batch is not None:
                of_pairs.append(contents(item.batch, item.meta))
            if outcome.losses and mesh.place.cp == mesh.place.tp == 0:
                num_targets += runner.loss.num_values(item.meta)
                if runner.job.spec.reads_pairs:
                    embeddings += [predictions[work] for work in sorted(predictions)]
                else:
                    count_answers(plan, item.meta, item.labels, predictions, accuracy)
        pairs = HeldOutPairs(replica=mesh.dp_rank, embeddings=embeddings, contents=of_pairs)
        return validation_of_all(loss_sum, num_targets, accuracy, self.sources, by_source, pairs)


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
        predictions: work -> [L] predicted token of each labelled position of its microbatch, in order, on the host.
    """
    for work, predicted in predictions.items():
        index = plan.batching.works[work].microbatch
        targets = labels[index][labels[index] != IGNORE_INDEX]
        hits = (predicted == targets).tolist()
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
    """The predicted token of each labelled position, [L] for each work, from those of each cp rank's tokens.

    Collective over cp.

    Args: labels: [T] of each microbatch. predictions: of this rank's labelled positions, on the host.
    """
    if mesh.cp_group is None:
        return dict(predictions)
    parts: list[dict[int, Tensor]] = [{}] * mesh.layout.cp
    dist.all_gather_object(parts, dict(predictions), group=mesh.cp_group)
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


def next_tokens(plan: IterationPlan, meta: IterationMeta, predictions: Mapping[int, Tensor]) -> dict[QuestionKey, int]:
    """The predicted token of each document with a label, which is one, over all replicas. Collective over the job.

    Args: predictions: as of `whole_predictions`, on one rank of each submesh; elsewhere empty.
    """
    local: dict[QuestionKey, int] = {}
    for work, predicted in predictions.items():
        documents = meta.microbatches[plan.batching.works[work].microbatch].documents
        keys = [(document.source, document.sample) for document in documents if document.num_targets]
        local |= zip(keys, predicted.tolist(), strict=True)
    parts: list[dict[QuestionKey, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return {key: token for part in parts for key, token in part.items()}


def validation_of_all(
    loss_sum: float,
    num_targets: int,
    counts: Mapping[str, tuple[int, int]],
    sources: Sequence[str],
    by_source: Tensor,
    pairs: HeldOutPairs,
) -> Validation:
    """The validation over all replicas. Collective over the job.

    Args:
        loss_sum: of this rank.
        num_targets, counts: labelled positions, and grade -> (answers right, answers); on one rank of each submesh.
        sources: names of several sources.
        by_source: [S, 4] of `source_sums`.
        pairs: what this rank has of those of its replica.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (loss_sum, num_targets, counts, by_source, pairs))
    accuracy: dict[str, tuple[int, int]] = {}
    for _, _, counts, *_ in parts:
        for grade, (right, count) in counts.items():
            before = accuracy.get(grade, (0, 0))
            accuracy[grade] = (before[0] + right, before[1] + count)
    return Validation(
        loss=sum(p[0] for p in parts) / max(1, sum(p[1] for p in parts)),
        accuracy=accuracy,
        recall=recalls(part[4] for part in parts),
        sources=source_totals(sources, torch.stack([p[3] for p in parts]).sum(0)),
    )
