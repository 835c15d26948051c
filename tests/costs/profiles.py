"""Profiles of machines that do not exist: their seconds come from another cost model."""

from collections.abc import Iterable

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.noise import Noise
from mmtrain.costs.overheads import Overheads
from mmtrain.costs.profile.profile import HELD, LayerProfile, Profile, StepProfile, TransferProfile, job_of, role
from mmtrain.costs.sub_microbatch import Curve
from mmtrain.modality.probes import probing_iteration
from mmtrain.planner.batching import make_batching
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize

MACHINE = {
    "date": "2026-01-01", "processor": "none", "device": "cpu", "cores": 2, "threads": 1, "copies": 2, "load": 0.0,
    "torch": "0", "python": "3",
}  # fmt: skip

OVERHEADS = Overheads(
    forward_s=1e-3,
    backward_s=2e-3,
    backward_input_s=3e-3,
    backward_weight_s=4e-3,
    send_s=5e-3,
    receive_s=6e-3,
    message_s=7e-3,
)


def profile_of(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    *,
    recomputation: Recomputation = Recomputation(),  # noqa: B008
    transfer: TransferProfile | None = None,
    split_factors: tuple[float, float] = (1.0, 1.0),
) -> Profile:
    """What would be measured if layers took as long as another cost model says.

    Args: split_factors: of F and of I, where backwards are split.
    """
    sizes = _sizes(config, spec)
    layers = {}
    for module in spec.modules:
        grad = spec.grad_enters(module.name)
        for index, layer in enumerate(module.layers):
            points: dict[str, list[tuple[WorkSize, float]]] = {}
            for size in sizes[module.name]:
                times = costs.layer(module, index, size, input_grad=grad)
                repeated = costs.repeated_s(module, index, size, recomputation)
                inside = times.backward_input_s + (repeated if grad or layer.trainable else 0.0)
                for name, amount in {
                    "forward": times.forward_s,
                    "split_forward": split_factors[0] * times.forward_s,
                    "backward": inside + times.backward_weight_s,
                    "backward_input": split_factors[1] * inside,
                    "backward_weight": times.backward_weight_s,
                    HELD: layer.activation_bytes(size),
                }.items():
                    points.setdefault(name, []).append((size, amount))
            frozen = {name: tuple(of) for name, of in points.items()}
            if (module.name, role(layer)) not in layers or layer.is_block:  # the last block, as what is measured
                layers[module.name, role(layer)] = LayerProfile.fitted(module.name, layer, grad, frozen)
            grad = grad or layer.trainable
    return Profile(
        machine=MACHINE,
        job=job_of(config),
        recomputation=recomputation,
        layers=tuple(layers.values()),
        overheads=OVERHEADS,
        noise=Noise(forward=0.03, backward=0.05, backward_weight=0.04, shared=0.25),
        step=StepProfile(fixed_s=0.5, param_s=1e-9, pipeline_s=0.25),
        transfer=transfer,
        curve=Curve(patches=64, seconds=((1, 2.0), (2, 3.0), (4, 4.1))),
    )


def _sizes(config: Config, spec: ModelSpec) -> dict[str, list[WorkSize]]:
    batching = make_batching(probing_iteration(config), spec)
    found: dict[str, list[WorkSize]] = {name: [] for name in batching.modules}
    works: Iterable = zip(batching.works, batching.sizes, strict=True)
    for work, size in works:
        found[batching.modules[work.module]].append(size)
    return found
