"""The claims by which one membership a generation, the newest alone, may write into the run folder of an elastic job.
Pure.

A membership service that hears two groups of nodes at different times, since their processes get no time on a loaded
machine, may give each a round of its own. Each then takes itself for the next generation. The folder, which they share,
decides: the first that claims a generation has it, and the others ask for the next one.
"""

import os
from pathlib import Path

from mmtrain.errors import RankLostError

_PREFIX = ".generation-"


class Claim:
    """The claim of a generation, made in the run folder."""

    def __init__(self, folder: Path, job: str, generation: int, members: str) -> None:
        """Args: folder: made if it is absent. job: its name, of letters and digits. members: digest of the membership.

        Raises: RankLostError: other nodes of the job have claimed this generation, or a later one. OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._generation = folder, generation
        self._path = folder / f"{_PREFIX}{job}-{generation}"
        try:
            with self._path.open("x") as file:
                file.write(members)
        except FileExistsError:
            if self._path.read_text() != members:
                raise self._other(generation) from None
        for path in folder.glob(f"{_PREFIX}*"):
            of_job, _, number = path.name.removeprefix(_PREFIX).rpartition("-")
            if of_job == job and int(number) > generation:
                raise self._other(int(number))
            if path != self._path:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises: RankLostError: a later generation has claimed the folder."""
        if not os.path.exists(self._path):
            raise self._other(self._generation + 1)

    def _other(self, generation: int) -> RankLostError:
        return RankLostError(
            f"{self._folder}: other nodes of this job have generation {generation}, so these nodes, which were cut off "
            f"in generation {self._generation}, ask again; if it happens often, raise --heartbeat_timeout_ms of the "
            "lighthouse"
        )
