"""The cost model that a job's config asks for. Pure."""

from mmtrain.config.config import Config
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.costs.cost_model import CostModel, FlopsCosts
from mmtrain.planner.costs.measured_costs import MeasuredCosts
from mmtrain.planner.costs.operator_costs import OperatorCosts
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModelSpec


def cost_model(config: Config, spec: ModelSpec) -> CostModel:
    """What `[planner]` says that layers and transfers take: as measured, as simulated, or FLOPs over one rate.

    Of a job whose partition is not known yet; see `on_partition`.

    Raises:
        ConfigError: hardware that does not exist or does not fit, or a profile of another job.
        PlanError: a profile that cannot be read.
    """
    if config.planner.profile:
        return MeasuredCosts.of(config, spec)
    if config.planner.hardware:
        return OperatorCosts.of(config, spec)
    return FlopsCosts.of(config.planner, shares=Submesh.of(config).size)


def on_partition(costs: CostModel, parts: Partition) -> CostModel:
    """The costs with what depends on the partition: the transfers that an action posts, where that was measured."""
    return costs.on(parts) if isinstance(costs, MeasuredCosts) else costs
