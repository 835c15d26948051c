"""The words of a recipe: what a file with `schedule(P) -> Recipe` is written in.

Source: FlexPipe's scheduling language, sections 4 and 5 (table 2 for the values): stage placement, computation type and
stage traversal priorities, in-flight microbatches, check functions and step functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from mmtrain.errors import RecipeError, nearest, shown
from mmtrain.schedule.action import Action
from mmtrain.schedule.recipe.instructions import Instruction, in_order

First = Literal["backward", "forward", "alternate"]
Order = Literal["breadth", "depth", "oldest"]
Until = Literal["B", "I", "W"]
Clock = Literal["seconds", "lockstep"]
Shape = Literal["one-to-one", "circular", "v"]
NO_LIMIT = 2**31
"""The number in flight on a rank without a limit, and the largest limit."""
MOST_CHUNKS = 1000
"""The most chunks of a module on one rank."""


@dataclass(frozen=True, slots=True)
class Traversal:
    """The order in which a rank visits its stages for the next forward, or for the next backward."""

    order: Order
    """breadth: stages with the front layers first. depth: those with the last layers first. oldest: the oldest
    microbatch first, whatever its stage."""
    every: int = 0
    """The number of actions of one stage that run in a row before the traversal moves on to the next stage (and from
    the last to the first); 0: after each action the traversal begins again."""
    wait: bool = False
    """Whether, with `every`, a stage that has nothing ready is waited for, until it has run all works of the next
    `every` microbatches. Else the next stage that can run has its turn."""

    def __post_init__(self) -> None:
        _word("Traversal.order", self.order, get_args(Order))
        _flag("Traversal.wait", self.wait)
        _integer("Traversal.every", self.every, 0)
        if self.order == "oldest" and self.every:
            raise RecipeError(f'Traversal("oldest", every={self.every}); every goes with breadth and depth')
        if self.wait and not self.every:
            raise RecipeError("Traversal(wait=True) has nothing to wait for; give every too")


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a module's chunks."""

    shape: Shape = "one-to-one"
    """one-to-one: a chunk on each rank. circular: chunk j on rank j mod P. v: down the ranks and back up."""
    chunks: int = 0
    """Chunks of a module on each rank; 0: 1 of one-to-one, 2 of the others."""
    ranks: Sequence[int] = ()
    """The pipeline ranks, in the order of the chunks; empty: all."""

    def __post_init__(self) -> None:
        _word("Placement.shape", self.shape, get_args(Shape))
        _integer("Placement.chunks", self.chunks, 0)
        fixed = {"one-to-one": 1, "v": 2}.get(self.shape)
        if fixed and self.chunks not in (0, fixed):
            raise RecipeError(
                f"Placement({self.shape!r}, chunks={self.chunks}); it has {fixed} on each rank, circular any number"
            )
        if not isinstance(self.ranks, list | tuple | range):
            raise RecipeError(f"Placement.ranks = {shown(self.ranks)}; give a list of pipeline ranks")
        for rank in self.ranks:
            _integer("Placement.ranks", rank, 0)
        if self.passes > MOST_CHUNKS:
            raise RecipeError(f"Placement.chunks = {shown(self.chunks)}; it must be at most {MOST_CHUNKS}")
        if len(set(self.ranks)) < len(self.ranks):
            raise RecipeError(f"Placement.ranks = {list(self.ranks)} names a rank twice; v and circular return to it")

    @property
    def passes(self) -> int:
        """Chunks on each of its ranks."""
        return self.chunks or (1 if self.shape == "one-to-one" else 2)

    def stage_ranks(self, num_ranks: int) -> list[int]:
        """[chunk] -> pipeline rank. Raises: RecipeError: a rank that does not exist."""
        ranks = list(self.ranks) or list(range(num_ranks))
        for rank in ranks:
            if not 0 <= rank < num_ranks:
                raise RecipeError(
                    f"Placement.ranks = {ranks} with {num_ranks} pipeline ranks; use 0 .. {num_ranks - 1}"
                )
        return ranks + ranks[::-1] if self.shape == "v" else ranks * self.passes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a limit may depend on: a rank, or a module on a rank."""

    rank: int
    num_ranks: int
    num_chunks: int
    """Stages with a backward there."""
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a check or a step function sees: one rank that could start something."""

    rank: int
    num_ranks: int
    now: float
    """Seconds or steps since the start, by the recipe's clock."""
    ready: tuple[Action, ...]
    """In a step function, what the rank could start, as inputs are there and limits have room: F, then B or I, oldest
    first, then W, then instructions. Empty in a check function."""
    started: frozenset[Action]
    """The actions that this rank has started."""
    last: Action | None
    """The action that it started last; None: none."""


Limit = int | Sequence[int] | Sequence[Sequence[int]] | Callable[[RankInfo], int]
Check = Callable[[Moment, Action], bool]
Step = Callable[[Moment], Action | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one module or rank does otherwise; None: as the recipe says."""

    first: First | None = None
    units: tuple[int, int] | None = None
    forward: Order | Traversal | None = None
    backward: Order | Traversal | None = None
    in_flight: Limit | None = None
    until: Until | None = None
    split_backward: bool | None = None

    def __post_init__(self) -> None:
        check_rule(self)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A schedule: where stages are, and what a rank starts next.

    Each rank chooses, whenever it is idle, among the forwards and backwards whose inputs have arrived and for which its
    limits have room: first the kind (`first`), then the stage (`forward`, `backward`), then the oldest microbatch.
    """

    placement: Shape | Placement | Mapping[str, Shape | Placement] = "one-to-one"
    """The placement of all modules, or of each module by name. A job cuts its model so; a problem's stages stay where
    they are."""
    first: First = "backward"
    """Kind that is preferred where both could start; alternate: the other one than before."""
    units: tuple[int, int] = (1, 1)
    """How many forwards, and backwards, a rank runs in a row before it chooses the kind anew."""
    forward: Order | Traversal = "breadth"
    """The order of stages for the next forward."""
    backward: Order | Traversal = "breadth"
    """The order of stages for the next backward."""
    in_flight: Limit | None = None
    """How many (microbatch, stage) pairs of one module a rank may have between the start of F and the end of `until`:
    of all ranks, [rank], [rank][its stages, front layers first], or a function of a `RankInfo`. None: no limit. Numbers
    of ranks are for a model of one module: where a rank trains several, each has P more for every trained stage of the
    rank beyond those of its placement. One microbatch always has room, and a forward starts only if all microbatches in
    flight can still run to their end, oldest first."""
    until: Until = "B"
    """The pass after which a pair is not in flight any more. I: its input-gradient pass. B, W: the whole backward, also
    a split one."""
    split_backward: bool = False
    """Backwards are I and W where both take time; Ws run, oldest first, when a rank can start nothing else."""
    memory: bool = False
    """Admit forwards by the problem's memory limits too."""
    separate_gradients: bool = False
    """Split backwards afterwards where that fills bubbles: `passes.separate`."""
    overrides: Mapping[str | int, Rule] = field(default_factory=dict)
    """Module name or rank -> what it does otherwise. `in_flight` of a module counts its own pairs on each rank."""
    check: Check | None = None
    """A function (moment, action) -> whether it may start now. It is not asked for instructions."""
    step: Step | None = None
    """A function of a moment: which of `moment.ready` starts, or None; in place of `first`, `forward` and
    `backward`."""
    instructions: Sequence[Instruction] = ()
    """Functions that ranks call between the actions of a training step; a rank starts one as soon as it can."""
    clock: Clock = "seconds"
    """The clock by which choices are made. seconds: modelled times and transfers. lockstep: every action takes one
    step, transfers none."""
    idea: str = ""
    """A short description for lists."""

    def __post_init__(self) -> None:
        for name in ("first", "units", "forward", "backward", "until", "split_backward"):
            if getattr(self, name) is None:
                raise RecipeError(f"Recipe.{name} = None; leave it out")
        check_rule(self)
        _word("Recipe.clock", self.clock, get_args(Clock))
        for name in ("memory", "separate_gradients"):
            _flag(f"Recipe.{name}", getattr(self, name))
        if not isinstance(self.idea, str):
            raise RecipeError(f"Recipe.idea = {shown(self.idea)}; it must be a text")
        if not isinstance(self.overrides, Mapping):
            raise RecipeError(f"Recipe.overrides = {shown(self.overrides)}; map modules and ranks to a Rule")
        for key, rule in self.overrides.items():
            named = isinstance(key, str) and key
            if not (named or (isinstance(key, int) and not isinstance(key, bool))) or not isinstance(rule, Rule):
                raise RecipeError(f"Recipe.overrides[{shown(key)}] = {shown(rule)}; map a module or a rank to a Rule")
        for name in ("check", "step"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise RecipeError(f"Recipe.{name} = {shown(getattr(self, name))}; it must be a function, or left out")
        if not isinstance(self.instructions, list | tuple) or any(
            not isinstance(one, Instruction) for one in self.instructions
        ):
            raise RecipeError(f"Recipe.instructions = {shown(self.instructions)}; give a list of Instruction(...)")
        in_order(self.instructions)
        for module, placement in self.placements.items():
            if not isinstance(module, str) or not isinstance(placement, str | Placement):
                raise RecipeError(f"Recipe.placement = {shown(placement)}; write a word or a Placement")
            if isinstance(placement, str):
                _word("Recipe.placement", placement, get_args(Shape))

    @property
    def placements(self) -> Mapping[str, Shape | Placement]:
        """Module -> placement; "" stands for all that are not named."""
        return self.placement if isinstance(self.placement, Mapping) else {"": self.placement}

    def placement_of(self, module: str) -> Placement:
        """The placement of a module."""
        given = self.placements.get(module, self.placements.get("", "one-to-one"))
        return Placement(given) if isinstance(given, str) else given

    def rule(self, *keys: str | int) -> "Recipe":
        """The recipe with the overrides of modules and ranks; of two that set one word, the later key's counts."""
        changed = {
            f.name: value
            for key in keys
            if key in self.overrides
            for f in fields(Rule)
            if (value := getattr(self.overrides[key], f.name)) is not None
        }
        return replace(self, **changed) if changed else self


def traversal(given: Order | Traversal) -> Traversal:
    """The traversal of a word."""
    return Traversal(given) if isinstance(given, str) else given


def check_rule(rule: Rule | Recipe) -> None:
    """Checks the values that a recipe and an override share. Raises: RecipeError: which, its value, the rule."""
    where = type(rule).__name__
    for name, words in (("first", First), ("until", Until)):
        if getattr(rule, name) is not None:
            _word(f"{where}.{name}", getattr(rule, name), get_args(words))
    for name in ("forward", "backward"):
        given = getattr(rule, name)
        if given is not None and not isinstance(given, Traversal):
            _word(f"{where}.{name}", given, get_args(Order))
    if rule.units is not None:
        if not isinstance(rule.units, Sequence) or len(rule.units) != 2:
            raise RecipeError(f"{where}.units = {shown(rule.units)}; give two numbers, of forwards and of backwards")
        for unit in rule.units:
            _integer(f"{where}.units", unit, 1)
    if rule.split_backward is not None:
        _flag(f"{where}.split_backward", rule.split_backward)
    if rule.in_flight is not None and not callable(rule.in_flight):
        for entry in rule.in_flight if isinstance(rule.in_flight, list | tuple) else [rule.in_flight]:
            for number in entry if isinstance(entry, list | tuple) else [entry]:
                _integer(f"{where}.in_flight", number, 1)


def _integer(where: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= NO_LIMIT:
        raise RecipeError(f"{where} = {shown(value)}; it must be a whole number of at least {least}")


def _flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RecipeError(f"{where} = {shown(value)}; it must be True or False")


def _word(where: str, value: Any, words: Sequence[str]) -> None:
    if value not in words:
        near = nearest(str(value), words)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"{where} = {shown(value)}; choose one of {', '.join(map(repr, words))}{hint}")
