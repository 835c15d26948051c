"""The cost model that a job's config selects. Pure."""

from mmtrain.config.config import Config
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.costs.cost_model import CostModel, FlopsCosts
from mmtrain.planner.costs.measured_costs import MeasuredCosts
from mmtrain.planner.costs.operator_costs import OperatorCosts
from mmtrain.spec.spec import ModelSpec


def cost_model(config: Config, spec: ModelSpec) -> CostModel:
    """The cost model that `[planner]` selects: measured, simulated, or FLOPs over one rate.

    Raises:
        ConfigError: the hardware does not exist or does not fit, or the profile belongs to another job.
        PlanError: the profile cannot be read.
    """
    if config.planner.profile:
        return MeasuredCosts.of(config, spec)
    if config.planner.hardware:
        return OperatorCosts.of(config, spec)
    return FlopsCosts.of(config.planner, shares=Submesh.of(config).size)
