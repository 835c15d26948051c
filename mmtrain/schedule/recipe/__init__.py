"""Recipes: a schedule in a few lines. A recipe's file imports its words from here."""

from mmtrain.schedule.recipe.instructions import Instruction, StageView, WorkView
from mmtrain.schedule.recipe.language import Moment, Placement, RankInfo, Recipe, Rule, Traversal

__all__ = [
    "Instruction",
    "Moment",
    "Placement",
    "RankInfo",
    "Recipe",
    "Rule",
    "StageView",
    "Traversal",
    "WorkView",
]
