"""How many threads numpy's matrix products take."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import threadpool_limits

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def few_blas_threads() -> AbstractContextManager[object]:
    """Limit the BLAS to one thread for a block, unless the environment says how many it may use.

    A step of a small model is some hundred products of a millisecond or less. BLAS threads wait for
    each other by spinning, so wherever a core is wanted by anyone else, attention's own threads
    included, they stand in each other's way: two of them were several times slower than one on a busy
    machine with two cores.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
