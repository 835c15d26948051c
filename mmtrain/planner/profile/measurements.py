"""From what the processes of `mmtrain profile` measured to a profile. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TypeVar

import numpy as np

from mmtrain.config.config import Config
from mmtrain.modality.metadata import ImageMeta, IterationMeta
from mmtrain.modality.probes import work_curve
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import make_batching
from mmtrain.planner.costs.cost_model import HostCopy
from mmtrain.planner.partition.choice import partition_of
from mmtrain.planner.partition.partition import Partition, StageSpec
from mmtrain.planner.profile.attribution import Attribution, attribute
from mmtrain.planner.profile.fits import fit_sizes
from mmtrain.planner.profile.probing import CUTS, REPEATS, Cut, probing_job, small_job
from mmtrain.planner.profile.profile import HELD, LayerProfile, Profile, StepProfile, TransferProfile, job_of, role
from mmtrain.planner.sub_microbatch import Curve
from mmtrain.schedule.action import Kind
from mmtrain.spec.builders import model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec, WorkSize

NUM_BLOCKS = 2
"""Blocks of each kind that are measured."""

_SPEED_TOLERANCE = 0.15
"""Of the machine's best speed that it may miss beside an action that counts. With a neighbour on the other half of a
core it misses 40 to 60 %."""

_BEST = 0.1
"""The part of all actions that met a machine at least as fast as its "best"."""

_LEAST = 2
"""Times of one action that count in any case: those with the fastest machine."""

_TIMED: dict[str, tuple[bool, tuple[Kind, ...]]] = {
    "forward": (False, (Kind.F,)),
    "backward": (False, (Kind.B,)),
    "split_forward": (True, (Kind.F,)),
    # A backward that is not worth splitting is a B next to the I and W of others.
    "backward_input": (True, (Kind.I, Kind.B)),
    "backward_weight": (True, (Kind.W,)),
}
"""What is timed of a layer -> whether backwards are split, and the actions whose seconds count."""

_ACTION = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


Key = TypeVar("Key")

Place = tuple[int, int, Kind]
"""(stage, work, kind) of an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step of one trainer."""

    job: Cut | None
    """How the layers were cut; None: the small job."""
    rows: Mapping[Place, float]
    """Seconds of each action."""
    pauses: Mapping[Place, float]
    """Seconds from the end of the action before it."""
    speeds_s: Mapping[Place, float]
    """Seconds of a fixed piece of work beside each action: how fast the machine was; 0: not measured."""
    outside_s: float
    """Seconds of the step outside of its program."""
    outside_speed_s: float
    """How fast the machine was then."""


@dataclass(kw_only=True)
class Samples:
    """What one process measured."""

    steps: list[StepSample] = field(default_factory=list)
    held: dict[tuple[int, int], float] = field(default_factory=dict)
    """(stage, work) -> bytes that autograd kept of the forward, a stage for each layer."""
    trips: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Bytes -> seconds of one way of a message."""
    posts: list[float] = field(default_factory=list)
    """Seconds of one call that posts a message."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """(end of the program, end of the step) on one of two pipeline ranks."""
    host_copy: HostCopy | None = None
    """Between the device and host memory, while nothing else runs."""


def slowest(ranks: Sequence[Samples]) -> Samples:
    """What ranks that share works measured: of each action and amount the largest, which the others wait for."""
    steps = []
    for same in zip(*(samples.steps for samples in ranks), strict=True):
        steps.append(
            StepSample(
                job=same[0].job,
                rows=_largest([step.rows for step in same]),
                pauses=_largest([step.pauses for step in same]),
                speeds_s=_largest([step.speeds_s for step in same]),
                outside_s=max(step.outside_s for step in same),
                outside_speed_s=max(step.outside_speed_s for step in same),
            )
        )
    return Samples(steps=steps, held=_largest([samples.held for samples in ranks]), host_copy=_slowest_copy(ranks))


def _slowest_copy(ranks: Sequence[Samples]) -> HostCopy | None:
    copies = [samples.host_copy for samples in ranks if samples.host_copy is not None]
    return min(copies, key=lambda copy: copy.bytes_per_s, default=None)


def _largest(tables: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    return {key: max(table[key] for table in tables) for key in tables[0]}


class SpeedFilter:
    """Which times count: those that were taken while the machine was about as fast as at its best.

    The speed of a shared machine changes by tens of per cent, for milliseconds to minutes. A profile is of its best
    state, so that numbers of different trainers belong together. Processes side by side share one limit.
    """

    def __init__(self, steps: Sequence[StepSample]) -> None:
        speeds = [speed for step in steps for speed in step.speeds_s.values()] or [0.0]
        self.limit_s = (1 + _SPEED_TOLERANCE) * float(np.quantile(speeds, _BEST))
        """Of the fixed piece of work beside times that count."""
        self.speed_s = float(np.mean([speed for speed in speeds if speed <= self.limit_s]))
        """The mean beside them."""

    def median(self, times: Iterable[tuple[float, float]]) -> float:
        """The median of (how fast the machine was, seconds); of those with the two fastest machines, if fewer count."""
        ordered = sorted(times)
        return float(np.median([s for i, (speed, s) in enumerate(ordered) if i < _LEAST or speed <= self.limit_s]))


def typical(values: Sequence[float]) -> float:
    """The first quartile: what disturbances, which only add, leave alone."""
    return float(np.quantile(values, 0.25))


def assemble(
    config: Config,
    meta: IterationMeta,
    found: Sequence[Samples],
    pairs: Sequence[Samples],
    machine: Mapping[str, str | int | float],
) -> Profile:
    """The profile of a job.

    Args:
        meta: the batches that were run.
        found: of each copy of the ranks that ran layers. pairs: of two pipeline ranks; empty if there was one.
        machine: what is said of it in the profile.
    """
    steps = [step for samples in found for step in samples.steps]
    speeds = SpeedFilter(steps)
    held = {key: value for samples in found for key, value in samples.held.items()}
    probe = _Probe(config, meta, steps, speeds, held)
    step = _step(config, steps, speeds)
    transfer = None
    if pairs:
        transfer = _transfer(pairs, cpu=machine["device"] == "cpu")
        step = replace(step, pipeline_s=_pipeline_end(config, pairs, step))
    actions = {kind.value: probe.action_s(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    return Profile(
        machine={**machine, "look_ms": round(1e3 * speeds.speed_s, 4)},
        job=job_of(config),
        recomputation=Recomputation.of(config.activation_checkpoint),
        layers=tuple(probe.layers()),
        actions=actions,
        step=step,
        transfer=transfer,
        host_copy=_slowest_copy(found),
        repeats=probe.repeats(),
        curve=_curve(config, probe, actions["F"] + actions["B"]),
    )


class _Probe:
    """Samples of actions as amounts of layers and works."""

    def __init__(
        self,
        config: Config,
        meta: IterationMeta,
        steps: Sequence[StepSample],
        speeds: SpeedFilter,
        held: Mapping[tuple[int, int], float],
    ) -> None:
        jobs = [probing_job(config, num_blocks=NUM_BLOCKS, cut=cut, folder="unused") for cut in CUTS]
        dtype_bytes = 2 if config.training.mixed_precision_param == "bfloat16" else 4
        self.meta, self._held = meta, held
        self.spec = model_spec(jobs[0].model, dtype_bytes=dtype_bytes)
        self._parts: dict[str, Partition] = {
            cut.stages: partition_of(job, self.spec) for cut, job in zip(CUTS, jobs, strict=True)
        }
        self.batching = make_batching(meta, self.spec, 0, Submesh.of(config).attention_mask)
        self._seconds = _medians(speeds, ((step.job, step.rows, step.speeds_s) for step in steps))
        self._pauses = _medians(speeds, ((step.job, step.pauses, step.speeds_s) for step in steps))

    def layers(self) -> Iterator[LayerProfile]:
        """The profile of each kind of layer, in the order of their first."""
        for module in self.spec.modules:
            kinds = [role(layer) for layer in module.layers]
            for kind in dict.fromkeys(kinds):
                alike = [index for index, other in enumerate(kinds) if other == kind]
                # What comes before the last of them trains if it does for most of them in a deep model.
                grad = self.spec.grad_enters(module.name) or any(x.trainable for x in module.layers[: alike[-1]])
                yield LayerProfile.fitted(module.name, module.layers[alike[0]], grad, self._points(module.name, alike))

    def action_s(self, kind: Kind) -> float:
        """Seconds of an action beside its layers: mean over modules of what is fixed in it, and the pause before it."""
        found = [self.attributions[module.name, _ACTION[kind]] for module in self.spec.modules]
        fixed = [one.fixed_s for one in found if one.layers] or [0.0]  # nothing runs backward in what is frozen
        cut = Cut(stages="modules", splits=kind in (Kind.I, Kind.W))
        pauses = [value for (of, _, _, k), value in self._pauses.items() if of == cut and k is kind]
        return float(np.mean(fixed)) + (float(np.mean(pauses)) if pauses else 0.0)

    def repeats(self) -> dict[str, float]:
        """Memory strategy -> what it adds to a block's forward and backward, as a part of its forward: the median over
        blocks and works."""
        found = {}
        plain = Cut(stages="layers", splits=False)
        blocks = [
            stage.index
            for module in self.spec.modules
            for stage, layer in zip(self._parts["layers"].of_module(module.name), module.layers, strict=True)
            if layer.is_block
        ]
        for how, cut in REPEATS.items():
            parts = []
            for stage, work in product(blocks, range(len(self.batching.works))):
                keys = [(of, stage, work, kind) for of in (plain, cut) for kind in (Kind.F, Kind.B)]
                if all(key in self._seconds for key in keys):
                    forward, backward, *other = (self._seconds[key] for key in keys)
                    parts.append((sum(other) - forward - backward) / forward)
            if parts:
                found[how] = max(0.0, float(np.median(parts)))
        return found

    @cached_property
    def attributions(self) -> dict[tuple[str, str], Attribution]:
        """(module, what is timed) -> its seconds by layer."""
        return {
            (module.name, name): self._attribute(module.name, name) for module in self.spec.modules for name in _TIMED
        }

    @cached_property
    def stages(self) -> dict[tuple[str, str], list[int]]:
        """(module, what is timed) -> the layers that take part in such an action."""
        found = {}
        for module in self.spec.modules:
            for name, (splits, kinds) in _TIMED.items():
                cut = Cut(stages="layers", splits=splits)
                seen = {stage for (of, stage, _, kind) in self._seconds if of == cut and kind in kinds}
                mine = self._parts["layers"].of_module(module.name)
                found[module.name, name] = [index for index, stage in enumerate(mine) if stage.index in seen]
        return found

    def _attribute(self, module: str, name: str) -> Attribution:
        splits, kinds = _TIMED[name]
        (whole,) = self._parts["modules"].of_module(module)
        parts = self._parts["layers"].of_module(module)
        taking_part = self.stages[module, name]
        single: dict[int, list[float | None]] = {}
        joined: dict[int, float] = {}
        for work in range(len(self.batching.works)):
            single[work] = [self._one(Cut(stages="layers", splits=splits), parts[i], work, kinds) for i in taking_part]
            together = self._one(Cut(stages="modules", splits=splits), whole, work, kinds)
            if together is not None:
                joined[work] = together
        return attribute(dict(enumerate(self.batching.sizes)), single, joined, self._equal_blocks(module, taking_part))

    def _one(self, cut: Cut, stage: StageSpec, work: int, kinds: Sequence[Kind]) -> float | None:
        keys = [(cut, stage.index, work, kind) for kind in kinds]
        return next((self._seconds[key] for key in keys if key in self._seconds), None)

    def _equal_blocks(self, module: str, taking_part: Sequence[int]) -> tuple[int, int] | None:
        """Indices of the first two blocks, if they are of one kind."""
        layers = self.spec.module(module).layers
        blocks = [place for place, index in enumerate(taking_part) if layers[index].is_block][:2]
        kinds = {role(layers[taking_part[place]]) for place in blocks}
        return (blocks[0], blocks[1]) if len(blocks) == 2 and len(kinds) == 1 else None

    def _points(self, module: str, alike: Sequence[int]) -> dict[str, tuple[tuple[WorkSize, float], ...]]:
        sizes = self.batching.sizes
        points = {
            name: tuple(
                (sizes[work], float(np.mean(found)))
                for work, times in self.attributions[module, name].layers.items()
                if (found := [seconds for place in places if (seconds := times[place]) is not None])
            )
            for name in _TIMED
            if (places := [place for place, i in enumerate(self.stages[module, name]) if i in alike])
        }
        stages = {self._parts["layers"].of_module(module)[index].index for index in alike}
        held = ((sizes[work], amount) for (stage, work), amount in self._held.items() if stage in stages)
        return {**points, HELD: tuple(held)}

    def seconds(self, module: str, kind: str, work: int) -> float:
        """Forward and whole backward of one layer of a kind for a work."""
        layers = self.spec.module(module).layers
        total = 0.0
        for name in ("forward", "backward"):
            taking_part = self.stages[module, name]
            place = next((p for p, index in enumerate(taking_part) if role(layers[index]) == kind), None)
            if place is not None and work in self.attributions[module, name].layers:
                total += self.attributions[module, name].layers[work][place] or 0.0
        return total


def _medians(
    speeds: SpeedFilter, samples: Iterable[tuple[Cut | None, Mapping[Place, float], Mapping[Place, float]]]
) -> dict[tuple[Cut, int, int, Kind], float]:
    """(cut, place) -> median seconds. Args: samples: cut, seconds and speed of each place."""
    found: dict[tuple[Cut, int, int, Kind], list[tuple[float, float]]] = defaultdict(list)
    for cut, values, speeds_s in samples:
        for place, value in values.items():
            if cut is not None:
                found[cut, *place].append((speeds_s[place], value))
    return {key: speeds.median(times) for key, times in found.items()}


def _step(config: Config, steps: Sequence[StepSample], speeds: SpeedFilter) -> StepProfile:
    """Two jobs of different sizes tell what a parameter costs from what a step costs."""
    whole = _trainable(probing_job(config, num_blocks=NUM_BLOCKS, cut=CUTS[0], folder="unused"))
    small = _trainable(small_job(config, folder="unused"))
    joined = Cut(stages="modules", splits=False)
    ends = [
        speeds.median((step.outside_speed_s, step.outside_s) for step in steps if step.job == job)
        for job in (joined, None)
    ]
    slope = max(0.0, (ends[0] - ends[1]) / (whole - small)) if whole != small else 0.0
    slope = min(slope, ends[0] / max(1, whole))
    return StepProfile(fixed_s=max(0.0, ends[0] - slope * whole), param_s=slope)


def _trainable(job: Config) -> int:
    return sum(module.num_trainable_params for module in model_spec(job.model).modules)


def _transfer(pairs: Sequence[Samples], *, cpu: bool) -> TransferProfile:
    """Args: cpu: messages may have to wait for a core. Some do and an iteration has many, so that their mean counts."""
    points = [(size, float(np.mean(values)) if cpu else typical(values)) for size, values in pairs[0].trips.items()]
    fit = fit_sizes([WorkSize(rows=size, pairs=0, outputs=0) for size, _ in points], [s for _, s in points])
    posts = typical([value for samples in pairs for value in samples.posts])
    return TransferProfile(latency_s=fit.fixed, byte_s=max(fit.row, 1e-15), end_s=posts, error=fit.error)


def _pipeline_end(config: Config, pairs: Sequence[Samples], step: StepProfile) -> float:
    """What the end of a step takes longer with two ranks than their parameters explain."""
    ends = [
        max(end for _, end in both) - max(done for done, _ in both)
        for both in zip(*(samples.spans for samples in pairs), strict=True)
    ]
    two = probing_job(config, num_blocks=NUM_BLOCKS, cut=CUTS[2], num_ranks=2, folder="unused")
    spec = model_spec(two.model)
    parts = partition_of(two, spec)
    largest = max(trainable_params(spec, parts, rank) for rank in range(2))
    return max(0.0, typical(ends) - step.fixed_s - step.param_s * largest)


def trainable_params(spec: ModelSpec, partition: Partition, rank: int) -> int:
    """Trainable parameters of a pipeline rank."""
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
    first = len(probe.meta.microbatches) - len(counted)
    batching, found = probe.batching, []
    for number, work in enumerate(batching.works):
        if work.microbatch < first or batching.modules[work.module] != name:
            continue
        total = sum(probe.seconds(name, role(layer), number) for layer in spec.module(name).layers)
        items = len(batching.items[number].units)
        found.append((items, total / len(stages) + action_s))
    (one,) = counted[0].images or counted[0].clips
    return Curve(patches=one.num_patches if isinstance(one, ImageMeta) else one.num_tokens, seconds=tuple(found))
