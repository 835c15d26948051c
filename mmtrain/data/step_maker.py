"""Makes steps: plans which samples they contain, and builds one replica's tensors and metadata of them.

Every process that makes steps plans all of them (from token counts and headers only) and decodes only the images and
clips of its own microbatches.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.data.clip_samples import VideoSamples
from mmtrain.data.conversations import Conversations
from mmtrain.data.packing import (
    BinLimit,
    Dropped,
    EpochOrder,
    LoaderState,
    MixedOrder,
    SampleOrder,
    SampleSize,
    StepPlan,
    bins_of_replica,
    plan_step,
)
from mmtrain.data.pair_samples import PairSamples
from mmtrain.data.sources import Sources
from mmtrain.errors import ConfigError, DataError, TooLongError, one_line
from mmtrain.modality.metadata import AssignmentMeta, IterationMeta, MicrobatchMeta, sample_name
from mmtrain.models.batch import Batch, check_batch
from mmtrain.planner.assignment.dealing import Dealer, digest_of
from mmtrain.planner.assignment.step_assigner import StepAssigner, language_members
from mmtrain.spec.vae_shapes import latent_scale

M = TypeVar("M")
"""A sample whose size is known and whose images or frames are still encoded."""
R = TypeVar("R")
"""A sample with its content decoded."""
T = TypeVar("T")
DrawnSample = tuple[int, int, bool]
"""A sample of a microbatch, how often its index occurs earlier in the step, and whether encoders read it with the
microbatch before."""


class Samples(Protocol[M, R]):
    """The samples of a job: how they are measured, decoded, and put into tensors."""

    sources: Sources[Any]
    """The records of the split."""
    limits: tuple[BinLimit, ...]
    """Capacity of a microbatch."""
    text: str
    """What `training.seq_len` counts of one sample, for errors."""

    def notes(self) -> list[str]:
        """What is new to say about the records that were read, such as keys that nobody reads."""

    def measured(self, sample: int, state: LoaderState) -> M | None:
        """The sample of an index, read up to its headers; None behind the end of a stream.

        Args: state: where the step starts, by whose seed and epoch is drawn what is random about the sample.
        Raises: DataError: it cannot be read, or a header is corrupt.
        """

    def num_text_tokens(self, measured: M) -> int:
        """Number of tokens that `training.seq_len` limits."""

    def shorter(self, measured: M) -> str:
        """What to change about a sample that is too long."""

    def truncated(self, measured: M, num_tokens: int) -> M:
        """The sample with its first num_tokens tokens. Raises: DataError: it cannot be truncated."""

    def size(self, measured: M) -> SampleSize:
        """The size of a sample under each limit."""

    def read(self, measured: M, occurrence: int) -> R:
        """The sample with its content.

        Args: occurrence: how often it occurs earlier in the step.
        Raises: DataError: its content is corrupt.
        """

    def emptied(self, measured: M, occurrence: int) -> R:
        """The sample without its content and without a loss, for a microbatch that has lost all of its samples."""

    def batch(self, microbatches: Sequence[Sequence[R]]) -> tuple[Batch, tuple[MicrobatchMeta, ...]]:
        """Tensors and metadata of microbatches."""


def order_of(data: DataConfig, num_samples: Sequence[int | None], *, shuffle: bool) -> SampleOrder:
    """The order of the samples of a job. Args: num_samples: of each source; None for streams.

    Raises: DataError: one of several sources has no sample.
    """
    if not data.sources:
        return EpochOrder(num_samples[0], shuffle=shuffle)
    names, weights = zip(*((source.label, source.weight) for source in data.sources), strict=True)
    return MixedOrder(names, weights, num_samples, shuffle=shuffle)


def samples_of(config: Config, split: str) -> Samples[Any, Any]:
    """The samples of a split of a job.

    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """
    kind = VideoSamples if config.model.reads_clips else PairSamples if config.model.reads_pairs else Conversations
    samples: Samples[Any, Any] = kind(config, split)
    return samples


class StepMaker:
    """Plans and builds the steps of one data-parallel replica.

    Args:
        split, shuffle: the samples, and whether their order is drawn for each epoch.
        dp_rank, dp_degree: index and number of replicas.
        assigner: which microbatch a sample goes to, and how many a step has; None: bin g of first-fit is one of replica
            g % dp_degree, and a step fills all of them.
        dealer: without an assigner, which replica each bin is of; None: as above.
        may_be_short: a split with fewer samples than microbatches makes steps with blank ones.
        epochs: of the job: a step ends with its epoch, and may be short there; None: it may span two.
    Raises: ConfigError: source, split, tokenizer or image processor do not exist or do not fit the model.
    """

    def __init__(
        self,
        config: Config,
        *,
        split: str,
        shuffle: bool,
        dp_rank: int,
        dp_degree: int,
        assigner: StepAssigner | None = None,
        dealer: Dealer | None = None,
        may_be_short: bool = False,
        epochs: Fraction | None = None,
    ) -> None:
        self._epochs = epochs
        self._config, self._assigner, self._dealer, self._may_be_short = config, assigner, dealer, may_be_short
        key = "split" if split == config.data.split else "validation_split"
        self._split = f"the split {split!r} (data.{key}) of the source"
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._samples = samples_of(config, split)
        self._vae = latent_scale(config.model.vae) if config.model.vae else None
        self._order = order_of(config.data, self._samples.sources.num_samples, shuffle=shuffle)
        self._measured: dict[int, Any] = {}
        self._start = LoaderState(seed=config.debug.seed)

    def plan(self, state: LoaderState) -> StepPlan:
        """The bins of the step that starts at `state`. Raises: DataError: a sample refused by the policies, or too
        few samples."""
        self._measured.clear()
        self._start = state
        return plan_step(
            state,
            self._order,
            self.size_of,
            num_bins=self._config.training.global_batch_size,
            limits=self._samples.limits,
            num_samples=self._assigner.section.samples_per_step if self._assigner else 0,
            may_be_short=self._may_be_short,
            epochs=self._epochs,
            split=self._split,
        )

    def has_ended(self, state: LoaderState) -> bool:
        """Whether the epochs of the job are done at a position."""
        return self._epochs is not None and state.epochs >= self._epochs

    def build(self, plan: StepPlan) -> tuple[Batch, IterationMeta]:
        """The tensors and the metadata of this replica's microbatches of the step that was planned last.

        A sample with corrupt content is removed from its microbatch; the others stay in theirs.
        Raises: DataError: corrupt content, with `data.on_error = "raise"`.
        """
        # Samples that planning left out are distributed like bins, so that each is counted by one replica.
        num_skipped = len(plan.dropped[self._dp_rank :: self._dp_degree])
        assigns = self._assigner and not plan.blank  # an assigner has a sample for each microbatch
        microbatches, assignment = self._assigned(plan) if assigns else self._dealt(plan)
        contents, early, num_blank = [], [], 0
        for members, blank in microbatches:
            readable = [] if blank else self._read(members)
            num_skipped += 0 if blank else len(members) - len(readable)
            if not readable:  # so that the step keeps its shape
                num_blank += 1
                sample, occurrence, _ = members[0]
                readable = [(self._samples.emptied(self._measured[sample], occurrence), False)]
            contents.append([content for content, _ in readable])
            early.append([deferred for _, deferred in readable])
        batch, metas = self._samples.batch(contents)
        if any(map(any, early)):
            metas = tuple(map(_with_deferred, metas, early))
        meta = IterationMeta(microbatches=metas, num_skipped=num_skipped, num_blank=num_blank, assignment=assignment)
        check_batch(batch, meta, self._vae)
        return batch, meta

    def _assigned(self, plan: StepPlan) -> tuple[list[tuple[list[DrawnSample], bool]], AssignmentMeta]:
        """The members of this replica's microbatches as the assigner divides them, none of which is blank."""
        assert self._assigner is not None
        start, bins = time.perf_counter(), self._with_occurrences(plan)
        items = [item for members in bins for item in members]
        ends = list(accumulate(map(len, bins), initial=0))
        documents = [self._measured[sample].meta for sample, _ in items]
        assignment = self._assigner(documents, [range(*ends[b : b + 2]) for b in range(len(bins))])
        microbatches = language_members(assignment.replicas[self._dp_rank], documents)
        meta = AssignmentMeta(digest=assignment.digest, reason=assignment.message, seconds=time.perf_counter() - start)
        return [([(*items[index], early) for index, early in members], False) for members in microbatches], meta

    def _dealt(self, plan: StepPlan) -> tuple[list[tuple[list[DrawnSample], bool]], AssignmentMeta | None]:
        """The members of this replica's bins, and whether the bin is blank."""
        bins, meta = self._with_occurrences(plan), None
        own: Iterable[int] = bins_of_replica(len(bins), self._dp_rank, self._dp_degree)
        if self._dealer is not None:
            start = time.perf_counter()
            metas = [MicrobatchMeta.of([self._measured[sample].meta for sample in samples]) for samples in plan.bins]
            dealt = self._dealer(metas)
            own = dealt[self._dp_rank]
            meta = AssignmentMeta(digest=digest_of(dealt), seconds=time.perf_counter() - start)
        return [([(*item, False) for item in bins[index]], index in plan.blank) for index in own], meta

    def notes(self) -> list[str]:
        """What is new to say about the samples that were read."""
        return self._samples.notes()

    @property
    def num_samples(self) -> tuple[int | None, ...]:
        """The number of samples of each source; None for streams."""
        return self._samples.sources.num_samples

    def forget(self) -> None:
        """Drops the samples that were measured for a step that is not built."""
        self._measured.clear()

    @property
    def limits(self) -> tuple[BinLimit, ...]:
        """Capacity of a microbatch."""
        return self._samples.limits

    def first_samples(self, state: LoaderState, most: int) -> tuple[list[tuple[Any, SampleSize]], bool]:
        """The metadata and sizes of the first usable samples from a position, up to the end of the epoch, and whether
        these are all; read from headers and token counts alone.

        Args: most: samples, at most.
        Raises: DataError: a sample refused by the policies.
        """
        self._start = state
        samples: list[tuple[Any, SampleSize]] = []
        seen: set[int] = set()
        while len(samples) < most and not self._order.ends(state):
            number = self._order.sample(state)
            size = self.size_of(number)
            if size is None:
                return samples, True
            seen.add(number)
            if not isinstance(size, Dropped):
                samples.append((self._measured.pop(number).meta, size))
            state = self._order.after(state)
        return samples, len(seen) == self._order.num_samples

    def size_of(self, sample: int) -> SampleSize | Dropped | None:
        """Size of a sample, why it is left out, or None behind the end of a stream; keeps the measured sample.

        Raises: DataError: the policies refuse it.
        """
        data, limit, samples = self._config.data, self._config.training.seq_len, self._samples
        if sample in self._measured:
            return samples.size(self._measured[sample])
        try:
            measured = made_of(self._name(sample), partial(samples.measured, sample, self._start))
            if measured is None:
                return None
        except DataError as error:
            if data.on_error == "raise" and not (isinstance(error, TooLongError) and data.too_long == "skip"):
                raise
            return Dropped(sample=sample, reason=str(error))
        length = samples.num_text_tokens(measured)
        if length > limit:
            reason = f"{self._name(sample)}: {length} {samples.text} do not fit training.seq_len = {limit}"
            if data.too_long == "raise":
                raise DataError(f"{reason}; {samples.shorter(measured)}")
            if data.too_long == "skip":
                return Dropped(sample=sample, reason=reason)
            measured = samples.truncated(measured, limit)
        self._measured[sample] = measured
        return samples.size(measured)

    def _name(self, number: int) -> str:
        """A sample in messages, by its number."""
        return sample_name(*self._samples.sources.sample(number))

    def _with_occurrences(self, plan: StepPlan) -> list[list[tuple[int, int]]]:
        """The samples of each bin, with how often the index of each occurs earlier in the step; equal on all
        replicas."""
        before: Counter[int] = Counter()
        bins = []
        for samples in plan.bins:
            numbered = []
            for number in samples:
                index, _ = self._samples.sources.sample(number)
                numbered.append((number, before[index]))
                before[index] += 1
            bins.append(numbered)
        return bins

    def _read(self, members: Sequence[DrawnSample]) -> list[tuple[Any, bool]]:
        """The members that can be decoded: their content, and whether encoders read it with the microbatch before."""
        readable = []
        for sample, occurrence, early in members:
            try:
                read = partial(self._samples.read, self._measured[sample], occurrence)
                readable.append((made_of(self._name(sample), read), early))
            except DataError:
                if self._config.data.on_error == "raise":
                    raise
        return readable


def _with_deferred(meta: MicrobatchMeta, early: Sequence[bool]) -> MicrobatchMeta:
    """The metadata of a microbatch. Args: early: of each document, whether its images are encoded before."""
    documents = (replace(document, deferred=flag) for document, flag in zip(meta.documents, early, strict=True))
    return replace(meta, documents=tuple(documents))


def made_of(name: str, make: Callable[[], T]) -> T:
    """The result of `make`. Any error about a sample becomes a `DataError`. Args: name: of the sample.

    Raises: DataError: one line that names the sample. ConfigError: the source as a whole cannot be read.
    """
    try:
        return make()
    except (ConfigError, AssertionError):
        raise
    except DataError as error:
        raise type(error)(one_line(error)) from error
    except Exception as error:  # libraries raise any kind of error
        raise DataError(f"{name} cannot be used: {type(error).__name__}: {one_line(error)}") from error
