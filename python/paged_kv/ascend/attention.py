"""Attention of a batch's queries on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.ascend.tensor import DeviceTensor, device_tensor, empty, from_bits, host_array, to_bits
from paged_kv.ascend.tiling import DTYPES, LAYOUTS, Shape
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv._core import Batch, BatchView
    from paged_kv.ascend.stream import Event
    from paged_kv.ascend.work import Work

__all__ = ["attend"]


def attend(
    work: Work,
    layer: int,
    query: Any,
    batch: Batch | BatchView,
    *,
    scale: float | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    alibi_slopes: object,
    sinks: object,
    return_lse: bool,
    out: Any,
) -> Any:
    """Attention of a batch's queries over the keys and values of one layer.

    Parameters
    ----------
    work : Work
        The batch's work.
    layer : int
        Which layer.
    query : array
        [tokens, num_heads, head_dim]: of the device, in the cache's dtype and contiguous; then `out` is
        needed, and nothing is waited for. Or of the host: it is converted to the cache's dtype and
        copied there, and the result comes back, for which this waits.
    batch : Batch or BatchView
        Says whose keys each row sees.
    scale, causal, window_left, logits_soft_cap, return_lse, out
        As in :meth:`paged_kv.KvCache.attend`.
    alibi_slopes, sinks
        None: the kernels don't have them.

    Returns
    -------
    out, or (out, lse)
        Of the device (float32 `lse` too) for a query of the device.

    Raises
    ------
    LayoutError
        For what the kernels can't do, by name and number.
    ValueError
        For a layer that is not there, or a batch that has ended.
    InvalidPageError
        A block table names a page that is not there.
    DeviceError
        The device refuses.
    """
    backend = work.backend
    keys, values = backend.layer(layer)
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None:
            raise LayoutError(f"{name} on ascend:{backend.device.index}: the kernels don't have them")
    rows = device_tensor("query", query, backend.device)
    host = None if rows else host_array("query", query)
    shape = rows.shape if rows else host[0].shape  # type: ignore[index]
    if len(shape) != 3 or shape[2] != backend.head_dim:
        raise LayoutError(f"query has shape {list(shape)} instead of [tokens, num_heads, {backend.head_dim}]")
    if rows and rows.dtype != backend.dtype:
        raise LayoutError(f"query is {rows.dtype} on the device, the cache {backend.dtype}")
    target = _output(work, out, shape, rows, host)
    tokens, num_heads, head_dim = shape
    with work.lane.lock:
        step = work._prepared(batch)
        if step.rows[-1] != tokens:
            raise LayoutError(f"query has {tokens} rows, the batch {step.rows[-1]}")
        asked = Shape(
            batch=len(step.lens),
            num_heads=num_heads,
            num_kv_heads=backend.num_kv_heads,
            head_dim=head_dim,
            page_size=backend.page_size,
            table_width=step.table.shape[1],
            dtype=DTYPES[backend.dtype],
            layout=LAYOUTS[backend.layout],
            max_len=step.max_len,
            num_splits=0,
            num_cores=backend.num_cores,
            window_left=min(window_left, 2**31 - 1),
            scale=1 / math.sqrt(head_dim) if scale is None else scale,
            soft_cap=logits_soft_cap,
        )
        decodes = tokens == len(step.lens) and step.max_queries <= 1
        tiling: Any = (
            backend.kernels.plan_decode(asked)
            if decodes
            else backend.kernels.plan_prefill(asked, step.max_queries, causal=causal)
        )
        step.check_table(window_left, causal=causal)
        if tokens == 0:
            return _result(target, empty_lse(work, rows, num_heads) if return_lse else None)
        with work._launching(step.pages, step.none):
            lane = work.lane
            sent = rows.memory if rows else lane.upload("query", to_bits(host[0], backend.dtype))  # type: ignore[index]
            lse = empty(backend.device, (tokens, num_heads), "float32") if rows and return_lse else None
            arrays = {
                "query": sent,
                "key_pages": keys.memory,
                "value_pages": values.memory,
                "out": target.memory
                if isinstance(target, DeviceTensor)
                else lane.scratch("out", sent.nbytes),
                "lse": lse.memory if lse else lane.scratch("lse", tokens * num_heads * 4),
            }
            arrays |= {name: step.on_device(lane)[name] for name in ("block_table", "seq_lens")}
            pairs = len(step.lens) * backend.num_kv_heads
            if decodes:
                parts = pairs * tiling.num_splits
                arrays["partial_out"] = lane.scratch("partial_out", parts * tiling.group * head_dim * 4)
                arrays["partial_lse"] = lane.scratch("partial_lse", parts * tiling.lanes * 4)
                backend.kernels.decode(lane.stream, arrays, tiling, min(backend.num_cores, parts))
            else:
                arrays["cu_seqlens_q"] = step.on_device(lane)["cu_seqlens_q"]
                blocks = min(backend.num_cores, pairs * tiling.chunks)
                backend.kernels.prefill(lane.stream, arrays, tiling, blocks)
            if isinstance(target, DeviceTensor):
                return _result(target, lse)
            bits = np.empty(shape, np.uint16)
            arrays["out"].copy_to(bits, lane.stream)
            host_lse = np.empty((tokens, num_heads), np.float32) if return_lse else None
            if host_lse is not None:
                arrays["lse"].copy_to(host_lse, lane.stream)
            arrived = lane.stream.record()
    return _result(_arrived(arrived, bits, backend.dtype, target), host_lse)


def _output(
    work: Work,
    out: Any,
    shape: tuple[int, ...],
    rows: DeviceTensor | None,
    host: tuple[npt.NDArray[Any], str] | None,
) -> DeviceTensor | npt.NDArray[Any]:
    """Return where the output goes, checked."""
    if rows is None:
        assert host is not None
        if out is None:
            return np.empty(shape, host[0].dtype)
        if not isinstance(out, np.ndarray):
            raise LayoutError(
                f"out is a {type(out).__name__}, the query an array of the host: numpy is needed"
            )
        if out.shape != shape or out.dtype != host[0].dtype or not out.flags.writeable:
            raise LayoutError(
                f"out is {out.dtype} {list(out.shape)}, writable: {out.flags.writeable}; "
                f"writable {host[0].dtype} {list(shape)} is needed"
            )
        return out
    if out is None:
        raise LayoutError("a query on the device needs out=")
    tensor = device_tensor("out", out, work.backend.device)
    if tensor is None:
        raise LayoutError("out is in host memory, the query on the device")
    if (tensor.shape, tensor.dtype) != (rows.shape, rows.dtype):
        raise LayoutError(
            f"out is {tensor.dtype} {list(tensor.shape)} instead of {rows.dtype} {list(rows.shape)}"
        )
    return tensor


def empty_lse(
    work: Work, rows: DeviceTensor | None, num_heads: int
) -> DeviceTensor | npt.NDArray[np.float32]:
    """Return the log-sum-exp of no rows."""
    if rows is None:
        return np.empty((0, num_heads), np.float32)
    return empty(work.backend.device, (0, num_heads), "float32")


def _arrived(
    arrived: Event, bits: npt.NDArray[np.uint16], dtype: str, target: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Wait for the output and put it into its place, in its dtype."""
    arrived.synchronize()
    kind = "bfloat16" if target.dtype.name == "uint16" else target.dtype.name
    if kind == dtype:
        target.view(np.uint16)[...] = bits
    elif kind == "bfloat16":
        target.view(np.uint16)[...] = to_bits(from_bits(bits, dtype), kind)
    else:
        target[...] = from_bits(bits, dtype)
    return target


def _result(out: Any, lse: Any) -> Any:
    return out if lse is None else (out, lse)
