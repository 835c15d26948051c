"""One replica's data: read by its leader, which sends each rank the tensors that it needs.

All ranks get the metadata and the labels. The tensors go to the pipeline ranks where a module reads them: the first
one, which holds the leader; the one where the language model begins, if that is another one (a mixed partition); and
of a text-to-video model those where the DiT begins and ends. With a VAE only the leader reads pixels, and the DiT gets
no tensors of the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.data.clip_prompts import ClipPrompts, held_out_prompts
from mmtrain.data.loader import LoadedStep, Loader
from mmtrain.data.packing import LoaderState
from mmtrain.data.questions import Answer, Decoding, QuestionKey
from mmtrain.errors import DataError, MMTrainError
from mmtrain.modality.catalogue import modality_of
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.models.batch import Batch, regrouped, regrouped_rows, without_images
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.grouping import Indices, grouped
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModelSpec

BatchChange = Callable[[Batch, IterationMeta], tuple[Batch, IterationMeta]]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One step's data on one rank."""

    meta: IterationMeta
    labels: list[Tensor]
    """[T] of each microbatch; empty for clips, whose targets are formed where they are needed."""
    state: LoaderState
    """The state of the loader after this batch."""
    batch: Batch | None
    """What this rank needs of it."""

    def grouped(self, microbatches: Indices) -> "Item":
        """The item with its samples in other microbatches. Args: microbatches: empty: it stays as it is."""
        if not microbatches:
            return self
        lengths = [microbatch.lengths for microbatch in self.meta.microbatches]
        return replace(
            self,
            meta=grouped(self.meta, microbatches),
            labels=regrouped_rows(self.labels, lengths, microbatches) if self.labels else [],
            batch=None if self.batch is None else regrouped(self.batch, self.meta, microbatches),
        )


class ReplicaData:
    """Gives out the data of a job's splits to one rank. Args: assigner, dealer: see `StepMaker`."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        spec: ModelSpec,
        partition: Partition,
        assigner: StepAssigner | None = None,
        dealer: Dealer | None = None,
    ) -> None:
        self._config, self._mesh, self._assigner, self._dealer = config, mesh, assigner, dealer
        of_text, of_more = set[int](), set[int]()
        for module in spec.modules:
            kind, stages = modality_of(module, Submesh.of(config).attention_mask), partition.of_module(module.name)
            reads_text = module.name == spec.text.name or module.vocabulary is not None
            (of_text if reads_text else of_more).update(stages[index].pp_rank for index in kind.readers(module))
        self._takers = tuple(sorted((of_text | of_more) - {0}))
        """Pipeline ranks after the first that need tensors."""
        self._text_alone = not of_more - {0}
        """Whether these need only token ids."""
        self._loader: Loader | None = None
        self._prompts: ClipPrompts | None = None

    def item(self, batch: Batch, meta: IterationMeta) -> Item:
        """A batch that every rank has as an item of this one."""
        rank = self._mesh.pp_rank
        local_batch = batch if rank == 0 else self._part(batch) if rank in self._takers else None
        state = LoaderState(seed=self._config.debug.seed)
        return Item(meta=meta, labels=[m.labels for m in batch.microbatches], state=state, batch=local_batch)

    def training(self, state: LoaderState) -> Iterator[Item]:
        """The batches of the training split from a state on. Each `next` is collective over the replica."""

        def open_loader() -> Loader:
            self._loader = self._open(self._config.data.split, state)
            return self._loader

        return self._share(open_loader)

    def validation(self, num_steps: int, change: BatchChange | None = None) -> Iterator[Item]:
        """The first batches of the validation split, as `change` makes them. Each `next` is collective."""
        split, state = self._config.data.validation_split, LoaderState(seed=0)
        return self._share(lambda: self._open(split, state, num_steps), change)

    def answers(self, next_tokens: Callable[[Item], Mapping[QuestionKey, int]]) -> tuple[Answer, ...]:
        """The answers to the first questions of the validation split, on rank 0. Collective over the job.

        Args: next_tokens: item -> the next token of each open question of all replicas, equal on all ranks.
        """
        opened: list[Decoding] = []

        def open_questions() -> Decoding:
            opened.append(Decoding(self._config, dp_rank=self._mesh.dp_rank, dp_degree=self._mesh.layout.dp))
            return opened[0]

        for item in self._share(open_questions):
            tokens = next_tokens(item)
            for decoding in opened:  # of a leader
                decoding.append(tokens)
        return opened[0].answers() if self._mesh.rank == 0 else ()

    def prompts(self) -> ClipPrompts:
        """The clips that a validation samples. Collective over the replica."""
        if self._prompts is None:
            message: ClipPrompts | MMTrainError | None = None
            if self._mesh.is_leader:
                try:
                    message = held_out_prompts(self._config)
                except MMTrainError as error:
                    message = error
            message = self._mesh.broadcast_object(message)
            if isinstance(message, MMTrainError):
                raise message
            self._prompts = message
        assert self._prompts is not None
        return self._prompts

    def close(self) -> None:
        """Ends the processes that read training data."""
        if self._loader is not None:
            self._loader.close()

    def _open(self, split: str, state: LoaderState, num_steps: int | None = None) -> Loader:
        """Args: num_steps: of a validation, which reads in order and in this process."""
        validating = num_steps is not None
        return Loader(
            self._config,
            split=split,
            dp_rank=self._mesh.dp_rank,
            dp_degree=self._mesh.layout.dp,
            state=state,
            shuffle=False if validating else None,
            num_steps=num_steps,
            epochs=None if validating else self._config.training.passes,
            num_workers=0 if validating else None,
            assigner=None if validating else self._assigner,
            dealer=None if validating else self._dealer,
            may_be_short=validating,
        )

    def _part(self, batch: Batch) -> Batch:
        """The tensors that the pipeline ranks after the first need."""
        return without_images(batch) if self._text_alone else batch

    def _share(
        self, open_loader: Callable[[], Iterable[LoadedStep]], change: BatchChange | None = None
    ) -> Iterator[Item]:
        """The leader's items on every rank of its replica; an error of the loader is raised on all of them."""
        source: Iterator[LoadedStep] | None = None
        mesh = self._mesh
        while True:
            batch: Batch | None = None
            message: tuple[IterationMeta, list[Tensor], LoaderState] | MMTrainError | None = None
            if mesh.is_leader:
                try:
                    if source is None:
                        source = iter(open_loader())
                    batch, meta, state = next(source)
                    if change is not None:
                        batch, meta = change(batch, meta)
                    message = meta, [m.labels for m in batch.microbatches], state
                except StopIteration:
                    message = None
                except MMTrainError as error:
                    message = error
                except OSError as error:
                    message = DataError(f"data.source cannot be read: {error}")
            message = mesh.broadcast_object(message)
            if isinstance(message, MMTrainError):
                raise message
            if message is None:
                return
            meta, labels, state = message
            yield Item(meta=meta, labels=labels, state=state, batch=self._hand_out(batch))

    def _hand_out(self, batch: Batch | None) -> Batch | None:
        """This rank's part of the leader's batch."""
        mesh = self._mesh
        if mesh.place.cp == mesh.place.tp == 0:
            if batch is not None:
                part = self._part(batch) if self._takers else None
                for pp_rank in self._takers:
                    mesh.send_object(part, pp_rank)
            elif mesh.pp_rank in self._takers:
                batch = mesh.receive_object(0)
        if mesh.pp_rank == 0 or mesh.pp_rank in self._takers:
            batch = mesh.broadcast_over_submesh(batch)
            return batch
        return None
