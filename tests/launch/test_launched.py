"""What the variables of a launcher may say."""

import pytest

from mmtrain.errors import ConfigError
from mmtrain.launch.launched import Launched, meeting_point, whole_number

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip


def test_a_process_of_torchrun():
    assert Launched.from_environment(TORCHRUN) == Launched(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert meeting_point(TORCHRUN) == ("node0", 29500)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, None)),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, None)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, None)),
        ({"LOCAL_RANK": "2"}, (0, 1, 2, None)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 0, None)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ],
)
def test_what_launchers_may_leave_out(variables, expected):
    found = Launched.from_environment(variables)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "x"}, "RANK = 'x'; it is the number of this process in the job"),
        ({"RANK": "-1"}, "RANK = '-1'"),
        ({"RANK": "1.0"}, "RANK = '1.0'"),
        ({"RANK": "٣"}, "RANK = "),
        ({"RANK": "1" * 5000}, "RANK = '1111"),
        ({"RANK": "8"}, "RANK = 8; it must be below WORLD_SIZE = 8"),
        ({"RANK": ""}, "WORLD_SIZE = 8, but RANK is not set"),
        ({"WORLD_SIZE": ""}, "RANK = 5, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK = 4; it must be below LOCAL_WORLD_SIZE = 4"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x'"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9; it must be at most WORLD_SIZE = 8"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT = 'x'"),
        ({"GLOO_SOCKET_IFNAME": "lo,none9"}, "GLOO_SOCKET_IFNAME = 'none9', but this machine ("),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536; a port is from 1 to 65535"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        Launched.from_environment(TORCHRUN | changes)
        meeting_point(TORCHRUN | changes)
    assert message in str(caught.value)


def test_numbers_of_threads():
    assert whole_number("OMP_NUM_THREADS", {}) is None
    assert whole_number("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "4"}) == 4
    for text in ("x", "0", "2.5"):
        with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS = .*the number of threads"):
            whole_number("OMP_NUM_THREADS", {"OMP_NUM_THREADS": text})
