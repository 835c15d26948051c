"""The state of one rank of an elastic job from generation to generation.

It is in the trainer's placement while the rank trains, and in shards that outlive it from when it leaves until all
ranks of the next layout have theirs. So what fails in between is repeated from what each rank still has.
"""

import gc
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmtrain.checkpoint.files import complete_steps
from mmtrain.checkpoint.move import HeldShards, move
from mmtrain.checkpoint.state import NamedTensors, TrainState
from mmtrain.config.config import Config, with_depths
from mmtrain.errors import NoHolderError
from mmtrain.launch.claims import Claim
from mmtrain.launch.membership import members_digest
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.observer import Observer
from mmtrain.observe.run_record import log_nothing_left
from mmtrain.observe.step_memory import DeviceMemory
from mmtrain.parallel.agreement import Agreement, RankReport
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.generation import Generation
from mmtrain.parallel.mesh import backend_of
from mmtrain.parallel.torch_private import forget_meshes
from mmtrain.planner.make_plan import Search
from mmtrain.training.elastic_layouts import Chosen
from mmtrain.training.elastic_values import Marks, StateReport
from mmtrain.training.trainer import Trainer

logger = logging.getLogger("mmtrain")


@dataclass(slots=True, kw_only=True)
class RankState:
    """What one rank holds, and the trainer that trains it."""

    config: Config
    """The config of a job with elastic.enable."""
    device: torch.device
    search: Search
    observers: tuple[Observer, ...]
    stops: StopSignals
    marks: Marks = field(default_factory=Marks)
    placed: bool = False
    """The state is in the trainer's placement; else it is held."""
    job: str = ""
    """Name of the job, which all its generations share."""
    nodes: tuple[str, ...] = ()
    """The nodes that trained last."""
    copied_bytes: int = 0
    """The bytes that ranks sent to each other in the last move."""
    memory: DeviceMemory | None = None
    """What the job agreed on."""
    _trainer: Trainer | None = None
    _held: HeldShards = field(default_factory=HeldShards.empty)
    _layers: tuple[tuple[str, int], ...] = ()
    """The layers (module, layer) of which this rank has a part."""

    @property
    def trainer(self) -> Trainer:
        """The trainer of this rank, which exists from the first layout on."""
        assert self._trainer is not None
        return self._trainer

    @property
    def step(self) -> int:
        """The newest step of the job."""
        return self.trainer.state.step

    # ------------------------------------------------------------------------------------------- telling

    def report(self, node: str, ranks: int, inputs: Iterable[tuple[str, str]]) -> RankReport:
        """What this rank tells all others. Args: node: its name; ranks: of the node; inputs: (subject, digest)."""
        memory = self.memory or DeviceMemory.own(self.device, ranks)
        trainer, marks = self._trainer, self.marks
        reached = trainer.reached if trainer else None
        totals = reached.totals if reached else trainer.totals if trainer else None
        return RankReport(
            node=node,
            mark=marks.state,
            reached=(marks.training, reached.step) if reached else None,
            has_totals=totals is not None,
            began=marks.began,
            ended=marks.ended,
            layers=self._layers,
            device_bytes=memory.device_bytes,
            process_bytes=memory.process_bytes,
            inputs=tuple(inputs),
        )

    def catch_up(self, group: Generation, agreed: Agreement) -> None:
        """Applies the step whose totals another rank has; any other step that was begun is dropped. Collective."""
        trainer = self._trainer
        if agreed.source is not None:
            own = None
            if group.rank == agreed.source:
                totals = self.trainer.reached.totals if self.trainer.reached else self.trainer.totals
                assert totals is not None
                own = totals.tolist()
            known = next(one for one in group.gather(own) if one is not None)
            if group.rank in agreed.appliers:
                reached = self.trainer.reached
                assert reached is not None
                reached.totals = torch.tensor(known, dtype=torch.float64)
                self.trainer.apply(reached, alone=True)
        if trainer is not None:
            trainer.drop_placement()  # its tensors are held
            forget_meshes()

    def state_reports(self, group: Generation, agreed: Agreement) -> list[StateReport]:
        """The reports of the first rank with each state to those that have another one, or none, the newest first.
        Collective."""
        own = None
        if any(group.rank == holders[0] for _, holders in agreed.marks):
            checkpointer, mark = self.trainer.checkpointer, self.marks.state
            assert mark is not None
            own = StateReport(
                mark=mark,
                state=self.trainer.state,
                depths=self.trainer.config.parallelism.layout.depths,
                nodes=self.nodes,
                job=self.job,
                went_back_to=checkpointer.went_back_to if checkpointer else -1,
                values=self.marks.values,
            ).to_dict()
        found = [StateReport.parse(raw) for raw in group.gather(own) if raw is not None]
        return sorted(found, key=lambda one: one.mark, reverse=True)

    def has_ended(self, group: Generation, states: Sequence[StateReport]) -> bool:
        """Whether the job has trained its last step while these nodes came, or were stopped. Collective."""
        steps = self.config.training.steps
        if states[0].mark[1] >= steps if states else self.config.checkpoint.load_step >= 0:
            return False
        stored = stored_steps(self.config)
        if ended := bool(group.gather(bool(stored) and stored[-1] >= steps)[0]):
            log_nothing_left(f"step {stored[-1]} of training.steps = {steps} is done")
        return ended

    # -------------------------------------------------------------------------------------------- moving

    def place(
        self, group: Generation, chosen: Chosen, agreed: Agreement, states: Sequence[StateReport]
    ) -> StateReport | None:
        """Builds this rank's part of a layout and fills it. Collective over the generation.

        Returns: of the state that it has then; None: it is that of a checkpoint, or the initial one.
        """
        layout, config = chosen.layout, with_depths(self.config, chosen.layout.depths)
        order = group.ranks_of(layout.nodes)
        trains, named = group.rank in order, None
        assert self.memory is not None
        if self._trainer is None:
            self._trainer = Trainer(config, search=self.search, observers=self.observers, jobs=chosen.jobs)
        trainer = self._trainer
        trainer.adopt(config, chosen.jobs, self.memory, self.stops)
        setup_logging(order.index(group.rank) if trains else group.size)
        if trains:
            group.join(backend_of(config.comm, self.device), order)
            trainer.open_checkpoints(went_back_to=states[0].went_back_to if states else -1, generation=group.number)
            lent = self._held if group.rank in agreed.holders else HeldShards.empty()
            trainer.build(self.device, lent.lend() if states else None)
            named = trainer.named()
        source = self._moved(group, agreed, states, named)
        if source is not None:
            trainer.state = source.state
        else:
            self._load(group, trains=trains, lost_state=bool(states))
        group.barrier()  # now nobody needs what is held
        self._held, self.placed = HeldShards.empty(), trains
        self._layers = _layers_of(trainer) if trains else ()
        marks, step = self.marks, trainer.state.step
        marks.state = None if not trains else source.mark if source else (group.number, step)
        marks.began, marks.ended = step, min(marks.ended, step)
        if trains:
            trainer.resume_state()
        gc.collect()
        return source

    def _moved(
        self, group: Generation, agreed: Agreement, states: Sequence[StateReport], named: NamedTensors | None
    ) -> StateReport | None:
        """The report of the newest state that is whole, with which all ranks of the layout are filled; None: there is
        none."""
        for one, (mark, holders) in zip(states, agreed.marks, strict=True):
            held = self._held if group.rank in holders else HeldShards.empty()
            try:
                self.copied_bytes = move(held, named, group.group).total
                return one
            except NoHolderError as error:
                logger.warning("the state of step %d is not whole any more: %s", mark[1], error)
            if group.rank in holders:  # what is built from it is filled with another state
                self._held, self.marks.state = HeldShards.empty(), None
        return None

    def _load(self, group: Generation, *, trains: bool, lost_state: bool) -> None:
        """Takes the state of the newest checkpoint, or initial weights. Collective over the generation.

        Args: lost_state: whether the job has trained, and no rank has the whole state.
        """
        trainer = self.trainer
        if trains and lost_state:  # what was built waits for it
            logger.warning("no node holds all layers: %s", newest_checkpoint(self.config))
            trainer.placement.close()
            trainer.drop_placement()
            trainer.build(self.device)
        trainer.state = TrainState.first(trainer.config)
        if trains:
            trainer.load()
        loaded = group.gather(trainer.state.to_dict() if trains else None)
        trainer.state = TrainState.from_dict(next(state for state in loaded if state is not None))

    def claimed(self, group: Generation) -> Claim | None:
        """The claim of a generation, on rank 0. Collective over the layout. Raises: RankLostError: see `Claim`."""
        claims: list[Claim] = []
        members = members_digest(group.membership.nodes)

        def claim() -> None:
            claims.append(Claim(self.trainer.folder, self.job, group.number, members))

        on_rank_zero(claim)
        return claims[0] if claims else None

    def hold(self) -> None:
        """Ends what the placement does, whatever other ranks do, and holds its state."""
        trainer = self._trainer
        if trainer is None:
            return
        trainer.stop_placement()
        if self.placed:
            self._held, self.placed = HeldShards.of(trainer.named()), False

    def save(self) -> None:
        """Writes a checkpoint of the newest step, unless there is one. Collective over the layout."""
        checkpointer = self.trainer.checkpointer
        if checkpointer is not None:
            checkpointer.save(self.trainer.state, self.trainer.named())
            checkpointer.finish()


def newest_checkpoint(config: Config) -> str:
    """What a job that ends leaves, as the end of a sentence."""
    if not config.checkpoint.enable:
        return "nothing is saved, since checkpoint.enable = false"
    folder, steps = _folder(config), stored_steps(config)
    return f"the newest checkpoint is step {steps[-1]} in {folder}" if steps else f"{folder} has no checkpoint yet"


def stored_steps(config: Config) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    return complete_steps(_folder(config)) if config.checkpoint.enable else []


def _folder(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def _layers_of(trainer: Trainer) -> tuple[tuple[str, int], ...]:
    """The layers (module, layer) of which this rank has a part."""
    stages = trainer.job.partition.of_rank(trainer.mesh.pp_rank)
    return tuple((stage.module, layer) for stage in stages for layer in range(*stage.layers))
