"""Instructions of a recipe: functions of the user's that ranks call during a step, between the actions of a plan.

An instruction is local to the rank of its chunk, and no other rank waits for it. What needs other ranks is a module
with edges. A planning problem has one `graph.Instruction` for each work in which it runs; the runtime calls its
function where the program has that action.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.errors import RecipeError, shown
from mmtrain.schedule.action import BRAID, KINDS, Kind
from mmtrain.schedule.graph import InstructionNode as PlannedInstruction
from mmtrain.schedule.graph import ModuleStages, WorkGraph, linear_extension
from mmtrain.schedule.items import Result
from mmtrain.schedule.number_ranges import SECONDS

RESULTS = (Kind.F, Kind.B)
"""The results of its own stage and work that an instruction may name; B is the gradient of the stage's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """The stage of an instruction, as its function sees it."""

    index: int
    """The index of the stage over all modules."""
    module: str
    chunk: int
    """The chunk of the module, counted from the front."""
    rank: int
    """The global rank in the job; each rank that shares the stage (dp, cp, tp) calls the function with its own
    tensors."""
    pp_rank: int
    network: Any
    """The `torch.nn.Module` of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkView:
    """The work of an instruction, as its function sees it."""

    microbatch: int
    sub_microbatch: int
    output: Any
    """What the stage's forward made for it, a detached tensor that must not be changed; of a module's last stage that
    makes the loss, the sum of the loss. None: `after` does not name F."""


InstructionFunction = Callable[[StageView, WorkView], object]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A function that the rank of a chunk calls in training steps, for each work of every K-th microbatch."""

    name: str
    """A word of capital letters, which plans and drawings show."""
    module: str
    chunk: int
    """The chunk of the module, counted from the front; below 0: from the end."""
    function: InstructionFunction
    """Called without gradients. What it returns is ignored; if it raises, the job ends."""
    after: str | Sequence[str] = "F"
    """What it waits for: F, B (of its chunk and work) or other instructions of its chunk. It is left out of a work
    without backward if it waits for B."""
    before: str | Sequence[str] = ()
    """What waits for it."""
    every: int = 1
    """K: of the microbatches in which the module has works, each K-th one, the first one being number K - 1."""
    seconds: float = 0.0
    """What plans assume that a call takes."""

    def __post_init__(self) -> None:
        where = f"Instruction({shown(self.name)})"
        if not isinstance(self.name, str):
            raise RecipeError(f"Instruction.name = {shown(self.name)}; it must be a text")
        if self.name in (*KINDS, BRAID):
            raise RecipeError(f"{where}: {self.name} is a kind of action of every plan; choose another name")
        Kind.register(self.name)
        if not isinstance(self.module, str) or not self.module:
            raise RecipeError(f"{where}.module = {shown(self.module)}; name a module of the model")
        for field, least in (("chunk", None), ("every", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                rule = "a whole number" if least is None else f"a whole number of at least {least}"
                raise RecipeError(f"{where}.{field} = {shown(value)}; it must be {rule}")
        if not callable(self.function):
            raise RecipeError(f"{where}.function = {shown(self.function)}; it must be a function of (stage, work)")
        for field in ("after", "before"):
            value = getattr(self, field)
            if not isinstance(value, str | list | tuple) or not all(isinstance(one, str) for one in value):
                raise RecipeError(f"{where}.{field} = {shown(value)}; write F, B or the name of another instruction")
        if not isinstance(self.seconds, int | float) or isinstance(self.seconds, bool):
            raise RecipeError(f"{where}.seconds = {shown(self.seconds)}; it must be a number")
        SECONDS.check(f"{where}.seconds", self.seconds)

    @property
    def kind(self) -> Kind:
        """The kind of its actions."""
        return Kind(self.name)

    def stage(self, modules: Sequence[ModuleStages]) -> int:
        """The stage of the instruction. Raises: RecipeError: there is no such module or chunk."""
        stages = {module.name: module.stages for module in modules}
        if self.module not in stages:
            raise RecipeError(
                f"Instruction({self.name!r}) names a module {shown(self.module)}; this model has {', '.join(stages)}"
            )
        count = len(stages[self.module])
        if not -count <= self.chunk < count:
            raise RecipeError(
                f"Instruction({self.name!r}).chunk = {self.chunk}, but module {self.module!r} is cut into {count} "
                f"chunks; use {-count} .. {count - 1}"
            )
        return stages[self.module][self.chunk]


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def in_order(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions, each after those that it waits for.

    Raises: RecipeError: two have one name and chunk, one names something else than F, B and the instructions of its
        chunk, or they wait for each other in a circle.
    """
    ordered: list[Instruction] = []
    for module, chunk in dict.fromkeys((one.module, one.chunk) for one in instructions):
        local = [one for one in instructions if (one.module, one.chunk) == (module, chunk)]
        position = {name: i for i, name in enumerate((*RESULTS, *(one.name for one in local)))}
        by_name = {one.name: one for one in local}
        if len(by_name) < len(local):
            name = next(one.name for i, one in enumerate(local) if one.name in [other.name for other in local[:i]])
            raise RecipeError(f"Recipe.instructions: {name} is twice on chunk {chunk} of {module!r}; rename one")
        before: dict[str, set[str]] = {name: set() for name in position} | {Kind.B: {Kind.F}}
        for one in local:
            for other in (*_names(one.after), *_names(one.before)):
                if other not in position:
                    raise RecipeError(
                        f"Instruction({one.name!r}) names {shown(other)}, which is neither F, B nor an instruction of "
                        f"chunk {chunk} of {module!r}; name one of {', '.join(position)}"
                    )
            before[one.name] |= set(_names(one.after))
            for other in _names(one.before):
                before[other].add(one.name)
        order = linear_extension(before, position.__getitem__)
        if len(order) < len(before):
            blocked = [name for name in position if name not in order]
            behind = {name: [other for other in blocked if name in before[other]] for name in blocked}
            ends = linear_extension(behind, position.__getitem__)  # they wait for a circle, and nothing in it for them
            circle = [name for name in blocked if name not in ends]
            raise RecipeError(
                f"Recipe.instructions: {', '.join(circle)} of chunk {chunk} of {module!r} wait for each other in a "
                "circle; change after or before of one"
            )
        ordered += [by_name[name] for name in order if name in by_name]
    return tuple(ordered)


def planned(instructions: Sequence[Instruction], graph: WorkGraph) -> Iterator[PlannedInstruction]:
    """The instructions of an iteration. Raises: RecipeError: as of `in_order` and `Instruction.stage`."""
    listed: set[Result] = set()
    for given in (ordered := in_order(instructions)):
        stage = given.stage(graph.modules)
        local = [one for one in ordered if (one.module, one.chunk) == (given.module, given.chunk)]
        after = {*_names(given.after), *(one.name for one in local if given.name in _names(one.before))}
        others = [one.kind for one in local if one.name in after]
        for work in _works(given, graph):
            backward = graph.has_backward(stage, work)
            if Kind.B in after and not backward:
                continue
            needs = [(kind, stage, work) for kind in RESULTS if kind in after]
            # Of the other instructions those that this work has: they are listed before this one.
            needs += [result for kind in others if (result := (kind, stage, work)) in listed]
            wait = [kind for kind in RESULTS if kind in _names(given.before) and (backward or kind is Kind.F)]
            listed.add((given.kind, stage, work))
            yield PlannedInstruction(
                kind=given.kind,
                stage=stage,
                work=work,
                after=tuple(needs),
                before=tuple((kind, stage, work) for kind in wait),
                seconds=float(given.seconds),
            )


def _works(given: Instruction, graph: WorkGraph) -> list[int]:
    """The works in which an instruction runs."""
    works = [index for index, work in enumerate(graph.works) if graph.modules[work.module].name == given.module]
    numbers = sorted({graph.works[index].microbatch for index in works})
    chosen = set(numbers[given.every - 1 :: given.every])
    return [index for index in works if graph.works[index].microbatch in chosen]


def functions_of(
    instructions: Sequence[Instruction], modules: Sequence[ModuleStages]
) -> Mapping[tuple[Kind, int], InstructionFunction]:
    """The functions by (kind, stage). Raises: RecipeError: as of `in_order` and `Instruction.stage`, or two are of one
    stage."""
    functions: dict[tuple[Kind, int], InstructionFunction] = {}
    for one in in_order(instructions):
        key = (one.kind, one.stage(modules))
        if key in functions:
            raise RecipeError(f"Recipe.instructions: {one.name} is twice on a chunk of {one.module!r}; rename one")
        functions[key] = one.function
    return functions
