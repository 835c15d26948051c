"""The process group of a job: its ranks meet, wait for each other, and leave."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.config.config import Config
from mmtrain.errors import MMTrainError
from mmtrain.launch.launched import Launched
from mmtrain.parallel.alike import check_alike
from mmtrain.parallel.job_inputs import job_inputs
from mmtrain.parallel.meeting import Patience, meet
from mmtrain.parallel.mesh import init_process_group
from mmtrain.parallel.roll_call import RollCall, common_reason, is_communication
from mmtrain.parallel.torch_private import default_store, set_timeout
from mmtrain.schedule.library.catalogue import Schedule


class JobGroup:
    """One rank's membership; in the caller's process group if there is one."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Meets the other ranks. Raises: ConfigError, RankLostError: see `meet`."""
        self._config, self._device, self._launched = config, device, Launched.from_environment()
        self._owns = not dist.is_initialized()
        self._store = meet(config.comm) if self._owns else default_store()
        self._patience = Patience.at_start(config.comm)
        self.lost_rank = False
        """Whether a rank does not answer: the process groups are of no use any more."""

    @contextmanager
    def joined(self, schedule: Schedule, locate: Callable[[str], str]) -> Iterator[None]:
        """A context of all ranks: what ends one of them is raised on all.

        Args:
            schedule: the job's.
            locate: where this rank is, from the function of mmtrain that it is in.
        Raises: MMTrainError: see `check_alike`, `common_reason`.
        """
        launched, config = self._launched, self._config
        roll_call = RollCall(self._store, launched.rank, launched.world_size)
        try:
            with common_reason(roll_call, lambda: self._patience, locate):
                if self._owns:
                    check_alike(self._store, launched, job_inputs(config, schedule, self._device, launched))
                    init_process_group(config.comm, self._device, self._store)
                yield
        except MMTrainError as error:
            self.lost_rank = is_communication(error.__cause__)
            raise

    def steps_begin(self) -> None:
        """Ranks wait for each other no longer than steps take."""
        self._patience = Patience.later(self._config.comm)
        set_timeout(timedelta(seconds=self._patience.seconds))

    def leave(self) -> None:
        """Ends the process group, unless it is the caller's."""
        if self._owns and not self.lost_rank and dist.is_initialized():  # it would wait for the lost rank
            dist.destroy_process_group()
