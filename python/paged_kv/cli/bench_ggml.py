"""ggml's flash attention over contiguous float16: a peer where the package ``libggml-python`` is installed.

ggml is what llama.cpp computes with. The package holds its shared libraries and headers, no bindings; the
dozen functions that attention takes are declared here as ``ggml.h`` and ``ggml-cpu.h`` of 0.20 have them.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_byte, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

# Of `enum ggml_type`.
_F32, _F16 = 0, 1
# What a context holds beside the contents of tensors.
_OVERHEAD_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(ctypes.Structure):
    # Longer than `struct ggml_cplan`, whose other fields stay as they are returned.
    _fields_ = (("work_size", c_size_t), ("work_data", c_void_p), ("others", c_byte * 112))


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("libggml") is not None


@cache
def _functions() -> dict[str, Any]:
    """Load the libraries and declare the functions."""
    spec = find_spec("libggml")
    if spec is None or spec.origin is None:
        raise ImportError("libggml-python is not installed")
    folder = Path(spec.origin).parent / "lib64"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    tensors = (c_void_p,) * 5
    declared = (
        (base, "ggml_init", c_void_p, (_InitParams,)),
        (base, "ggml_free", None, (c_void_p,)),
        (base, "ggml_new_tensor_4d", c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)),
        (base, "ggml_get_data", c_void_p, (c_void_p,)),
        (base, "ggml_flash_attn_ext", c_void_p, (*tensors, c_float, c_float, c_float)),
        (base, "ggml_new_graph", c_void_p, (c_void_p,)),
        (base, "ggml_build_forward_expand", None, (c_void_p, c_void_p)),
        (cpu, "ggml_graph_plan", _Plan, (c_void_p, c_int, c_void_p)),
        (cpu, "ggml_graph_compute", c_int, (c_void_p, POINTER(_Plan))),
    )
    functions = {}
    for library, name, result, arguments in declared:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        functions[name.removeprefix("ggml_")] = function
    cpu.ggml_cpu_init()
    return functions


class FlashAttention:
    """One decode step by ggml: its tensors, and the graph that computes them.

    Parameters
    ----------
    query : ndarray of float32, [batch, num_heads, head_dim]
        One new token per sequence.
    key, value : ndarray, [batch, num_kv_heads, len, head_dim]
        Copied into tensors of float16.
    threads : int
        That share the work.

    Raises
    ------
    ImportError
        If the package isn't installed.
    """

    def __init__(
        self,
        query: npt.NDArray[np.float32],
        key: npt.NDArray[Any],
        value: npt.NDArray[Any],
        threads: int,
    ) -> None:
        self._ggml = _functions()
        size = 2 * query.nbytes + 2 * (key.size + value.size) + _OVERHEAD_BYTES
        self._context = self._ggml["init"](_InitParams(size, None, False))
        batch, heads, dim = query.shape
        tensors = [self._tensor(_F32, query.reshape(batch, heads, 1, dim))]
        tensors += [self._tensor(_F16, array.astype(np.float16)) for array in (key, value)]
        result = self._ggml["flash_attn_ext"](self._context, *tensors, None, dim**-0.5, 0.0, 0.0)
        self._graph = self._ggml["new_graph"](self._context)
        self._ggml["build_forward_expand"](self._graph, result)
        self._plan = self._ggml["graph_plan"](self._graph, threads, None)
        self._work = ctypes.create_string_buffer(self._plan.work_size)
        self._plan.work_data = ctypes.addressof(self._work)
        out = (c_float * query.size).from_address(self._ggml["get_data"](result))
        self._out: npt.NDArray[np.float32] = np.ctypeslib.as_array(out).reshape(query.shape)

    def _tensor(self, kind: int, array: npt.NDArray[Any]) -> int:
        """Make a tensor with an array's contents; ggml names axes from the last to the first."""
        tensor: int = self._ggml["new_tensor_4d"](self._context, kind, *reversed(array.shape))
        contiguous = np.ascontiguousarray(array)
        ctypes.memmove(self._ggml["get_data"](tensor), contiguous.ctypes.data, contiguous.nbytes)
        return tensor

    def __call__(self) -> npt.NDArray[np.float32]:
        """Compute, and return the output, [batch, num_heads, head_dim], until the next call or `close`."""
        status = self._ggml["graph_compute"](self._graph, ctypes.byref(self._plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return self._out

    def close(self) -> None:
        """Give the memory back; nothing may be called or read after it."""
        self._ggml["free"](self._context)
