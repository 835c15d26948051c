"""The cost model that a job's config selects. Pure."""

from mmtrain.config.config import Config
from mmtrain.config.device_choices import on_device
from mmtrain.costs.cost_model import CostModel, FlopsCosts
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.operator_costs import OperatorCosts
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.costs.operators.operator_graph import DeviceKind
from mmtrain.costs.profile.profile import Profile
from mmtrain.errors import ConfigError
from mmtrain.modality.submesh import Submesh
from mmtrain.spec.spec import ModelSpec


def on_hardware(config: Config) -> Config:
    """The configuration with what "auto" stands for on what its costs are of: the device of `planner.profile`, else
    `planner.hardware`, if one of them is set.

    Raises: ConfigError: the hardware or the profile does not exist.
    """
    if config.planner.profile:
        low = Profile.read(config.planner.profile).job.get("dtype") == "bfloat16"
        return on_device(config, "cuda" if low else "cpu")
    if not config.planner.hardware:
        return config
    hardware = Cluster.of(config.planner.hardware, config.parallelism.layout.world_size).hardware
    return on_device(config, "cpu" if hardware.compute is DeviceKind.CPU else "cuda")


def cost_model(config: Config, spec: ModelSpec) -> CostModel:
    """The cost model that `[planner]` selects: measured, simulated, or FLOPs over one rate.

    Raises:
        ConfigError: the hardware does not exist or does not fit, the profile belongs to another job, or blocks are
            wanted and no cost says what they hide.
        PlanError: the profile cannot be read.
    """
    costs: CostModel
    if config.planner.profile:
        costs = MeasuredCosts.of(config, spec)
    elif config.planner.hardware:
        costs = OperatorCosts.of(config, spec)
    else:
        costs = FlopsCosts.of(config.planner, shares=Submesh.of(config).size)
    if config.planner.search.braid and costs.contention == 1:
        raise ConfigError(
            "planner.search.braid = true, but the costs do not say what blocks hide: profiles and "
            "planner.device.flops_per_s know no exchanges apart, and hardware with contention = 1 hides none; "
            "set planner.hardware to a GPU, or remove planner.search.braid"
        )
    return costs
