"""Runs commands of `mmtrain` one after the other in this process, and prints what each came to as a line of JSON."""

import contextlib
import io
import json
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.faults.mutations import MOST_WALL_S


def main(path: str) -> None:
    """Args: path: file with a JSON list of commands."""
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))  # what grows without end dies here alone
    from mmtrain.commands import cli
    from mmtrain.planner.search.search import warm

    warm()
    results = sys.stdout
    for words in json.loads(Path(path).read_text()):
        out, err, status, died = io.StringIO(), io.StringIO(), None, ""
        signal.alarm(int(MOST_WALL_S))  # which ends the process
        start = time.process_time()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.main(words)
            except SystemExit as left:
                died = f"it left with {left.code}: {err.getvalue()[-500:]}"
            except BaseException:
                died = traceback.format_exc()[-3000:]
        row = {"words": words, "status": status, "out": out.getvalue()[:50_000], "err": err.getvalue()[:50_000]}
        row |= {"cpu_s": time.process_time() - start, "died": died}
        print(json.dumps(row), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
