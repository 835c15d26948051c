"""What tuning may change in a job, by axis: settings to begin with, and other values to try. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mmtrain.config.config import Config, value_of
from mmtrain.config.model import section_of
from mmtrain.config.toml_sections import shown
from mmtrain.config.topology import JobLayout
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError, nearest
from mmtrain.schedule.recipe.schedule_files import schedule_of
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.degrees import meshes, values_of
from mmtrain.simulator.study import PLANNED_LIMIT

AXES: Mapping[str, str] = {
    "degrees": "pipeline, data, tensor and context parallelism, and whether encoders are divided or copied",
    "cut": "where modules are cut, on which ranks they are, who divides the vocabulary, and how many images a work has",
    "memory": "what blocks recompute",
    "schedule": "a named schedule, a recipe, or searched plans",
    "braid": "blocks of a forward and a backward that hide exchanges of tensor parallelism",
}
"""Axis -> what it changes."""

MODES = ("full", "selective")
"""The values of activation_checkpoint.mode that are tried in place of a choice for each block."""
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBV", "ZB-AutoSchedule")
"""Schedules that are tried in place of searched plans, whose first plan is that of `interleave`."""

_VOCABULARY = "parallelism.vocabulary_parallel"

ConfigValues = Mapping[str, Any]
"""Dotted key -> value."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of one job."""

    config: Config
    num_gpus: int
    axes: Collection[str] = tuple(AXES)
    fixed: frozenset[str] = frozenset()
    """Dotted keys that keep the config's values."""
    replicate: bool = False
    """Whether to try several replicas of FSDP2's shards."""
    tokens: tuple[int, ...] = ()
    """Further numbers of tokens of a microbatch, divisors of the tokens of a step, which stay."""
    schedules: Sequence[str] = SCHEDULES
    """Names, and files of recipes, that are tried in place of searched plans."""

    def first(self) -> list[Candidate]:
        """All degrees with the settings that the search begins with, the least tp and cp first.

        Raises: ConfigError: none go with those that the user gave.
        """
        return [
            self.settled({**values_of(mesh), **self._encoders(mesh, "shard"), **batch})
            for batch in self._batches()
            for mesh in self._meshes()
        ]

    def settled(self, values: ConfigValues) -> Candidate:
        """Values over the settings that the search begins with: cut by a rule, memory by the planner, searched."""
        begin = {**self._cut({"planner.partition": "dip"}), **self._memory, **self._search}
        return Candidate().having(self._free({**begin, **values}))

    def searched_cut(self, candidate: Candidate, mesh: JobLayout) -> Candidate:
        """The candidate with its partition searched, and with it on which ranks its modules are."""
        values = {"planner.partition": "search"}
        if mesh.pp > 1 and self._several:
            values["planner.placement"] = "search"
        if self._divides_vocabulary(mesh):
            values[_VOCABULARY] = "search"
        return candidate.having(self._free(self._cut(values)))

    def others(self, mesh: JobLayout) -> Iterator[tuple[str, ConfigValues]]:
        """The values to try in place of a candidate's own, one at a time, each with its axis."""
        tried = [*self._other_degrees(mesh), *self._other_cuts(mesh), *self._other_memory()]
        tried += self._other_schedules(mesh)
        for axis, values in tried:
            if axis in self.axes and (free := self._free(values)):
                yield axis, free

    def braided(self, candidate: Candidate, mesh: JobLayout) -> Candidate | None:
        """The candidate with blocks; None: it has none, or the axis is not to be tried."""
        values = self._free({"planner.search.braid": True})
        if "braid" not in self.axes or not values or mesh.tp == 1:
            return None
        return candidate.having(values)

    def check(self) -> None:
        """Checks the names of the axes. Raises: ConfigError: there is none of that name; with the nearest."""
        for axis in self.axes:
            if axis not in AXES:
                near = nearest(axis, AXES)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"tune: axis {axis!r} does not exist{hint}; choose from {', '.join(AXES)} (--axes)")

    def without_those_it_cannot_have(self, *, asked: bool) -> "Space":
        """The space with the axes that the job can have. Args: asked: whether the user named the axes.

        Raises: ConfigError: the user named one that it cannot have; with the key and its value.
        """
        left = []
        for axis in self.axes:
            why = self._why_not(axis)
            if why and asked:
                raise ConfigError(f"tune: --axes {axis}: {why}; leave the axis out, or change the key")
            left += [] if why else [axis]
        return replace(self, axes=tuple(left))

    def _why_not(self, axis: str) -> str:
        """Why the job cannot have an axis, as a sentence's part; empty: it can."""
        if axis == "degrees":
            return "there is one GPU (--cluster)" if self.num_gpus == 1 else ""
        if axis == "memory":
            return self._keeps("activation_checkpoint.mode") if self._memory_is_fixed else ""
        if axis == "schedule":
            return self._keeps("planner.enable", "parallelism.pipeline_parallel_schedule")
        if axis == "braid":
            given = value_of(self.config, "parallelism.fsdp_reshard_after_forward")
            if given == "always":
                return f'parallelism.fsdp_reshard_after_forward = "{given}" allows no blocks'
            hardware = self.config.planner.hardware
            if Cluster.of(hardware, self.num_gpus).hardware.contention == 1:
                return f"planner.hardware = {shown(hardware)} (--cluster) hides no exchanges"
            return self._one("parallelism.tensor_parallel_degree", "exchanges nothing that blocks could hide")
        return self._one("parallelism.pipeline_parallel_degree", "cuts nothing")

    @property
    def _memory_is_fixed(self) -> bool:
        return {"activation_checkpoint.mode", "planner.memory_limit"} <= self.fixed

    def _keeps(self, *keys: str) -> str:
        values = ", ".join(f"{key} = {shown(value_of(self.config, key))}" for key in keys)
        return f"{values} stays as it was given" if self.fixed.issuperset(keys) else ""

    def _one(self, key: str, why: str) -> str:
        free = "degrees" in self.axes and key not in self.fixed and self.num_gpus > 1
        return "" if free or value_of(self.config, key) > 1 else f"{key} = 1 {why}"

    # ----------------------------------------------------------------------------------------- degrees

    def _meshes(self) -> list[JobLayout]:
        own = self.config.parallelism.layout
        if "degrees" not in self.axes:
            return [own]
        given = {key: degree for key, degree in values_of(own).items() if key in self.fixed}
        replicate = self.replicate or (own.dp_replicate > 1 and "parallelism.data_parallel_replicate_degree" in given)
        tried = meshes(self.config, self.num_gpus, replicate=replicate)
        found = [mesh for mesh in tried if given.items() <= values_of(mesh).items()]
        if not found:
            raise ConfigError(
                f"tune: no degrees of parallelism make {self.num_gpus} GPUs (--cluster) with "
                f"{', '.join(f'{key} = {degree}' for key, degree in given.items())}; change one of them"
            )
        return found

    def _batches(self) -> list[ConfigValues]:
        """The numbers of tokens of a microbatch: that of the job, then others with as many tokens a step."""
        training = self.config.training
        batches: list[ConfigValues] = [{}]
        for tokens in self.tokens:
            total = training.seq_len * training.global_batch_size
            if tokens != training.seq_len:
                batches.append({"training.seq_len": tokens, "training.global_batch_size": total // tokens})
        return batches

    def _encoders(self, mesh: JobLayout, how: str) -> ConfigValues:
        key = "parallelism.encoder_tensor_parallel"
        divided = self.config.model.encoders and "degrees" in self.axes
        return {key: how if mesh.tp > 1 else "shard"} if divided else {}

    def _other_degrees(self, mesh: JobLayout) -> Iterator[tuple[str, ConfigValues]]:
        if mesh.tp > 1 and (values := self._encoders(mesh, "data")):
            yield "degrees", values

    # -------------------------------------------------------------------------------------------- cuts

    @cached_property
    def _sections(self) -> list[str]:
        return [section_of(name) for name in self.config.model.cut_modules]

    @property
    def _several(self) -> bool:
        return len(self._sections) > 1

    def _cut(self, values: ConfigValues) -> ConfigValues:
        """Values of the cut, with all modules open; nothing if the axis is not to be tried."""
        if "cut" not in self.axes:
            return {}
        opened: dict[str, Any] = {}
        for section in self._sections:
            opened |= {f"{section}.num_segments": 0, f"{section}.pipeline_layout": "", f"{section}.ranks": 0}
        return {**opened, "planner.placement": "spread", _VOCABULARY: "tensor", **values}

    def _divides_vocabulary(self, mesh: JobLayout) -> bool:
        """Whether the vocabulary may be divided over the pipeline ranks."""
        unequal = self.config.elastic.enable or self.config.parallelism.pipelines
        return mesh.pp > 1 and self.config.model.dit is None and not unequal

    def _other_cuts(self, mesh: JobLayout) -> Iterator[tuple[str, ConfigValues]]:
        for section, module in zip(self._sections, self.config.model.cut_modules.values(), strict=True):
            if getattr(module, "sub_microbatch_size", 0):
                yield "cut", {f"{section}.sub_microbatch_size": 0}
        if self._several and mesh.pp > 1:
            yield "cut", self._cut({"planner.partition": "mixed-latency"})
        if self._divides_vocabulary(mesh):
            yield "cut", {_VOCABULARY: "pipeline"}

    # ------------------------------------------------------------------------------------------ memory

    @cached_property
    def _memory(self) -> ConfigValues:
        if "memory" not in self.axes:
            return {}
        limit = self.config.planner.memory_limit or PLANNED_LIMIT
        return {
            "activation_checkpoint.mode": "none",
            "planner.search.memory": True,
            "planner.memory_limit": limit,
            "planner.search.activation_memory_gib": 0.0,
        }

    def _other_memory(self) -> Iterator[tuple[str, ConfigValues]]:
        for mode in MODES:
            yield "memory", {"activation_checkpoint.mode": mode}

    # ---------------------------------------------------------------------------------------- schedules

    @cached_property
    def _search(self) -> ConfigValues:
        if "schedule" not in self.axes:
            return {}
        return {
            "planner.enable": True,
            "planner.search.interleave": True,
            "planner.search.braid": False,
            "planner.search.eager_forwards": 0,
            "parallelism.pipeline_parallel_schedule": "interleave",
            "parallelism.separate_gradients": False,
        }

    def _other_schedules(self, mesh: JobLayout) -> Iterator[tuple[str, ConfigValues]]:
        if mesh.pp == 1:
            return
        for name in self.schedules:
            for values in self.ordered(name, mesh):
                yield "schedule", values

    def ordered(self, name: str, mesh: JobLayout) -> Iterator[ConfigValues]:
        """The order of a schedule as it is, with memory options that the planner fits: on any cut if it keeps memory
        limits by itself, else on one chain of all modules with the chunks that it is for."""
        order = {
            "parallelism.pipeline_parallel_schedule": name,
            "planner.search.interleave": False,
            "planner.search.regroup": False,
        }
        schedule = schedule_of(name, mesh.pp)
        if "cut" not in self.axes or (schedule.keeps_memory_limits and not schedule.segments):
            yield self._free(order)
            return
        least = max(schedule.least_passes, *schedule.segments.values(), 2 if schedule.placement == "v" else 1)
        may_grow = not schedule.segments and schedule.placement == "loop" and least > 1
        for chunks in (least, 2 * least) if may_grow else (least,):
            chain = {"planner.partition": "mixed-latency", f"{section_of('language')}.num_segments": chunks}
            yield self._free({**self._cut(chain), **order})

    @property
    def tries_recipes(self) -> bool:
        """Whether FlexPipe's types are candidates: for chains of one module."""
        return "schedule" in self.axes and "cut" in self.axes and not self._several

    def _free(self, values: ConfigValues) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in self.fixed}
