"""python benchmarks/engine.py BEFORE [--repeats N]

CPU seconds of every named schedule, of `simulate`, `check`, `lower` and `waits`, in this tree and in another one
(BEFORE: the root of a checkout), each in a process of its own, by turns; and the ratio of the least times. Problems
are new objects each time, so that nothing cached is used twice.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def measure() -> dict[str, float]:
    """Name -> CPU seconds in this process."""
    import numpy as np

    from mmtrain.schedule.chain import plain_chain
    from mmtrain.schedule.library.catalogue import CATALOGUE
    from mmtrain.schedule.passes.lower import lower
    from mmtrain.schedule.plan import check
    from mmtrain.schedule.problem import PlanningProblem
    from mmtrain.schedule.simulate import simulate
    from mmtrain.schedule.transport import check_transport
    from mmtrain.schedule.view.waits import waits

    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        gc.collect()
        gc.disable()  # what else is alive would be counted
        start = time.process_time()
        result = call()
        found[name] = found.get(name, 0.0) + time.process_time() - start
        gc.enable()
        return result

    text = sorted((ROOT / "benchmarks/problems").glob("*.json.gz"))[-1]
    for name, schedule in CATALOGUE.items():
        chain = plain_chain(8, 64, schedule)
        timed(f"{name} (chain)", lambda make=schedule.make, problem=chain: make(problem))
        graph = PlanningProblem.read(text)
        plan = timed(f"{name} (vlm)", lambda make=schedule.make, problem=graph: make(problem))
        fresh = PlanningProblem.read(text)
        plan = type(plan)(fresh.graph, plan.orders, plan.options)
        timeline = timed("simulate, new graph", lambda problem=fresh, plan=plan: simulate(problem, plan))
        timed("simulate, again", lambda problem=fresh, plan=plan: simulate(problem, plan))
        timed("run", lambda plan=plan: plan.run())
        timed("check", lambda plan=plan: check(plan))
        rows = [timeline.of_rank(rank) for rank in range(plan.graph.num_ranks)]
        starts = [np.array([r.start_s for r in row]) for row in rows]
        ends = [np.array([r.end_s for r in row]) for row in rows]
        timed("waits", lambda plan=plan, s=starts, e=ends: waits(plan, s, e))
        if name in ("1F1B", "interleave", "ZBV"):
            program = timed("lower", lambda plan=plan, problem=fresh: lower(plan, problem, sharded=True))
            timed("check_transport", lambda program=program: check_transport(program))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.before is None:
        print(json.dumps(measure()))
        return
    best: dict[str, dict[str, float]] = {"before": {}, "after": {}}
    for _ in range(given.repeats):
        for side, root in (("before", given.before.resolve()), ("after", ROOT)):
            environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            answer = subprocess.run(
                [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
            )
            for name, seconds in json.loads(answer.stdout).items():
                best[side][name] = min(seconds, best[side].get(name, seconds))
    print(f"{'':28s} {'before ms':>10s} {'after ms':>10s} {'ratio':>6s}")
    for name, seconds in best["after"].items():
        before = best["before"][name]
        print(f"{name:28s} {1e3 * before:10.2f} {1e3 * seconds:10.2f} {seconds / before:6.2f}")


if __name__ == "__main__":
    main()
