"""The limits of a recipe as pools: what counts together, how much fits, and what each forward takes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mmtrain.errors import RecipeError, one_line, shown
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.recipe.language import NO_LIMIT, Limit, RankInfo, Recipe
from mmtrain.schedule.recipe.shared import Settled, Shared

UNLIMITED = 1e300
"""Limit of a pool without one."""


class Pool(NamedTuple):
    """A limit: how much fits, and its name in messages."""

    limit: float
    where: str


class Limits:
    """All limits of a recipe on a problem: in flight on ranks, in stages and of modules on ranks; and memory."""

    def __init__(self, recipe: Recipe, shared: Shared, settled: Settled, until: Sequence[str]) -> None:
        """Args: until: [stage]. Raises: RecipeError: a limit has the wrong length, or its function fails."""
        self._recipe, self._graph = recipe, shared.graph
        self.pools: list[Pool] = []
        self.of_ranks: list[int] = []
        """[rank] -> limit in flight of the rank itself."""
        self._trained = shared.trained
        pools_of_stages = self._pools_of_stages(shared.graph, shared.stages)
        self.levels = [shared.in_flight(pools, until) for pools in pools_of_stages if max(pools) >= 0]
        limits = shared.problem.held_limit_bytes
        if recipe.memory and any(limit is not None for limit in limits):
            self.levels.append(shared.bytes_held(settled, len(self.pools)))
            for rank, limit in enumerate(limits):
                self.pools.append(Pool(UNLIMITED if limit is None else limit, f"the memory limit of rank {rank}"))
        if any(word == "I" for word in until):
            self.of_ranks = [NO_LIMIT] * shared.graph.num_ranks  # what waits for W is not in flight

    def _pools_of_stages(self, graph: WorkGraph, stages: Sequence[Sequence[int]]) -> list[list[int]]:
        """[stage] -> pool, three times: by `in_flight` of ranks, of single stages, and of overrides of modules."""
        self.of_ranks = [NO_LIMIT] * graph.num_ranks
        of_rank, of_stage, of_module = ([-1] * len(graph.stage_rank) for _ in range(3))
        for rank, chunks in enumerate(stages):
            rule = self._recipe.overrides.get(rank)
            if rule and rule.in_flight is not None:
                given, where = rule.in_flight, f"overrides[{rank}].in_flight"
            else:
                given, where = self._of_rank(self._recipe.in_flight, "in_flight", rank), "in_flight"
            limit = self._value(given, where, rank, chunks)
            if isinstance(limit, int):
                of_chains = self._of_chains(rank, chunks, limit, exact=callable(given))
                for local, most in of_chains:
                    self._add(of_rank, local, most, f"in_flight = {limit} of rank {rank}")
                self.of_ranks[rank] = min(NO_LIMIT, sum(most for _, most in of_chains))
            elif limit is not None:
                for stage, number in zip(chunks, limit, strict=True):
                    self._add(of_stage, [stage], number, f"in_flight = {number} of stage {stage}")
            for module in sorted({graph.module_of[stage] for stage in chunks}):
                name = graph.modules[module].name
                rule = self._recipe.overrides.get(name)
                if rule and rule.in_flight is not None:
                    where = f"overrides[{name!r}].in_flight"
                    local = [stage for stage in chunks if graph.module_of[stage] == module]
                    limit = self._value(self._of_rank(rule.in_flight, where, rank), where, rank, local)
                    if limit is None:
                        continue
                    if not isinstance(limit, int):
                        raise RecipeError(f"Recipe.{where} = {shown(rule.in_flight)}; give a number, or one a rank")
                    self._add(of_module, local, limit, f"in_flight = {limit} of {name} on rank {rank}")
        return [of_rank, of_stage, of_module]

    def _of_chains(
        self, rank: int, stages: Sequence[int], limit: int, *, exact: bool
    ) -> list[tuple[Sequence[int], int]]:
        """The stages of each module on a rank that count together, and their limit.

        With several modules a microbatch is on its way longer than through the one chain that the limit is for: for
        each stage of the rank beyond those of one module, P pairs more may be in flight.

        Args: exact: the limit knows all stages of the rank.
        """
        graph = self._graph
        chains = [
            [stage for stage in stages if graph.module_of[stage] == module]
            for module in dict.fromkeys(graph.module_of[stage] for stage in self._trained.intersection(stages))
        ]
        if len(chains) < 2 or exact:
            return [(chain, limit) for chain in chains]
        count = len(self._trained.intersection(stages))
        passes = [self._recipe.placement_of(graph.modules[graph.module_of[chain[0]]].name).passes for chain in chains]
        more = [graph.num_ranks * max(0, count - given) for given in passes]
        return [(chain, min(NO_LIMIT, limit + extra)) for chain, extra in zip(chains, more, strict=True)]

    def _add(self, pools: list[int], stages: Sequence[int], limit: int, where: str) -> None:
        for stage in stages:
            pools[stage] = len(self.pools)
        self.pools.append(Pool(limit, where))

    def _of_rank(self, given: Limit | None, where: str, rank: int) -> Any:
        """The entry of a rank, if there is one a rank."""
        if not isinstance(given, Sequence):
            return given
        if len(given) != self._graph.num_ranks:
            raise RecipeError(
                f"Recipe.{where} has {len(given)} entries for {self._graph.num_ranks} pipeline ranks; give one a rank"
            )
        return given[rank]

    def _value(self, given: Any, where: str, rank: int, stages: Sequence[int]) -> int | Sequence[int] | None:
        """One number for all the stages, or one a stage."""
        if callable(given):
            if not self._trained.intersection(stages):
                return None  # nothing there is in flight
            info = RankInfo(
                rank=rank,
                num_ranks=self._graph.num_ranks,
                num_chunks=len(self._trained.intersection(stages)),
                num_microbatches=len({work.microbatch for work in self._graph.works}),
            )
            value, again = (call(f"Recipe.{where}", given, info) for _ in range(2))
            if value != again:
                raise RecipeError(
                    f"Recipe.{where} is impure: it returned {shown(value)} and {shown(again)} for {info}; let it use "
                    "its argument alone"
                )
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= NO_LIMIT:
                raise RecipeError(
                    f"Recipe.{where} returned {shown(value)} for {info}; a limit is a number of at least 1"
                )
            return value
        if isinstance(given, Sequence) and len(given) != len(stages):
            raise RecipeError(
                f"Recipe.{where} has {len(given)} entries for rank {rank}, which has {len(stages)} stages; give one a "
                "stage, or one number"
            )
        return given  # type: ignore[no-any-return]


def call(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a recipe returns. Raises: RecipeError: it raises; with its file and line."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{where} raises {type(error).__name__}{line_of(error)}: {one_line(error)}") from error


def line_of(error: BaseException) -> str:
    """` (file:line)` of the last line that a function called by `call` reached in its own file; empty: not known."""
    trace = error.__traceback__
    if trace is None:
        return ""
    trace = trace.tb_next or trace  # the first one is that of `call`
    path, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    while trace := trace.tb_next:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
    return f" ({path}:{line})"
