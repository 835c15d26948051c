"""A job that loses nodes and goes on, and accepts nodes that join: one rank of it.

Each membership is a generation with process groups of its own. A rank whose step fails hangs up, so that all leave the
step; all that are left meet in the next generation, agree about the newest state, compose the layout for their number,
and move the state. Nobody restarts, and nothing is read from a checkpoint as long as some node holds each layer. A
failure at any moment begins this again with the next membership.

Source of the idea: Oobleck (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan,
2026, chapter 2), which restores weights alone, by broadcasts.
"""

import gc
import logging
import os
import time
import urllib.parse
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress

from mmtrain import errors
from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.config.config import Config
from mmtrain.data.loader import warm_workers
from mmtrain.errors import ConfigError, MMTrainError, RankLostError, TrainingError
from mmtrain.launch.claims import Claim
from mmtrain.launch.launched import Launched
from mmtrain.launch.member import Member
from mmtrain.launch.membership import Membership
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.membership_event import MembershipEvent
from mmtrain.observe.observer import Observer
from mmtrain.observe.run_record import RunRecord, log_nothing_left, owned_by_rank_zero
from mmtrain.observe.step_memory import DeviceMemory
from mmtrain.parallel.agreement import Agreement, RankReport, agree, differing_inputs
from mmtrain.parallel.alike import Subject, check_alike
from mmtrain.parallel.generation import Generation
from mmtrain.parallel.job_inputs import node_inputs
from mmtrain.parallel.mesh import on_own_device, pick_device
from mmtrain.parallel.roll_call import is_communication
from mmtrain.parallel.stores import open_store
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.make_plan import Search, make_plan
from mmtrain.planner.search import search as searching
from mmtrain.simulator.allocation.node_layouts import TooFewNodes
from mmtrain.training.elastic_layouts import Chosen, Layouts, staying
from mmtrain.training.elastic_values import Change, Failures, StateReport
from mmtrain.training.progress import why_ended
from mmtrain.training.rank_state import RankState, newest_checkpoint
from mmtrain.training.trainer import prepare_process

logger = logging.getLogger("mmtrain")

_LOOK_S = 1.0
"""The pause between two checks for further nodes, before a job has enough to begin."""


class ElasticJob:
    """One rank of a job that outlives its nodes.

    Args:
        config: with elastic.enable.
        member: this rank's part in the membership of its node.
        search: finds the plans of iterations.
        observers: watch the job, in addition to the record of the run.
    """

    def __init__(
        self, config: Config, member: Member, *, search: Search = make_plan, observers: Iterable[Observer] = ()
    ) -> None:
        config = on_own_device(config)
        self.config, self.member = config, member
        self._observers, self._stops = tuple(observers), StopSignals()
        self.state = RankState(
            config=config,
            device=pick_device(config.comm),
            search=search,
            observers=self._observers,
            stops=self._stops,
        )
        self._layouts = Layouts(config=config, ranks_per_node=member.ranks, device=self.state.device.type)
        self._subjects: tuple[Subject, ...] = ()
        self._generation: Generation | None = None
        self._record: RunRecord | None = None
        self._change = Change()
        self._failures = Failures(self.config.comm.timeout_seconds)

    def run(self) -> None:
        """Trains to the last step, or until this node, or all, have left.

        Raises:
            MMTrainError: the same on all ranks.
            RankLostError: this node cannot go on.
        """
        setup_logging(1)
        prepare_process(self.config, self.state.device)
        self._stops.catch("")
        try:
            self._prepare()
            gc.collect()
            gc.freeze()  # else each change looks at all that was imported; later it would keep placements
            membership: Membership | None = self.member.first()
            while membership is not None:
                membership = self._served(membership)
        except MMTrainError as error:
            if self._generation is not None and not isinstance(error, RankLostError):  # then this node alone ends
                self._generation.report_error(error)
            if self._record is not None:
                self._record.failed(error)
            raise
        finally:
            self._stops.release()
            self._leave()
            for observer in self._observers:
                observer.close()
            self.member.close()

    def _prepare(self) -> None:
        """Does what takes long before this node joins, while a running job trains: it compares, compiles, imports."""
        self._subjects = node_inputs(
            self.config, job_schedule(self.config), self.state.device, self.member.local_rank, self.member.ranks
        )
        layout, local_rank = self.config.parallelism.layout, self.member.local_rank
        if local_rank < layout.stage_size and local_rank % (layout.cp * layout.tp) == 0:  # it may read data
            warm_workers(self.config)
        self._layouts.warm()
        if self.config.planner.enable:
            searching.warm()  # a process that compiles looks as if it were stopped

    def _served(self, membership: Membership) -> Membership | None:
        """Trains in one generation; the next membership, or None at the end of this rank's part."""
        try:
            return self._serve(membership)
        except Exception as error:
            if not is_communication(error) and not isinstance(error, RankLostError):
                raise
            if self._generation is not None and (reported := self._generation.reported_error()) is not None:
                raise reported from None
            step, reason = self.state.marks.began, errors.one_line(error, 100)
            logger.info("generation %d ends: step %d cannot be finished: %s", membership.generation, step, reason)
            self._failures.add(membership.names, step, reason)
            self._leave()
            self._change.begin("ask")
            try:
                return self.member.next()
            except RankLostError as lost:
                raise RankLostError(f"{lost}; {newest_checkpoint(self.config)}") from lost

    # -------------------------------------------------------------------------------------- a generation

    def _serve(self, membership: Membership) -> Membership | None:
        """Adopts a membership, and trains until the next one; None: this rank's part ends."""
        self._change.begin("meet")
        group, state = self._met(membership), self.state
        self._change.begin("agree")
        inputs = [(one.name, one.digest) for one in self._subjects if not one.partial]
        own = state.report(self.member.name, self.member.ranks, inputs)
        reports = [RankReport.parse(raw) for raw in group.gather(own.to_dict())]
        agreed = agree(reports)
        self._check_inputs(group, reports, agreed)
        state.memory = DeviceMemory(
            device_bytes=min(one.device_bytes for one in reports),
            process_bytes=max(one.process_bytes for one in reports),
        )
        state.catch_up(group, agreed)
        states = state.state_reports(group, agreed)
        state.job = states[0].job if states else group.gather(uuid.uuid4().hex)[0]
        if state.has_ended(group, states):
            self._part(group, None)
            return None
        self._change.begin("compose")
        chosen = self._layouts.chosen(membership, reports, states[0].depths if states else ())
        if isinstance(chosen, TooFewNodes) or (chosen.ends and not states):
            return self._too_few(group, chosen, states)
        self._change.begin("move")
        source = state.place(group, chosen, agreed, states)
        stay = staying(membership)
        leaving = [name for name in membership.names if name not in stay]
        if leaving and stay:
            group.narrow(stay)
            if self.member.name in leaving:
                logger.warning("node %s was told to end, and leaves after step %d", self.member.name, state.step)
                return None
        before, state.nodes = states[0].nodes if states else state.nodes, tuple(stay or membership.names)
        if not state.placed:
            return self._wait(group, reports, ends=bool(chosen.ends))
        event = self._event(group, chosen, before, agreed.redone)
        return self._train(group, event, reports, source, ends=chosen.ends)

    def _met(self, membership: Membership) -> Generation:
        """Meets all ranks, in the store of a node that stays."""
        section, stay = self.config.elastic, staying(membership)
        address = next(node.store for node in membership.nodes if not stay or node.name == stay[0])
        services = (urllib.parse.urlsplit(text) for text in (address, section.lighthouse))
        self._generation = Generation(
            membership,
            node=self.member.name,
            local_rank=self.member.local_rank,
            store=open_store(address, self.config.comm.timeout_seconds, section.silent_s),
            ports=[service.port for service in services if service.port],
            timeout_s=self.config.comm.timeout_seconds,
            silent_s=section.silent_s,
            left=self.member.left,
        )
        return self._generation

    def _check_inputs(self, group: Generation, reports: Sequence[RankReport], agreed: Agreement) -> None:
        """Refuses ranks that differ from those with the state; without a state, any that differ from each other.

        Raises: ConfigError: this rank differs. RankLostError: others do, without which the job goes on.
        """
        if not agreed.marks:
            local_rank, ranks = self.member.local_rank, self.member.ranks
            place = Launched(rank=group.rank, world_size=group.size, local_rank=local_rank, local_world_size=ranks)
            check_alike(group.store, place, self._subjects)
            return
        differing = differing_inputs(reports, agreed.holders)
        if subject := differing.get(self.member.name):
            self._leave()  # the others go on: they are told nothing
            raise ConfigError(
                f"elastic: node {self.member.name} differs from the running job in its {subject}; start it with the "
                "same files, versions and config as the other nodes"
            )
        if differing:
            raise RankLostError(
                f"nodes {', '.join(differing)} differ from the job, which goes on without; start them with its files"
            )

    def _too_few(
        self, group: Generation, chosen: Chosen | TooFewNodes, states: Sequence[StateReport]
    ) -> Membership | None:
        """Waits for further nodes, if the job has not begun. Raises: TrainingError: it has, or they do not come."""
        reason = chosen.reason if isinstance(chosen, TooFewNodes) else chosen.ends
        if states:
            raise TrainingError(f"{reason}; {newest_checkpoint(self.config)}")
        if group.rank == 0:
            logger.warning("waits for nodes: %s", reason)
        deadline = time.monotonic() + self.config.comm.timeout_seconds
        while time.monotonic() < deadline and not self._stops.number:
            self.member.begin_step(0)
            if (membership := self.member.end_step(0)) is not None:
                self._part(group, membership)
                return membership
            time.sleep(_LOOK_S)
        raise TrainingError(f"{reason}; none came within comm.timeout_seconds = {self.config.comm.timeout_seconds}")

    # ---------------------------------------------------------------------------------------------- steps

    def _train(
        self,
        group: Generation,
        event: MembershipEvent,
        reports: Sequence[RankReport],
        source: StateReport | None,
        *,
        ends: str,
    ) -> Membership | None:
        """The steps of a generation; the next membership, or None at the end.

        Args: source: of the state; None: it was not a rank's. ends: why the job saves and ends; empty: it goes on.
        """
        state, trainer = self.state, self.state.trainer
        config, step, membership = trainer.config, trainer.state.step, None
        if config.metrics.enable_wandb:  # one run, whichever process writes it
            os.environ.update({"WANDB_RUN_ID": state.job, "WANDB_RESUME": "allow"})
        claim = state.claimed(group)
        with owned_by_rank_zero(trainer.folder, job=state.job) as owner:
            owner.stays = True
            if event.kind == "started" and config.checkpoint.enable:
                check_shared(trainer.folder)
            record = RunRecord(config, trainer.job, trainer.mesh, step, generation=group.number, written=self.config)
            self._record, trainer.observers = record, [*self._observers, record]
            for observer in self._observers:
                observer.layout_begins(config, trainer.job, trainer.mesh, step)
            record.membership_changed(event)
            if source is not None and step:
                if source.values.get("step") == step:
                    record.note(source.values)
                if max(one.ended for one in reports) < step:  # a failure came before
                    trainer.end_step()
            if not ends:
                membership = self._steps(group, reports, claim)
            elif source is not None:
                state.save()
            owner.stays = membership is not None
        if ends and staying(group.membership):
            raise TrainingError(f"{ends}; {newest_checkpoint(self.config)}")
        if ends:
            logger.info("stopped after step %d: %s; %s", step, ends, newest_checkpoint(self.config))
        self._part(group, membership)
        return membership

    def _steps(self, group: Generation, reports: Sequence[RankReport], claim: Claim | None) -> Membership | None:
        trainer, marks, member = self.state.trainer, self.state.marks, self.member
        marks.training, steps = group.number, trainer.config.training.steps
        end = "saves and ends" if trainer.checkpointer else "ends"
        notice = f"Ctrl-C: the job {end} after this step; once more ends it at once\n"
        self._stops.notice = notice if trainer.mesh.rank == 0 else ""
        trainer.applied = lambda step: marks.apply((group.number, step), trainer.metrics)
        if why := why_ended(trainer.config, trainer.state):
            log_nothing_left(why)
            return None
        trainer.first_validation()
        batches = trainer.batches(steps)
        while (step := trainer.state.step + 1) <= steps:
            marks.began = step
            member.begin_step(step)
            stopped = trainer.next_step(batches)
            if claim is not None:
                claim.check()
            trainer.end_step()
            marks.ended = step
            member.holds(step)
            membership = member.end_step(step)
            if stopped and membership is None and step < steps:
                membership = self._leaving()
            if membership is not None and step < steps:
                return None if self._ends_here(group, membership, reports) else membership
        if trainer.checkpointer:
            trainer.checkpointer.finish()
        trainer.log_end()
        return None

    def _wait(self, group: Generation, reports: Sequence[RankReport], *, ends: bool) -> Membership | None:
        """A node without a place asks as the others do, to their last step. Args: ends: the others make no step."""
        for step in range(self.state.step + 1, 0 if ends else self.config.training.steps + 1):
            if self._stops.number:
                self.member.mark_leaving()
            self.member.begin_step(step)
            membership = self.member.end_step(step)
            if membership is not None and step < self.config.training.steps:
                if self._ends_here(group, membership, reports):
                    break
                self._part(group, membership)
                return membership
        self._part(group, None)
        return None

    def _leaving(self) -> Membership:
        """The next membership, after some ranks were told to end."""
        for wait_s in (0.0, self.config.elastic.leave_wait_s):
            time.sleep(wait_s)  # schedulers signal nodes one after the other
            if self._stops.number:
                self.member.mark_leaving()
        return self.member.next()

    def _ends_here(self, group: Generation, membership: Membership, reports: Sequence[RankReport]) -> bool:
        """Whether the job ends before a change, since its nodes leave; it is saved then."""
        if membership.names != group.membership.names or len(staying(membership)) == len(membership.names):
            return False
        reason = self._layouts.too_few(membership, reports)
        if reason and self.state.placed:
            self.state.save()
            logger.info("%s: stopped after step %d; %s", reason, self.state.step, newest_checkpoint(self.config))
        return bool(reason)

    def _event(self, group: Generation, chosen: Chosen, before: Sequence[str], redone: int) -> MembershipEvent:
        """What has changed with this generation. Args: before: nodes that trained last. redone: steps to do again."""
        old, now, names = set(before), set(self.state.nodes), set(group.membership.names)
        kinds = {"started": not old, "lost": old - names, "left": names - now, "joined": now - old, "recovered": True}
        return MembershipEvent(
            kind=next(kind for kind, found in kinds.items() if found),
            nodes=len(now),
            pipelines=chosen.layout.depths,
            generation=group.number,
            step=self.state.step,
            seconds=self._change.end(),
            num_bytes=self.state.copied_bytes,
            redone_steps=redone,
        )

    # ------------------------------------------------------------------------------------------- the end

    def _part(self, group: Generation, membership: Membership | None) -> None:
        """Leaves a generation at the same point as all others; at once where the next membership is without some of
        them, which a round has left out: they may wait for the answer of the next one.
        """
        stay = set(staying(group.membership))
        if membership is None or stay <= set(membership.names):
            with suppress(RuntimeError, RankLostError):  # some have left before: nothing is lost
                if self.state.placed and (checkpointer := self.state.trainer.checkpointer):
                    checkpointer.finish()
                group.part()
        self._leave()

    def _leave(self) -> None:
        """Leaves the generation, whatever others do; the state stays."""
        group, self._generation = self._generation, None
        if group is None:
            return
        self._change.begin("leave")
        group.hang_up()
        if self._record is not None:
            for observer in (*self._observers, self._record):
                observer.layout_ends()
            self._record.close()
            self._record = None
        self.state.hold()
        with suppress(RuntimeError):
            group.end()
