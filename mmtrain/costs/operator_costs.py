"""Costs from operator graphs on a hardware profile, for machines without measurements. Pure."""

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mmtrain.config.config import Config
from mmtrain.config.model import projector_name
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import HostCopy, LayerTimes, equal_layers
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.execution import makespan_s
from mmtrain.costs.operators.latency import Floats, Latencies, LatencyRule
from mmtrain.costs.operators.layer_builder import LinkedDivision
from mmtrain.costs.operators.layers import LayerDescriber, divides_layer
from mmtrain.costs.operators.operator_graph import DeviceKind, Graph, OpKind, Phase
from mmtrain.costs.overheads import Overheads
from mmtrain.errors import ConfigError
from mmtrain.families.shapes import LanguageShape
from mmtrain.modality.catalogue import division_of
from mmtrain.modality.submesh import Submesh
from mmtrain.schedule.problem import P2P
from mmtrain.spec.builders import DTYPE_BYTES
from mmtrain.spec.linears import adapted_linears
from mmtrain.spec.module_sizes import ModuleShape, projection_of, shape_of
from mmtrain.spec.recomputation import ATTENTION, PRODUCTS, Recomputation
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize

OPTIMIZER_BYTES = 7 * 4
"""AdamW reads parameter, gradient and two moments, and writes all but the gradient, in float32."""

_REMEMBERED = 1 << 16


class OperatorCosts:
    """Seconds of layers, simulated as graphs of operators on one kind of accelerator: a `CostModel`.

    A layer's seconds are those of its operators on one rank of the submesh; collectives are exposed, and the part of
    them that other compute may hide is known. F, I and W are simulated separately, because the schedule may run them
    separately. Each kind of layer is described once, and simulated once for each size.
    """

    def __init__(
        self,
        spec: ModelSpec,
        describers: Mapping[str, LayerDescriber],
        latencies: Mapping[str, Latencies],
        p2p: P2P,
        host_copy: HostCopy,
        noise: Noise = EXACT,
        free: Set[OpKind] = frozenset(),
        hides: bool = True,
    ) -> None:
        """Args:
        describers: module -> what makes the graphs of its layers.
        latencies: module -> seconds of its operators, on the links that its division uses.
        p2p: latency and rate of transfers between pipeline ranks.
        host_copy: rate of copies between an accelerator and its host.
        noise: how far actual seconds lie from these.
        free: kinds of operators that take no time.
        hides: the runtime lets other compute run during exchanges of tensor parallelism.
        """
        self._spec, self._free, self._hides = spec, free, hides
        self._p2p, self._host_copy, self._noise = p2p, host_copy, noise
        self._describers, self._latencies = describers, latencies
        self._hardware = next(iter(latencies.values())).hardware
        self._kinds = {module.name: equal_layers(module) for module in spec.modules}
        self._layers = {module.name: module.layers for module in spec.modules}
        self._graphs: dict[tuple[str, int, bool], _Phases] = {}
        self._times = lru_cache(maxsize=_REMEMBERED)(self._simulate)
        self._repeats = lru_cache(maxsize=_REMEMBERED)(self._simulate_repeated)

    @classmethod
    def of(
        cls, config: Config, spec: ModelSpec, cluster: Cluster | None = None, rule: LatencyRule | None = None
    ) -> "OperatorCosts":
        """The costs of a job on a cluster, by default the one that `planner.hardware` names.

        Args: rule: overrides the seconds of an operator.
        Raises: ConfigError: the hardware does not exist, or tensor parallelism spans several nodes.
        """
        shape = config.parallelism.layout
        if cluster is None:
            cluster = Cluster.of(config.planner.hardware, shape.world_size)
        submesh = Submesh.of(config)
        if submesh.tp > cluster.hardware.gpus_per_node:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {submesh.tp}, but a node of {cluster.hardware.name} has "
                f"{cluster.hardware.gpus_per_node} accelerators; tensor parallelism stays inside of a node, lower it"
            )
        dtype_bytes = DTYPE_BYTES[config.training.param_dtype]
        divisions = {module.name: linked_division(submesh, cluster, module) for module in spec.modules}
        return cls(
            spec,
            {
                module.name: describer(config, module, divisions[module.name], dtype_bytes, cluster.hardware.compute)
                for module in spec.modules
            },
            {name: Latencies(cluster.hardware, dtype_bytes=dtype_bytes, rule=rule) for name in divisions},
            p2p_between_stages(cluster, shape),
            host_copy_of(cluster),
            Noise.uniform(config.planner.search.noise),
            hides=config.parallelism.fsdp_reshard_after_forward == "step",
        )

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer's operators."""
        return self._times(module.name, self._kinds[module.name][index], size, input_grad)

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the forward's operators without those whose results were saved; collectives are repeated.

        As in torch, it ends with the last tensor that the backward reads, before the last product of most blocks.
        """
        return self._repeated(module, index, size, recomputation)[0]

    def repeated_exchange_s(
        self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation
    ) -> float:
        """The part of `repeated_s` that is exchanges of tensor parallelism."""
        return self._repeated(module, index, size, recomputation)[1]

    def _repeated(
        self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation
    ) -> tuple[float, float]:
        layer = module.layers[index]
        if not recomputation.recomputes(layer):
            return 0.0, 0.0
        saved = (recomputation.saves(PRODUCTS), recomputation.saves(ATTENTION))
        return self._repeats(module.name, self._kinds[module.name][index], size, *saved)

    @property
    def contention(self) -> float:
        """The contention of the hardware; 1 where the runtime hides no exchange."""
        return self._hardware.contention if self._hides else 1.0

    @property
    def overheads(self) -> Overheads:
        """The overheads of the hardware, mostly none: the fixed time of each operator is part of its layer."""
        return self._hardware.overheads

    @property
    def noise(self) -> Noise:
        """The noise of `planner.search.noise`, of each action on its own."""
        return self._noise

    @property
    def p2p(self) -> P2P:
        """Latency and rate between the two pipeline ranks that are furthest apart."""
        return self._p2p

    @property
    def host_copy(self) -> HostCopy:
        """Rate of copies over PCIe, which run during compute."""
        return self._host_copy

    def step_s(self, num_params: int) -> float:
        """Seconds of reading and writing AdamW's state once, at the memory rate of elementwise kernels."""
        efficiency = self._hardware.efficiency_of(OpKind.ELEMENTWISE, Phase.FORWARD).memory
        return num_params * OPTIMIZER_BYTES / (self._hardware.memory_bytes_per_s * efficiency)

    def without(self, kinds: Set[OpKind]) -> "OperatorCosts":
        """The costs if operators of some kinds took no time."""
        free = self._free | kinds
        links = self._p2p, self._host_copy
        return OperatorCosts(self._spec, self._describers, self._latencies, *links, self._noise, free, self._hides)

    def without_exchanges(self) -> "OperatorCosts":
        """The costs if collectives took no time."""
        return self.without({kind for kind in OpKind if kind.is_collective})

    def graph(self, module: ModuleSpec, index: int, *, input_grad: bool) -> Graph:
        """The operators of a layer, forward and backward."""
        return self._phases(module.name, self._kinds[module.name][index], input_grad).whole

    def _phases(self, module: str, kind: int, input_grad: bool) -> "_Phases":
        key = (module, kind, input_grad)
        if key not in self._graphs:
            layer = self._layers[module][kind]
            self._graphs[key] = _Phases(self._describers[module].graph(layer, input_grad=input_grad), self._free)
        return self._graphs[key]

    def _simulate(self, module: str, kind: int, size: WorkSize, input_grad: bool) -> LayerTimes:
        phases = self._phases(module, kind, input_grad)
        seconds = self._latencies[module](phases.whole, size) * phases.counts
        forward, backward, weight = (
            phases.with_exchanges_s(graph, seconds[indices], indices) for graph, indices in phases.parts
        )
        return LayerTimes(
            forward_s=forward[0],
            backward_input_s=backward[0],
            backward_weight_s=weight[0],
            forward_exchange_s=forward[1],
            backward_exchange_s=backward[1],
        )

    def _simulate_repeated(
        self, module: str, kind: int, size: WorkSize, keeps_products: bool, keeps_attention: bool
    ) -> tuple[float, float]:
        phases = self._phases(module, kind, True)
        graph, indices = phases.parts[0]
        keeps = {OpKind.MATMUL: keeps_products, OpKind.ATTENTION: keeps_attention}
        runs = phases.repeats & np.array([not keeps.get(op.kind, False) for op in graph.operators])
        seconds = self._latencies[module](phases.whole, size) * phases.counts
        return phases.with_exchanges_s(graph, seconds[indices] * runs, indices)


class _Phases:
    """A layer's operators, and those of each phase with their indices among all."""

    def __init__(self, whole: Graph, free: Set[OpKind]) -> None:
        self.whole = whole
        self.counts = np.array([op.kind not in free for op in whole.operators])
        """[operator]: whether its seconds count."""
        self.computes = np.array([not divides_layer(op) for op in whole.operators])
        """[operator]: whether it is no exchange of tensor parallelism."""
        self.parts = [
            (whole.only(phase), np.flatnonzero([op.phase is phase for op in whole.operators])) for phase in Phase
        ]
        read = {tensor for op in whole.operators if op.phase is not Phase.FORWARD for tensor in op.inputs}
        forward = [op for op in whole.operators if op.phase is Phase.FORWARD]
        needed = np.array([not read.isdisjoint(op.outputs) for op in forward])
        self.repeats = np.logical_or.accumulate(needed[::-1])[::-1]
        """[forward operator]: whether a tensor that the backward reads is made by it or later."""

    def with_exchanges_s(self, graph: Graph, seconds: Floats, indices: NDArray[np.intp]) -> tuple[float, float]:
        """Seconds of a phase, and by how much exchanges of tensor parallelism prolong it.

        Args: seconds: of the phase's operators. indices: of these among all.
        """
        whole_s, computes = makespan_s(graph, seconds), self.computes[indices]
        return whole_s, 0.0 if computes.all() else whole_s - makespan_s(graph, seconds * computes)


def linked_division(submesh: Submesh, cluster: Cluster, module: ModuleSpec) -> LinkedDivision:
    """The division of a module over the ranks of a submesh of a cluster, with the links that they use."""
    division = division_of(submesh, module)
    return LinkedDivision(
        tp=division.tp,
        whole_rows=division.whole_rows,
        groups=division.groups,
        key_groups=division.key_groups,
        tp_link=cluster.device(range(division.tp)),
        group_link=cluster.device(range(0, submesh.size, submesh.tp)),
        head_groups=submesh.head_groups if division.key_groups > 1 else 1,
    )


def describer(
    config: Config, module: ModuleSpec, divided: LinkedDivision, dtype_bytes: int, compute: DeviceKind
) -> LayerDescriber:
    """The describer of the layers of a module of a job."""
    model, name = config.model, module.section
    return LayerDescriber(
        shape=_own_part(shape_of(model, name), module),
        division=divided,
        dtype_bytes=dtype_bytes,
        compute=compute,
        adapted=adapted_linears(model, name),
        adapted_projector=adapted_linears(model, projector_name(name)) if name in model.encoders else (),
        lora=model.lora,
        projection=projection_of(model, name if name in model.encoders else next(iter(model.encoders), "")),
        is_part=name != module.name,
        num_parts=len({*module.after} - {*model.encoders}),
    )


def _own_part(shape: ModuleShape, module: ModuleSpec) -> ModuleShape:
    """The sizes of a part of a vocabulary, if the module is one: those of a model that knows its tokens alone."""
    rows = module.vocabulary
    return replace(shape, vocab_size=rows.last - rows.first) if rows and isinstance(shape, LanguageShape) else shape


def p2p_between_stages(cluster: Cluster, shape: JobLayout) -> P2P:
    """Latency and rate of a transfer between pipeline ranks of one pipeline, whose stages are consecutive.

    Transfers use NVLink if one node holds all pipeline ranks, else one network card.
    """
    device = cluster.device(range(0, shape.pp * shape.stage_size, shape.stage_size))
    link = cluster.hardware.links[device]
    efficiency = cluster.hardware.efficiency_of(OpKind.P2P, Phase.FORWARD).network
    return P2P(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s * efficiency)


def host_copy_of(cluster: Cluster) -> HostCopy:
    """Rate of copies between an accelerator and its host; a CPU has no copy engine, so copies delay its compute."""
    hardware = cluster.hardware
    efficiency = hardware.efficiency_of(OpKind.HOST_COPY, Phase.FORWARD).network
    rate = hardware.links[DeviceKind.PCIE].bytes_per_s * efficiency
    return HostCopy(bytes_per_s=rate, overlaps=hardware.compute is not DeviceKind.CPU)
