"""The error of a hardware profile on a machine, and the efficiencies that minimise it. Pure.

The seconds of an operator without its launches are scaled by one factor for each kind of operator (a of DIP,
arXiv:2504.14145, section 6.1; the same for its arithmetic and its memory accesses), and the fixed part of a launch by
another factor. The factors minimise the squared relative errors over all measured layers, phases and sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mmtrain.config.config import Config
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.hardware import Hardware, load_hardware
from mmtrain.costs.operators.latency import Latencies
from mmtrain.costs.operators.operator_graph import Graph, OpKind, Phase
from mmtrain.costs.profile.fits import Floats, non_negative_least_squares
from mmtrain.costs.profile.profile import LayerProfile, Profile
from mmtrain.spec.builders import DTYPE_BYTES
from mmtrain.spec.spec import ModelSpec, ModuleSpec

LAUNCH = "launch"
"""The key of the factor of launches among the factors of kinds of operators."""

_PHASES = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT),
    "backward_input": (Phase.BACKWARD_INPUT,),
    "backward_weight": (Phase.BACKWARD_WEIGHT,),
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A hardware profile compared with a machine."""

    hardware: Hardware
    factors: Mapping[str, float]
    """Kind of operator, or `launch` -> measured over simulated seconds."""
    error_before: float
    """Mean relative error of a layer's seconds with the unchanged hardware profile."""
    error: float
    """The same with the factors."""

    def to_toml(self) -> str:
        """The hardware profile with the factors applied, as TOML for `planner.hardware`.

        A kind that is faster than its peak rate gets an efficiency of 1: the profile's rates are then too low.
        """
        lines = [f'extends = "{self.hardware.name}"']
        if LAUNCH in self.factors:
            lines.append(f"launch_s = {self.hardware.launch_s * self.factors[LAUNCH]:.4g}")
        for kind in OpKind:
            if kind.value not in self.factors:
                continue
            efficiency = self.hardware.efficiency_of(kind, Phase.FORWARD)
            lines += ["", f"[efficiency.{kind}]"]
            for name in ("compute", "memory"):
                value = min(1.0, getattr(efficiency, name) / self.factors[kind.value])
                lines.append(f"{name} = {value:.4g}")
            for phase in Phase:
                of_phase = self.hardware.efficiency.get(f"{kind}.{phase}")
                if of_phase is not None and of_phase != efficiency:
                    scaled = {
                        n: min(1.0, getattr(of_phase, n) / self.factors[kind.value]) for n in ("compute", "memory")
                    }
                    lines += [f"[efficiency.{kind}.{phase}]", *(f"{n} = {v:.4g}" for n, v in scaled.items())]
        return "\n".join(lines) + "\n"


def calibrate(profile: Profile, config: Config, spec: ModelSpec, hardware: str) -> Calibration:
    """The factors by which a hardware profile agrees best with the measured layers of a job.

    Backwards of recomputed blocks are left out, because they repeat forwards.

    Args: hardware: a name, as `h200`, or a TOML file.
    Raises:
        ConfigError: the hardware does not exist.
        PlanError: the profile has no measurement of one of the layers.
    Source: DIP, arXiv:2504.14145, section 6.1.
    """
    profiled = load_hardware(hardware)
    costs = OperatorCosts.of(config, spec, Cluster.of(hardware, config.parallelism.layout.world_size))
    dtype_bytes = DTYPE_BYTES[config.training.param_dtype]
    rows, seconds = [], []
    for module, index, layer in _layers(profile, spec):
        graph = costs.graph(module, index, input_grad=layer.input_grad)
        latencies = Latencies(profiled, dtype_bytes=dtype_bytes)
        computes = np.array([op.device.kind.computes for op in graph.operators])
        fixed = np.array([op.launches * profiled.launch_s for op in graph.operators]) * computes
        each_call = np.array([op.each_call for op in graph.operators])
        repeats = profile.recomputation.recomputes(module.layers[index])
        for name, phases in _PHASES.items():
            if repeats and name.startswith("backward"):
                continue
            for size, measured in layer.points.get(name, ()):
                launches_s = fixed * np.where(each_call, max(1, size.calls), 1)
                row = _seconds_by_kind(graph, phases, latencies(graph, size) * computes, launches_s)
                if measured > 0 and row.any():
                    rows.append(row)
                    seconds.append(measured)
    table, measured_s = np.array(rows), np.array(seconds)
    factors = non_negative_least_squares(table / measured_s[:, None], np.ones(len(measured_s)))
    names = [*_KINDS, LAUNCH]
    return Calibration(
        hardware=profiled,
        factors={name: float(a) for name, a in zip(names, factors, strict=True) if a > 0},
        error_before=float(np.abs(table.sum(axis=1) / measured_s - 1).mean()),
        error=float(np.abs(table @ factors / measured_s - 1).mean()),
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


def _seconds_by_kind(graph: Graph, phases: tuple[Phase, ...], seconds: Floats, launches_s: Floats) -> Floats:
    """[kinds + 1]: seconds in some phases, by kind of operator and without launches, then those of all launches.

    Args: seconds, launches_s: [operators] seconds of each, launches included, and of its launches.
    """
    in_phases = np.array([op.phase in phases for op in graph.operators])
    of_kinds = [np.array([op.kind is kind for op in graph.operators]) & in_phases for kind in _KINDS]
    return np.array(
        [*(float((seconds - launches_s)[ops].sum()) for ops in of_kinds), float(launches_s[in_phases].sum())]
    )


def _layers(profile: Profile, spec: ModelSpec) -> Iterator[tuple[ModuleSpec, int, LayerProfile]]:
    """The module, layer index and profile of the first layer of each kind."""
    yielded: set[int] = set()
    for module in spec.modules:
        for index, layer in enumerate(module.layers):
            profiled = profile.layer(module.name, layer)
            if id(profiled) not in yielded:
                yielded.add(id(profiled))
                yield module, index, profiled
