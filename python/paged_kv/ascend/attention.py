"""Attention of a batch's queries on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.ascend.tensor import (
    DeviceTensor,
    device_tensor,
    empty,
    from_bits,
    host_array,
    query_bits,
    span,
    to_bits,
)
from paged_kv.ascend.tiling import DTYPES, LAYOUTS, DecodeTiling, PrefillTiling, Shape
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv._core import Batch, BatchView
    from paged_kv.ascend.memory import DeviceMemory
    from paged_kv.ascend.step import Step
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
        For a layer that is not there, a scale or soft cap that is not finite, a query of the host beyond
        the range of the cache's dtype, or a batch that has ended.
    InvalidPageError
        A block table names a page that is not there.
    DeviceError
        The device refuses.
    """
    backend = work.backend
    pages = backend.layer(layer)
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None:
            raise LayoutError(f"{name} on ascend:{backend.device.index}: the kernels don't have them")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    if not 0 <= logits_soft_cap < math.inf:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, not {logits_soft_cap}")
    rows: DeviceTensor | npt.NDArray[Any] | None = device_tensor("query", query, backend.device)
    if rows is None:
        rows = host_array("query", query)[0]
    if len(rows.shape) != 3 or rows.shape[2] != backend.head_dim:
        raise LayoutError(
            f"query has shape {list(rows.shape)} instead of [tokens, num_heads, {backend.head_dim}]"
        )
    target = _output(work, out, rows)
    if isinstance(rows, np.ndarray):
        out = target if out is None else out
    tokens, num_heads, head_dim = rows.shape
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
        plan = _plan(work, step, asked, causal=causal)
        step.check_table(window_left, causal=causal)
        lane, lse = work.lane, None
        if isinstance(target, DeviceTensor):
            if return_lse:
                lse = empty(backend.device, (tokens, num_heads), "float32")
            if tokens:
                assert isinstance(rows, DeviceTensor)
                with work._launching(step.pages, step.none):
                    sums = lse.memory if lse else lane.scratch("lse", tokens * num_heads * 4)
                    _launch(
                        work,
                        step,
                        asked,
                        plan,
                        pages,
                        (rows.memory, target.memory, sums),
                        return_lse=return_lse,
                    )
            return target if lse is None else (target, lse)
        assert isinstance(rows, np.ndarray)
        query_rows = query_bits(rows, backend.dtype)
        bits = np.empty(rows.shape, np.uint16)
        host_lse = np.empty((tokens, num_heads), np.float32)
        arrived = None
        if tokens:
            with work._launching(step.pages, step.none):
                sent = lane.upload("query", query_rows)
                result = lane.scratch("out", sent.nbytes)
                sums = lane.scratch("lse", host_lse.nbytes)
                _launch(work, step, asked, plan, pages, (sent, result, sums), return_lse=return_lse)
                result.copy_to(bits, lane.stream)
                if return_lse:
                    sums.copy_to(host_lse, lane.stream)
                arrived = lane.stream.record()
    if arrived is not None:  # without the lock: others may launch meanwhile
        arrived.synchronize()
    _put(bits, backend.dtype, target)
    return (out, host_lse) if return_lse else out


def _plan(work: Work, step: Step, asked: Shape, *, causal: bool) -> DecodeTiling | PrefillTiling:
    """Return how the kernels will do it: decode where each sequence has one query."""
    kernels = work.backend.kernels
    if step.rows[-1] == len(step.lens) and step.max_queries <= 1:
        return kernels.plan_decode(asked)
    return kernels.plan_prefill(asked, step.max_queries, causal=causal)


def _launch(
    work: Work,
    step: Step,
    asked: Shape,
    plan: DecodeTiling | PrefillTiling,
    pages: tuple[DeviceTensor, DeviceTensor],
    ours: tuple[DeviceMemory, DeviceMemory, DeviceMemory],
    *,
    return_lse: bool,
) -> None:
    """Put the kernel on the stream; `ours` is query, output and log-sum-exp."""
    backend, lane = work.backend, work.lane
    on_device = step.on_device(lane)
    arrays = dict(zip(("query", "out", "lse"), ours, strict=True))
    arrays |= {"key_pages": pages[0].memory, "value_pages": pages[1].memory}
    arrays |= {name: on_device[name] for name in ("block_table", "seq_lens")}
    pairs = asked.batch * asked.num_kv_heads
    if isinstance(plan, PrefillTiling):
        if not return_lse and backend.aclnn and backend.aclnn.takes_prefill(asked, step):
            mask = backend.causal_mask() if plan.causal else None
            backend.aclnn.prefill(lane, arrays, asked, backend.num_pages, step, mask)
            return
        arrays["cu_seqlens_q"] = on_device["cu_seqlens_q"]
        backend.kernels.prefill(lane.stream, arrays, plan, min(backend.num_cores, pairs * plan.chunks))
    elif not return_lse and backend.aclnn and backend.aclnn.takes(asked, step):
        backend.aclnn.decode(lane, arrays, asked, backend.num_pages, step)
    else:
        parts = pairs * plan.num_splits
        arrays["partial_out"] = lane.scratch("partial_out", parts * plan.group * asked.head_dim * 4)
        arrays["partial_lse"] = lane.scratch("partial_lse", parts * plan.lanes * 4)
        backend.kernels.decode(lane.stream, arrays, plan, min(backend.num_cores, parts))


def _output(work: Work, out: Any, query: DeviceTensor | npt.NDArray[Any]) -> DeviceTensor | npt.NDArray[Any]:
    """Return where the output goes, checked: on the device where the query is there."""
    if isinstance(query, np.ndarray):
        if out is None:
            return np.empty(query.shape, query.dtype)
        if device_tensor("out", out, work.backend.device) is not None:
            raise LayoutError("out is on the device, the query in host memory")
        array, dtype = host_array("out", out)
        wanted = host_array("query", query)[1]
        if array.shape != query.shape or dtype != wanted or not array.flags.writeable:
            raise LayoutError(
                f"out is {dtype} {list(array.shape)}, writable: {array.flags.writeable}; "
                f"writable {wanted} {list(query.shape)} is needed"
            )
        return array
    if query.dtype != work.backend.dtype:
        raise LayoutError(f"query is {query.dtype} on the device, the cache {work.backend.dtype}")
    if out is None:
        raise LayoutError("a query on the device needs out=")
    tensor = device_tensor("out", out, work.backend.device, writable=True)
    if tensor is None:
        raise LayoutError("out is in host memory, the query on the device")
    if (tensor.shape, tensor.dtype) != (query.shape, query.dtype):
        raise LayoutError(
            f"out is {tensor.dtype} {list(tensor.shape)} instead of {query.dtype} {list(query.shape)}"
        )
    _check_place(work, tensor, query)
    return tensor


def _check_place(work: Work, out: DeviceTensor, query: DeviceTensor) -> None:
    """Refuse an output whose writing would change what other blocks of the kernel read or write."""
    (begin, end), (first, last) = span(out), span(query)
    if begin == end:
        return
    if begin % 32:  # blocks write in units of that many
        raise LayoutError(f"out begins at {begin:#x}, no multiple of 32 bytes")
    if begin != first and begin < last and first < end:  # query itself is fine: each row is read before
        raise LayoutError(f"out, {begin:#x} to {end:#x}, overlaps query, {first:#x} to {last:#x}")
    pages = work.backend.overlapped(out)
    if pages is not None:
        raise LayoutError(f"out, {begin:#x} to {end:#x}, lies in the cache's own pages at {pages:#x}")


def _put(bits: npt.NDArray[np.uint16], dtype: str, target: npt.NDArray[Any]) -> None:
    """Put the output into its place, in its dtype."""
    kind = "bfloat16" if target.dtype.name == "uint16" else target.dtype.name
    if kind == dtype:
        target.view(np.uint16)[...] = bits
    elif kind == "bfloat16":
        target.view(np.uint16)[...] = to_bits(from_bits(bits, dtype), kind)
    else:
        target[...] = from_bits(bits, dtype)
