"""The settings that make a job fastest on some GPUs: a search over degrees, cut, memory, schedule and blocks by
successive halving, judged by the simulator. Pure.

1. All degrees that fit, with the partition's rule and a first plan, on the first microbatches of one step; the best
   sixteen of them also with blocks.
2. The best of those with searches of these microbatches.
3. For the best of those, other values of each axis, one at a time; the ones that help, together; and a searched
   partition.
4. The best few as the job would run: whole steps, all replicas, the search of the job.

Source of the idea of one search over degrees and schedules: FlexPipe, section 6. Its tuner ranks a grid by bubble and
leaves memory, cut and tensor parallelism to the user.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.topology import JobLayout
from mmtrain.errors import ConfigError
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.allocation.candidate_judge import GIB, Effort, Judge, Judged
from mmtrain.simulator.allocation.recipes import best_recipes
from mmtrain.simulator.allocation.space import Space

SECOND, THIRD = 8, 3
"""Candidates that are judged more closely, and those whose other values are tried."""
FIRST_EFFORT = Effort(num_microbatches=16, evaluations=0)
OF_CUT_AND_SEARCH = {"planner.partition", "planner.search.interleave"}
"""Keys that a searched partition of a searching job sets otherwise."""
HELPS = 0.005
"""Part of the seconds that another value has to save."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The answer of `tune`."""

    config: Config
    rows: tuple[Judged, ...]
    """The candidates that were judged last, the best first."""
    own: Judged | None
    """The job as it is, judged as they are; None: its degrees make another number of ranks."""
    num_tried: int
    """Candidates that were judged at all."""
    refused: tuple[tuple[str, int], ...]
    """The reasons why candidates do not run, each with their number, the most frequent first."""
    effort: Effort
    """The effort of the last judgement."""

    @property
    def best(self) -> Judged:
        """The best candidate."""
        return self.rows[0]


@dataclass(kw_only=True)
class Tuner:
    """One search; `run` is its answer."""

    space: Space
    judge: Judge
    keep: int = 3
    """Candidates that are judged as the job would run."""
    effort: Effort
    """The effort of the last judgement."""
    recipes: Path | None = None
    """Folder for the files of recipes; None: none are tried."""
    progress: Callable[[str], None] = lambda what: None
    """Called before each candidate with the name of the round."""

    def __post_init__(self) -> None:
        # Fewer evaluations than the last round's would favour schedules that nothing is searched for.
        self._second_effort = Effort(
            num_microbatches=FIRST_EFFORT.num_microbatches, evaluations=self.effort.evaluations
        )
        self._tried: dict[Candidate, str] = {}
        """Candidate -> why it does not run; empty if it does."""

    def run(self) -> Tuned:
        """The best candidates. Raises: ConfigError: nothing runs; with what comes closest."""
        second = [self._judged(one.candidate, self._second_effort, "searches") for one in self._first()]
        third = [better for one in self._best(second)[:THIRD] for better in self._improved(one)]
        finalists = self._of_degrees([*second, *third])[: self.keep]
        config = self.space.config
        judged = [self._judged(one.candidate, self.effort, "whole steps") for one in finalists]
        rows = ordered([one for one in judged if one.seconds], config)
        if not rows:
            raise ConfigError(nothing_runs(judged or second, config))
        own = None
        if config.parallelism.layout.world_size == self.space.num_gpus:
            own = self._judged(Candidate(), self.effort, "the job as it is")
        reasons = Counter(short(problem) for problem in self._tried.values() if problem)
        return Tuned(
            config=config,
            rows=tuple(rows),
            own=own,
            num_tried=len(self._tried),
            refused=tuple(reasons.most_common()),
            effort=self.effort,
        )

    def _first(self) -> list[Judged]:
        """The best degrees, with blocks where those are faster."""
        judged = [self._judged(one, FIRST_EFFORT, "degrees") for one in self.space.first()]
        runs = self._best(judged)
        if not runs:
            raise ConfigError(nothing_runs(judged, self.space.config))
        for one in runs[: 2 * SECOND]:
            braided = self.space.braided(one.candidate, self._mesh(one))
            if braided is not None:
                runs.append(self._judged(braided, FIRST_EFFORT, "blocks"))
        return self._of_degrees(runs)[:SECOND]

    def _improved(self, one: Judged) -> list[Judged]:
        """A candidate with those other values that help, the most helpful of each axis, one after the other; and with
        a searched partition and the helpful values that leave cut and search alone."""
        begin = self._judged(one.candidate, FIRST_EFFORT, "other settings")
        helps: dict[str, Judged] = {}
        values_of: dict[Candidate, Mapping[str, Any]] = {}
        for axis, values in [*self.space.others(self._mesh(one)), *self._recipes(one)]:
            other = self._judged(one.candidate.having(values), FIRST_EFFORT, "other settings")
            values_of[other.candidate] = values
            if other.mean_s < min(begin.mean_s * (1 - HELPS), helps.get(axis, begin).mean_s):
                helps[axis] = other
        best, searched = one, one.candidate
        for helpful in sorted(helps.values(), key=lambda other: other.mean_s):
            values = values_of[helpful.candidate]
            other = self._judged(best.candidate.having(values), self._second_effort, "other settings")
            if other.mean_s < best.mean_s * (1 - HELPS):
                best = other
                searched = searched if values.keys() & OF_CUT_AND_SEARCH else searched.having(values)
        cut = self.space.searched_cut(searched, self._mesh(one))
        return [best, self._judged(cut, self._second_effort, "partitions")]

    def _recipes(self, one: Judged) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The values of recipes for a job of one module, each with its axis."""
        mesh = self._mesh(one)
        if self.recipes is None or not self.space.tries_recipes or mesh.pp == 1:
            return
        folder = self.recipes / f"pp{mesh.pp}"
        folder.mkdir(exist_ok=True)

        def values_of(path: Path) -> Mapping[str, Any]:
            return next(self.space.ordered(str(path), mesh))

        def problem_of(path: Path) -> PlanningProblem | None:
            return self.judge.problem(one.candidate.having(values_of(path)), FIRST_EFFORT)

        for path in best_recipes(folder, mesh.pp, problem_of):
            yield "schedule", values_of(path)

    def _mesh(self, one: Judged) -> JobLayout:
        return one.candidate.job(self.space.config).parallelism.layout

    def _judged(self, candidate: Candidate, effort: Effort, what: str) -> Judged:
        self.progress(what)
        judged = self.judge.judge(candidate, effort)
        self._tried[candidate] = judged.problem
        return judged

    def _best(self, judged: Sequence[Judged]) -> list[Judged]:
        """The candidates that run, the fastest first."""
        runs = [one for one in judged if one.seconds]
        return sorted(runs, key=lambda one: one.mean_s)

    def _of_degrees(self, judged: Sequence[Judged]) -> list[Judged]:
        """The best of each degrees and number of tokens, with searched plans and with a schedule as it is; the fastest
        first."""
        best: dict[tuple[JobLayout, int, bool], Judged] = {}
        for one in self._best(judged):
            job = one.candidate.job(self.space.config)
            best.setdefault((job.parallelism.layout, job.training.seq_len, job.planner.search.interleave), one)
        return list(best.values())


def ordered(rows: Sequence[Judged], config: Config) -> list[Judged]:
    """Candidates with the fastest first; of those that cannot be told from the fastest, the simplest.

    Two cannot be told apart where their mean difference is below twice its standard error over the steps.
    """
    left, order = sorted(rows, key=lambda one: one.mean_s), list[Judged]()
    while left:
        tied = [one for one in left if _tied(one, left[0])]
        order.append(min(tied, key=lambda one: simplicity(one.candidate, config)))
        left.remove(order[-1])
    return order


def _tied(one: Judged, other: Judged) -> bool:
    if one is other:
        return True
    if not one.seconds or len(one.seconds) < 2:
        return False
    differences = [a - b for a, b in zip(one.seconds, other.seconds, strict=True)]
    return abs(fmean(differences)) < 2 * stdev(differences) / math.sqrt(len(differences))


def simplicity(candidate: Candidate, config: Config) -> tuple[int, int, int, int]:
    """Sort key: the number of changes of the config, then tp, cp and pp."""
    mesh = candidate.job(config).parallelism.layout
    return len(candidate.difference(config)), mesh.tp, mesh.cp, mesh.pp


_NUMBER = re.compile(r"(?<=rank |step )\d+|\d[\d.]*(?= GiB)")
_LONGEST = 120
"""Characters of a reason."""


def short(problem: str) -> str:
    """A reason without numbers of ranks, its end and what to change: equal for candidates that fail alike."""
    reason = _NUMBER.sub("N", problem.partition(";")[0].partition(" (GiB")[0])
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST].rpartition(' ')[0]} ..."


def nothing_runs(judged: Sequence[Judged], config: Config) -> str:
    """Why no candidate runs: what is missing for the one that comes closest to a memory limit, or the first reason."""
    closest = min(judged, key=lambda one: one.missing_bytes)
    if closest.missing_bytes == math.inf:
        return f"tune: none of {len(judged)} candidates runs; the first: {judged[0].problem}"
    return (
        f"tune: none of {len(judged)} candidates fits; the closest one ({closest.candidate.described(config)}) lacks "
        f"{closest.missing_bytes / GIB:.1f} GiB on pp_rank {closest.peak_rank}; use more GPUs (--cluster), "
        'optimizer.moments_dtype = "bfloat16", shorter training.seq_len, or frozen modules'
    )
