"""Conversion of the measurements of `mmtrain profile` to a profile. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from mmtrain.config.config import Config
from mmtrain.costs.noise import Noise
from mmtrain.costs.overheads import DISPATCH, Overheads
from mmtrain.costs.profile.fits import fit_sizes
from mmtrain.costs.profile.profile import HELD, LayerProfile, Profile, StepProfile, TransferProfile, job_of, role
from mmtrain.costs.sub_microbatch import Curve
from mmtrain.modality.metadata import ImageMeta, IterationMeta
from mmtrain.modality.probes import work_curve
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import make_batching
from mmtrain.planner.partition.partition import Partition, StageSpec
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.simulator.partition_choice import partition_of
from mmtrain.simulator.profiling.attribution import Attribution, attribute
from mmtrain.simulator.profiling.pauses import overheads_between, pauses
from mmtrain.simulator.profiling.probing import CUTS, REPEATS, ProbeCut, probing_job, small_job
from mmtrain.simulator.profiling.samples import (
    ActionKey,
    ProcessSamples,
    SpeedFilter,
    StepSample,
    slowest_copy,
    typical,
)
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize

NUM_BLOCKS = 2
"""Blocks of each kind that are measured."""

_TIMED: dict[str, tuple[bool, tuple[Kind, ...]]] = {
    "forward": (False, (Kind.F,)),
    "backward": (False, (Kind.B,)),
    "split_forward": (True, (Kind.F,)),
    # A backward that is not worth splitting is a B next to the I and W of others.
    "backward_input": (True, (Kind.I, Kind.B)),
    "backward_weight": (True, (Kind.W,)),
}
"""Measured time of a layer -> whether backwards are split, and the actions whose seconds count."""

_NOISE = {
    "forward": "forward",
    "split_forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward_weight",
}
"""Measured time of a layer -> the field of `Noise` that it belongs to."""

_ACTION = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


def assemble(
    config: Config,
    meta: IterationMeta,
    found: Sequence[ProcessSamples],
    pairs: Sequence[ProcessSamples],
    machine: Mapping[str, str | int | float],
) -> Profile:
    """The profile of a job.

    Args:
        meta: the batches that were run.
        found: measurements of each copy of the ranks that ran layers.
        pairs: measurements of two pipeline ranks; empty if the job has one.
        machine: description of the machine for the profile.
    """
    steps = [step for samples in found for step in samples.steps]
    speeds = SpeedFilter(steps)
    held_bytes = {key: value for samples in found for key, value in samples.held.items()}
    probe = _Probe(config, meta, steps, speeds, held_bytes)
    layers = tuple(probe.layers())
    step = _step(config, steps, speeds)
    transfer = None
    overheads = Overheads(**{name: probe.action_s(kind) for kind, name in DISPATCH.items()})
    if pairs:
        transfer = _transfer(pairs, cpu=machine["device"] == "cpu")
        step = replace(step, pipeline_s=_pipeline_end(config, pairs, step))
        overheads += _of_messages(pairs, transfer)
    return Profile(
        machine={**machine, "look_ms": round(1e3 * speeds.speed_s, 4)},
        job=job_of(config),
        recomputation=Recomputation.of(config.activation_checkpoint),
        layers=layers,
        overheads=overheads,
        noise=probe.noise(layers),
        step=step,
        transfer=transfer,
        host_copy=slowest_copy(found),
        repeats=probe.repeats(),
        curve=_curve(config, probe, overheads.forward_s + overheads.backward_s),
    )


class _Probe:
    """Seconds and bytes of layers and works, from samples of actions."""

    def __init__(
        self,
        config: Config,
        meta: IterationMeta,
        steps: Sequence[StepSample],
        speeds: SpeedFilter,
        held: Mapping[tuple[int, int], float],
    ) -> None:
        jobs = [probing_job(config, num_blocks=NUM_BLOCKS, cut=cut, folder="unused") for cut in CUTS]
        dtype_bytes = DTYPE_BYTES[config.training.param_dtype]
        self.meta, self._held = meta, held
        self.spec = model_spec(jobs[0].model, dtype_bytes=dtype_bytes)
        self._parts: dict[str, Partition] = {
            cut.stages: partition_of(job, self.spec) for cut, job in zip(CUTS, jobs, strict=True)
        }
        submesh = Submesh.of(config)
        self.batching = make_batching(meta, self.spec, 0, submesh.attention_mask)
        self._sizes = self.batching.priced_sizes(submesh)
        self._seconds = _medians(speeds, ((step.job, step.rows, step.speeds_s) for step in steps))
        self._steps, self._speeds = steps, speeds
        self._pauses = _medians(speeds, ((step.job, step.pauses, step.speeds_s) for step in steps))

    def layers(self) -> Iterator[LayerProfile]:
        """The profile of each kind of layer, in the order of their first occurrence."""
        for module in self.spec.modules:
            kinds = [role(layer) for layer in module.layers]
            for kind in dict.fromkeys(kinds):
                alike = [index for index, layer_role in enumerate(kinds) if layer_role == kind]
                # The gradient enters most layers of a deep model if a layer before the last one here trains.
                grad = self.spec.grad_enters(module.name) or any(x.trainable for x in module.layers[: alike[-1]])
                yield LayerProfile.fitted(module.name, module.layers[alike[0]], grad, self._points(module.name, alike))

    def action_s(self, kind: Kind) -> float:
        """Seconds of an action in addition to its layers: the mean fixed part over modules, plus the pause before."""
        attributions = [self.attributions[module.name, _ACTION[kind]] for module in self.spec.modules]
        fixed = [attribution.fixed_s for attribution in attributions if attribution.layers] or [0.0]  # 0: all is frozen
        cut = ProbeCut(stages="modules", splits=kind in (Kind.I, Kind.W))
        pauses = [value for (measured_cut, _, _, k), value in self._pauses.items() if measured_cut == cut and k is kind]
        return float(np.mean(fixed)) + (float(np.mean(pauses)) if pauses else 0.0)

    def noise(self, layers: Sequence[LayerProfile]) -> Noise:
        """How far the seconds of actions lay from the fits of their layers, at the machine's typical speed."""
        fits = {(layer.module, layer.role): layer for layer in layers}
        name_of = {(splits, kinds[0]): name for name, (splits, kinds) in _TIMED.items()}
        residuals: list[tuple[int, str, float]] = []
        for number, step in enumerate(self._steps):
            if step.job is None or step.job.stages != "modules":
                continue
            for (stage, work, kind), seconds in step.rows.items():
                name = name_of.get((step.job.splits, kind))
                if name is None or not self._speeds.counts(step.speeds_s[stage, work, kind]):
                    continue
                module = self.batching.modules[self.batching.works[work].module]
                size = self._sizes[work]
                expected_s = self.attributions[module, name].fixed_s
                expected_s += sum(fits[module, role(x)].at(name, size) for x in self.spec.module(module).layers)
                if expected_s > 0 and seconds > 0:
                    residuals.append((number, _NOISE[name], math.log(seconds / expected_s)))
        return Noise.of(residuals)

    def repeats(self) -> dict[str, float]:
        """Memory strategy -> time that it adds to a block's forward and backward, as a fraction of its forward: the
        median over blocks and works."""
        fractions = {}
        plain = ProbeCut(stages="layers", splits=False)
        blocks = [
            stage.index
            for module in self.spec.modules
            for stage, layer in zip(self._parts["layers"].of_module(module.name), module.layers, strict=True)
            if layer.is_block
        ]
        for how, cut in REPEATS.items():
            block_fractions = []
            for stage, work in product(blocks, range(len(self.batching.works))):
                keys = [(measured_cut, stage, work, kind) for measured_cut in (plain, cut) for kind in (Kind.F, Kind.B)]
                if all(key in self._seconds for key in keys):
                    forward, backward, *with_repeats = (self._seconds[key] for key in keys)
                    block_fractions.append((sum(with_repeats) - forward - backward) / forward)
            if block_fractions:
                fractions[how] = max(0.0, float(np.median(block_fractions)))
        return fractions

    @cached_property
    def attributions(self) -> dict[tuple[str, str], Attribution]:
        """The seconds by layer of each (module, key of `_TIMED`)."""
        return {
            (module.name, name): self._attribute(module.name, name) for module in self.spec.modules for name in _TIMED
        }

    @cached_property
    def stages(self) -> dict[tuple[str, str], list[int]]:
        """The layers that have an action, for each (module, key of `_TIMED`)."""
        indices = {}
        for module in self.spec.modules:
            for name, (splits, kinds) in _TIMED.items():
                cut = ProbeCut(stages="layers", splits=splits)
                timed = {stage for (timed_cut, stage, _, kind) in self._seconds if timed_cut == cut and kind in kinds}
                stages = self._parts["layers"].of_module(module.name)
                indices[module.name, name] = [index for index, stage in enumerate(stages) if stage.index in timed]
        return indices

    def _attribute(self, module: str, name: str) -> Attribution:
        splits, kinds = _TIMED[name]
        (joined_stage,) = self._parts["modules"].of_module(module)
        stages = self._parts["layers"].of_module(module)
        taking_part = self.stages[module, name]
        single: dict[int, list[float | None]] = {}
        joined: dict[int, float] = {}
        for work in range(len(self.batching.works)):
            single[work] = [
                self._action_seconds(ProbeCut(stages="layers", splits=splits), stages[i], work, kinds)
                for i in taking_part
            ]
            together = self._action_seconds(ProbeCut(stages="modules", splits=splits), joined_stage, work, kinds)
            if together is not None:
                joined[work] = together
        return attribute(dict(enumerate(self._sizes)), single, joined, self._equal_blocks(module, taking_part))

    def _action_seconds(self, cut: ProbeCut, stage: StageSpec, work: int, kinds: Sequence[Kind]) -> float | None:
        keys = [(cut, stage.index, work, kind) for kind in kinds]
        return next((self._seconds[key] for key in keys if key in self._seconds), None)

    def _equal_blocks(self, module: str, taking_part: Sequence[int]) -> tuple[int, int] | None:
        """Indices of the first two blocks, if they are of one kind."""
        layers = self.spec.module(module).layers
        blocks = [position for position, index in enumerate(taking_part) if layers[index].is_block][:2]
        kinds = {role(layers[taking_part[position]]) for position in blocks}
        return (blocks[0], blocks[1]) if len(blocks) == 2 and len(kinds) == 1 else None

    def _points(self, module: str, alike: Sequence[int]) -> dict[str, tuple[tuple[WorkSize, float], ...]]:
        sizes = self._sizes
        points = {
            name: tuple(
                (sizes[work], float(np.mean(present)))
                for work, times in self.attributions[module, name].layers.items()
                if (present := [seconds for position in positions if (seconds := times[position]) is not None])
            )
            for name in _TIMED
            if (positions := [position for position, i in enumerate(self.stages[module, name]) if i in alike])
        }
        stages = {self._parts["layers"].of_module(module)[index].index for index in alike}
        held_bytes = ((sizes[work], num_bytes) for (stage, work), num_bytes in self._held.items() if stage in stages)
        return {**points, HELD: tuple(held_bytes)}

    def seconds(self, module: str, kind: str, work: int) -> float:
        """Forward and whole backward of one layer of a kind for a work."""
        layers = self.spec.module(module).layers
        total = 0.0
        for name in ("forward", "backward"):
            taking_part = self.stages[module, name]
            position = next((p for p, index in enumerate(taking_part) if role(layers[index]) == kind), None)
            if position is not None and work in self.attributions[module, name].layers:
                total += self.attributions[module, name].layers[work][position] or 0.0
        return total


def _medians(
    speeds: SpeedFilter, samples: Iterable[tuple[ProbeCut | None, Mapping[ActionKey, float], Mapping[ActionKey, float]]]
) -> dict[tuple[ProbeCut, int, int, Kind], float]:
    """The median seconds of each (cut, *action). Args: samples: cut, and seconds and speed of each action."""
    times_of: dict[tuple[ProbeCut, int, int, Kind], list[tuple[float, float]]] = defaultdict(list)
    for cut, values, speeds_s in samples:
        for action, value in values.items():
            if cut is not None:
                times_of[cut, *action].append((speeds_s[action], value))
    return {key: speeds.median(times) for key, times in times_of.items()}


def _step(config: Config, steps: Sequence[StepSample], speeds: SpeedFilter) -> StepProfile:
    """Seconds of a step and of a parameter, from two jobs with different numbers of parameters."""
    large = _trainable(probing_job(config, num_blocks=NUM_BLOCKS, cut=CUTS[0], folder="unused"))
    small = _trainable(small_job(config, folder="unused"))
    joined = ProbeCut(stages="modules", splits=False)
    ends = [
        speeds.median((step.outside_speed_s, step.outside_s) for step in steps if step.job == job)
        for job in (joined, None)
    ]
    slope = max(0.0, (ends[0] - ends[1]) / (large - small)) if large != small else 0.0
    slope = min(slope, ends[0] / max(1, large))
    return StepProfile(fixed_s=max(0.0, ends[0] - slope * large), param_s=slope)


def _trainable(job: Config) -> int:
    return sum(module.num_trainable_params for module in model_spec(job.model).modules)


def _transfer(pairs: Sequence[ProcessSamples], *, cpu: bool) -> TransferProfile:
    """Args: cpu: messages may wait for a core. An iteration has many messages, so their mean counts."""
    points = [(size, float(np.mean(values)) if cpu else typical(values)) for size, values in pairs[0].trips.items()]
    fit = fit_sizes([WorkSize(rows=size, pairs=0, outputs=0) for size, _ in points], [s for _, s in points])
    return TransferProfile(latency_s=fit.fixed, byte_s=max(fit.row, 1e-15), error=fit.error)


def _of_messages(pairs: Sequence[ProcessSamples], transfer: TransferProfile) -> Overheads:
    """What messages add to actions, from pauses between the actions of two pipeline ranks."""
    p2p = P2P(latency_s=transfer.latency_s, bytes_per_s=1 / transfer.byte_s)
    observed = [
        pause
        for problem, program, rows in pairs[0].runs
        for pause in pauses(program, rows, replace(problem, p2p=p2p).transfer_s)
    ]
    between = overheads_between(observed)
    return Overheads(send_s=between.send_s, receive_s=between.receive_s, message_s=between.message_s)


def _pipeline_end(config: Config, pairs: Sequence[ProcessSamples], step: StepProfile) -> float:
    """Seconds by which the end of a step is longer with two ranks than their parameters explain."""
    ends = [
        max(end for _, end in ends_of_ranks) - max(program_end for program_end, _ in ends_of_ranks)
        for ends_of_ranks in zip(*(samples.spans for samples in pairs), strict=True)
    ]
    two_ranks = probing_job(config, num_blocks=NUM_BLOCKS, cut=CUTS[2], num_ranks=2, folder="unused")
    spec = model_spec(two_ranks.model)
    partition = partition_of(two_ranks, spec)
    largest = max(trainable_params(spec, partition, rank) for rank in range(2))
    return max(0.0, typical(ends) - step.fixed_s - step.param_s * largest)


def trainable_params(spec: ModelSpec, partition: Partition, rank: int) -> int:
    """Number of trainable parameters of a pipeline rank."""
    return sum(
        spec.module(stage.module).layers[index].num_trainable_params
        for stage in partition.of_rank(rank)
        for index in range(*stage.layers)
    )


def _curve(config: Config, probe: _Probe, action_s: float) -> Curve | None:
    """Seconds of one stage of the job's vision module (or DiT), by the number of images (or clips)."""
    counted = work_curve(config).microbatches
    if not counted:
        return None
    spec = model_spec(config.model)
    if spec.counted is None:
        return None
    name = spec.counted.name
    stages = partition_of(config, spec).of_module(name)
    first_microbatch = len(probe.meta.microbatches) - len(counted)
    batching, points = probe.batching, []
    for number, work in enumerate(batching.works):
        if work.microbatch < first_microbatch or batching.modules[work.module] != name:
            continue
        total = sum(probe.seconds(name, role(layer), number) for layer in spec.module(name).layers)
        items = len(batching.items[number].units)
        points.append((items, total / len(stages) + action_s))
    (unit,) = counted[0].images or counted[0].clips
    return Curve(patches=unit.num_patches if isinstance(unit, ImageMeta) else unit.num_tokens, seconds=tuple(points))
