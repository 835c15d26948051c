import subprocess
import sys

WARM = """
import sys
from mmtrain.planner.search.search import warm
warm()
assert "numba.np.arraymath" in sys.modules
assert not {"scipy.linalg", "mmtrain.config.config", "torch"} & set(sys.modules), sys.modules
"""

PRODUCT = """
import numpy as np
from numba import njit
product = njit(lambda a: np.dot(a, a))(2 * np.eye(2))
assert product.tolist() == [[4, 0], [0, 4]]
assert "scipy.linalg" in sys.modules
"""


def stderr_of(script: str) -> str:
    """What a process says on stderr."""
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stderr


def test_searching_loads_no_scipy_and_other_kernels_still_can() -> None:
    """What is compiled is announced, in one line however many functions it has; what is read from disk is not."""
    (line,) = stderr_of(WARM + PRODUCT).splitlines()
    assert line.startswith("compiling the planner's kernels for this processor: up to a minute, once")
    assert stderr_of(WARM) == "", "the kernels are kept on disk"


LOGGED = """
import sys
from mmtrain.observe.log_file import setup_logging
from mmtrain.schedule.numba_start import load_numba
from numba import njit
setup_logging(int(sys.argv[1]))
load_numba()
assert njit(lambda a: a + 1)(2) == 3
"""


def test_in_a_job_rank_0_says_it_in_the_log() -> None:
    for rank, lines in ((0, 1), (1, 0)):
        done = subprocess.run([sys.executable, "-c", LOGGED, str(rank)], check=True, capture_output=True, text=True)
        assert done.stderr == "" and done.stdout.count("compiling the planner's kernels") == lines
