"""What `[planner]` asks of the search of one iteration: its switches, seed, budget and threads."""

import hashlib

from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.planner.search.search_options import SearchOptions

PLANNED = "planned"
"""Stands among the names of schedules for the plans of the planner's search."""


def search_threads(asked: int, num_cores: int, num_ranks: int) -> int:
    """Threads of one rank's search.

    Args:
        asked: `planner.search.threads`; 0: an equal share of half of the cores, at least one.
        num_cores: of this machine, that the job may use.
        num_ranks: of the job on this machine.
    """
    return asked or max(1, num_cores // 2 // num_ranks)


def search_seed(job_seed: int, step: int, member: int = 0) -> int:
    """The seed of the search of one step, 0 .. 2**31 - 1: a resumed run draws the same.

    Args: member: of several searches of one step, which.
    """
    text = f"plan {job_seed} {step} {member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def search_options(
    section: PlannerConfig, *, seed: int, threads: int, num_searchers: int = 1, noise: Noise = EXACT
) -> SearchOptions:
    """What one of several equal searches of an iteration may do.

    `budget_evaluations` is for all of them together; `budget_s` is a time and holds for each, as they run side by
    side.
    """
    search = section.search
    return SearchOptions(
        budget_evaluations=-(-search.budget_evaluations // num_searchers),
        budget_s=search.budget_s,
        seed=seed,
        threads=threads,
        strategy=search.strategy,
        reorder=search.reorder,
        split=search.split_backward,
        braid=search.braid,
        memory=search.memory,
        noise=noise,
        draws=search.draws,
    )


def show_switches(section: PlannerConfig, threads: int) -> str:
    """One line for the log. Args: threads: of the search on each rank that searches."""
    search = section.search
    cut = f"partition {section.partition}, sub-microbatches {_word(search.sub_microbatch)}"
    cut += ", samples grouped anew" if section.enable and search.regroup else ""
    cut += ", blocks of a forward and a backward" if search.braid else ""
    if not section.enable:
        return f"planner: off; {cut}"
    names = ("interleave", "reorder", "split_backward", "memory")
    switches = ", ".join(f"{name.replace('_', ' ')} {_word(getattr(search, name))}" for name in names)
    budget = [f"{search.budget_evaluations} evaluations"] if search.budget_evaluations else []
    budget += [f"{search.budget_s:g} s"] if search.budget_s else []
    who = "on every rank" if search.distributed else "on the first rank of a replica"
    return (
        f"planner: on; {cut}, {switches}; {search.strategy}, {' or '.join(budget) or 'no search'}, "
        f"{threads} thread{'s' * (threads > 1)} {who}; patience {search.patience_s:g} s"
    )


def _word(switch: bool) -> str:
    return "on" if switch else "off"
