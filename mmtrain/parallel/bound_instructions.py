"""The instructions of a program on its rank: the functions of a recipe, and the outputs that they will see."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.errors import PlanError, RecipeError
from mmtrain.parallel.bound_actions import BoundAction
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.recipe.instructions import InstructionFunction, StageView, WorkView
from mmtrain.schedule.recipe.limits import call

Functions = Mapping[tuple[Kind, int], InstructionFunction]
"""The function of each instruction, by kind and stage."""


class Instructions:
    """The instructions of one loaded program. An output is held from its forward to the last instruction that sees
    it."""

    def __init__(self, graph: WorkGraph, functions: Functions) -> None:
        """Args: functions: of all instructions that are bound."""
        self._graph, self._functions = graph, functions
        self._last: dict[tuple[int, int], Action] = {}
        """The last action that sees the output of a (stage, work), where one does."""
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def bind(self, bound: BoundAction, where: str) -> None:
        """Takes an instruction of the program, in its order. Raises: PlanError: it has no function."""
        action = bound.action
        if (action.kind, action.stage) not in self._functions:
            raise PlanError(f"{where}: no function runs {action}; plan without instructions, or load the recipe's")
        if self._sees_output(bound):
            self._last[action.stage, bound.work] = action

    def keep(self, stage: int, work: int, output: Any) -> None:
        """Holds the output of a forward, if an instruction will see it."""
        if (stage, work) in self._last:
            self._outputs[stage, work] = (output if isinstance(output, Tensor) else output.loss_sum).detach()

    def run(self, bound: BoundAction) -> None:
        """Calls the function of an instruction.

        Raises: RecipeError: it raises, or it changes the output; with rank, action, file and line.
        """
        action, graph, stage = bound.action, self._graph, bound.stage
        node = (action.stage, bound.work)
        output = None
        if self._sees_output(bound):
            output = self._outputs.pop(node) if self._last[node] is action else self._outputs[node]
        seen_stage = StageView(
            index=action.stage,
            module=graph.modules[graph.module_of[action.stage]].name,
            chunk=graph.position[action.stage],
            rank=dist.get_rank(),
            pp_rank=graph.stage_rank[action.stage],
            network=stage.submod,
        )
        work = WorkView(microbatch=action.microbatch, sub_microbatch=action.sub_microbatch, output=output)
        where, version = f"rank {seen_stage.rank}, action {action}: the function of {action.kind}", _version(output)
        with torch.no_grad():
            call(where, self._functions[action.kind, action.stage], seen_stage, work)
        if _version(output) != version:
            raise RecipeError(f"{where} changed work.output, which other stages use; let it change a clone")

    def _sees_output(self, bound: BoundAction) -> bool:
        action = bound.action
        given = self._graph.instruction[action.kind, action.stage, bound.work]
        return (Kind.F, action.stage, bound.work) in given.after


def _version(output: Tensor | None) -> int:
    """How often a tensor was changed in place."""
    return 0 if output is None else output._version
