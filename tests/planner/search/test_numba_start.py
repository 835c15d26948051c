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


def test_searching_loads_no_scipy_and_other_kernels_still_can() -> None:
    subprocess.run([sys.executable, "-c", WARM + PRODUCT], check=True)
