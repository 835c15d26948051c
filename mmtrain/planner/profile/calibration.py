"""How far a hardware profile is from a machine, and the efficiencies that bring it there. Pure.

What an operator takes, its launches apart, is scaled by one factor for each kind of operator (a of DIP,
arXiv:2504.14145, section 6.1; the same for its arithmetic and its memory accesses), and the fixed part of a launch by
another. The factors are those with the least squared relative errors over all measured layers, phases and sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mmtrain.config.config import Config
from mmtrain.planner.costs.operator_costs import OperatorCosts
from mmtrain.planner.operators.cluster import Cluster
from mmtrain.planner.operators.graph import OpKind, Phase
from mmtrain.planner.operators.hardware import Hardware, load_hardware
from mmtrain.planner.operators.latency import Latencies
from mmtrain.planner.profile.fits import Array, non_negative_least_squares
from mmtrain.planner.profile.profile import LayerProfile, Profile
from mmtrain.spec.spec import ModelSpec, ModuleSpec

LAUNCH = "launch"
"""The name of the factor of fixed parts, beside those of kinds of operators."""

_PHASES = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT),
    "backward_input": (Phase.BACKWARD_INPUT,),
    "backward_weight": (Phase.BACKWARD_WEIGHT,),
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A hardware profile against a machine."""

    hardware: Hardware
    factors: Mapping[str, float]
    """Kind of operator, or `launch` -> measured over simulated seconds."""
    error_before: float
    """Mean relative error of a layer's seconds by the hardware profile as it is."""
    error: float
    """The same with the factors."""

    def to_toml(self) -> str:
        """A hardware profile with the factors in it, for `planner.hardware`.

        Where a kind is faster than its peak rate allows, it gets the peak: the profile's rates are then too low.
        """
        lines = [f'extends = "{self.hardware.name}"']
        if LAUNCH in self.factors:
            lines.append(f"launch_s = {self.hardware.launch_s * self.factors[LAUNCH]:.4g}")
        for kind in OpKind:
            if kind.value not in self.factors:
                continue
            reached = self.hardware.efficiency_of(kind, Phase.FORWARD)
            lines += ["", f"[efficiency.{kind}]"]
            for name in ("compute", "memory"):
                value = min(1.0, getattr(reached, name) / self.factors[kind.value])
                lines.append(f"{name} = {value:.4g}")
            for phase in Phase:
                own = self.hardware.efficiency.get(f"{kind}.{phase}")
                if own is not None and own != reached:
                    parts = {n: min(1.0, getattr(own, n) / self.factors[kind.value]) for n in ("compute", "memory")}
                    lines += [f"[efficiency.{kind}.{phase}]", *(f"{n} = {v:.4g}" for n, v in parts.items())]
        return "\n".join(lines) + "\n"


def calibrate(profile: Profile, config: Config, spec: ModelSpec, hardware: str) -> Calibration:
    """The factors that make a hardware profile agree with what was measured of a job's layers.

    Recomputed blocks are left out of backwards, which then repeat forwards.

    Args: hardware: a name, as `h200`, or a TOML file.
    Raises: ConfigError: there is no such hardware. PlanError: the profile is of other layers.
    """
    found = load_hardware(hardware)
    costs = OperatorCosts.of(config, spec, Cluster.of(hardware, config.parallelism.mesh_shape.world_size))
    dtype_bytes = 2 if config.training.mixed_precision_param == "bfloat16" else 4
    rows, seconds = [], []
    for module, index, layer in _layers(profile, spec):
        graph = costs.graph(module, index, input_grad=layer.input_grad)
        parts = _Parts(graph_kinds=[op.kind for op in graph.operators], phases=[op.phase for op in graph.operators])
        latencies = Latencies(found, dtype_bytes=dtype_bytes)
        fixed = np.array([op.launches * (found.launch_s if op.device.kind.computes else 0.0) for op in graph.operators])
        each_clip = np.array([op.each_clip for op in graph.operators])
        computes = np.array([op.device.kind.computes for op in graph.operators])
        repeats = profile.recomputation.recomputes(module.layers[index])
        for name, phases in _PHASES.items():
            if repeats and name.startswith("backward"):
                continue
            for size, measured in layer.points.get(name, ()):
                launches_s = fixed * np.where(each_clip, max(1, size.clips), 1)
                row = parts.row(phases, latencies(graph, size) * computes, launches_s * computes)
                if measured > 0 and row.any():
                    rows.append(row)
                    seconds.append(measured)
    table, wanted = np.array(rows), np.array(seconds)
    factors = non_negative_least_squares(table / wanted[:, None], np.ones(len(wanted)))
    names = [*_KINDS, LAUNCH]
    return Calibration(
        hardware=found,
        factors={name: float(a) for name, a in zip(names, factors, strict=True) if a > 0},
        error_before=float(np.abs(table.sum(axis=1) / wanted - 1).mean()),
        error=float(np.abs(table @ factors / wanted - 1).mean()),
    )


_KINDS = (
    OpKind.MATMUL,
    OpKind.ATTENTION,
    OpKind.CONVOLUTION,
    OpKind.NORM,
    OpKind.ELEMENTWISE,
    OpKind.EMBEDDING,
    OpKind.CROSS_ENTROPY,
)
"""Kinds that compute."""


@dataclass(frozen=True)
class _Parts:
    """Which kind and phase each operator of a graph has."""

    graph_kinds: list[OpKind]
    phases: list[Phase]

    def row(self, wanted: tuple[Phase, ...], seconds: Array, fixed: Array) -> Array:
        """[kinds + 1]: seconds of each kind in some phases without their launches, then those of all launches."""
        mine = np.array([phase in wanted for phase in self.phases])
        kinds = [np.array([kind is other for other in self.graph_kinds]) & mine for kind in _KINDS]
        own = seconds - fixed
        return np.array([*(float(own[kind].sum()) for kind in kinds), float(fixed[mine].sum())])


def _layers(profile: Profile, spec: ModelSpec) -> Iterator[tuple[ModuleSpec, int, LayerProfile]]:
    """Each kind of layer once, with the first of it."""
    seen: set[int] = set()
    for module in spec.modules:
        for index, layer in enumerate(module.layers):
            found = profile.layer(module.name, layer)
            if id(found) not in seen:
                seen.add(id(found))
                yield module, index, found
