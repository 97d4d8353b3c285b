"""Arrays come in and go out without a copy, whatever their strides; what doesn't fit is refused."""

import ctypes
import gc
import importlib.util
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import paged_kv

HEADS, KV_HEADS, PAGES, PAGE_SIZE, DIM = 4, 2, 3, 4, 8
TOKENS = 5

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


class Exporter:
    """A numpy array that shows nothing but DLPack, and lies about its device if told to."""

    def __init__(self, array: npt.NDArray[Any], *, device: tuple[int, int] = (1, 0), legacy: bool = False):
        self.array, self.device, self.legacy = array, device, legacy

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.legacy and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        return self.array.__dlpack__(**options)


class Case:
    """One sequence of 5 tokens, all of them queries, in pages 2 and 0."""

    def __init__(self, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(3)
        self.query = rng.standard_normal((TOKENS, HEADS, DIM)).astype(dtype)
        self.key_pages, self.value_pages = (
            rng.standard_normal((PAGES, KV_HEADS, PAGE_SIZE, DIM)).astype(dtype) for _ in range(2)
        )
        self.tables = np.array([[2, 0]], np.int32), np.array([TOKENS], np.int32), np.array([0, TOKENS])

    def attend(self, **arguments: Any) -> Any:
        query, key_pages, value_pages = (
            arguments.pop(name, getattr(self, name)) for name in ("query", "key_pages", "value_pages")
        )
        return paged_kv.paged_attention(query, key_pages, value_pages, *self.tables, **arguments)


def strided(array: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Equal arrays that lie differently in memory; the last axis stays contiguous."""
    a, b, *rest = array.shape
    gaps = np.full((2 * a, 3 * b, *rest[:-1], 2 * rest[-1]), np.nan, array.dtype)[::2, ::3, ..., : rest[-1]]
    gaps[:] = array
    return {
        "gaps": gaps,
        "swapped": array.swapaxes(0, 1).copy().swapaxes(0, 1),
        "backwards": array[::-1, ::-1].copy()[::-1, ::-1],
    }


@pytest.mark.parametrize("kind", ["gaps", "swapped", "backwards"])
def test_rows_may_be_strided_either_way(kind: str) -> None:
    case = Case()
    want = case.attend()
    query = strided(case.query)[kind]
    assert not query.flags.c_contiguous
    np.testing.assert_array_equal(case.attend(query=query), want)
    np.testing.assert_array_equal(case.attend(query=Exporter(query)), want)
    out = strided(np.zeros_like(case.query))[kind]
    assert case.attend(out=out) is out
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("kind", ["gaps", "swapped"])
def test_field_c80_strides_of_pages_are_followed(kind: str) -> None:
    case = Case()
    want = case.attend()
    key_pages, value_pages = (strided(pages)[kind] for pages in (case.key_pages, case.value_pages))
    np.testing.assert_array_equal(case.attend(key_pages=key_pages, value_pages=value_pages), want)
    rows = np.ones((1, KV_HEADS, DIM), np.float32)
    paged_kv.write_pages(rows, rows + 1, key_pages, value_pages, np.array([2 * PAGE_SIZE + 3]))
    assert (key_pages[2, :, 3] == 1).all()
    assert (value_pages[2, :, 3] == 2).all()
    np.testing.assert_array_equal(key_pages[:2], case.key_pages[:2])


def test_field_c80_what_cannot_be_followed_is_refused() -> None:
    case = Case()
    with pytest.raises(
        paged_kv.LayoutError, match=r"query must be contiguous along its last axis \(stride 2\)"
    ):
        case.attend(query=np.zeros((TOKENS, HEADS, 2 * DIM), np.float32)[..., ::2])
    with pytest.raises(paged_kv.LayoutError, match="key_pages must be contiguous"):
        case.attend(key_pages=np.zeros((PAGES, KV_HEADS, DIM, PAGE_SIZE), np.float32).swapaxes(2, 3))
    with pytest.raises(paged_kv.LayoutError, match="key_pages runs backwards along axis 0"):
        case.attend(key_pages=case.key_pages[::-1])
    unaligned = np.zeros(4 * TOKENS * HEADS * DIM + 1, np.uint8)[1:].view(np.float32)
    with pytest.raises(paged_kv.LayoutError, match="not aligned"):
        case.attend(query=unaligned.reshape(TOKENS, HEADS, DIM))
    fields = np.zeros((TOKENS, HEADS), np.dtype([("x", np.float32, DIM), ("y", np.int16)]))
    with pytest.raises(paged_kv.LayoutError, match=r"stride of (136|34) bytes"):
        case.attend(query=fields["x"])


@pytest.mark.parametrize("integer", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_tables_may_hold_any_integers_with_any_strides(integer: str) -> None:
    case = Case()
    want = case.attend()
    table, lens, offsets = case.tables
    wide = np.full((1, 4), 77, integer)
    wide[:, ::2] = table
    case.tables = wide[:, ::2], lens.astype(integer)[::-1], Exporter(offsets.astype(integer))  # type: ignore[assignment]
    np.testing.assert_array_equal(case.attend(), want)


@pytest.mark.parametrize("kind", ["broadcast", "window"])
def test_an_out_with_several_elements_in_one_place_is_refused(kind: str) -> None:
    case = Case()
    if kind == "broadcast":
        out = np.lib.stride_tricks.as_strided(np.zeros(DIM, np.float32), case.query.shape, (0, 0, 4))
    else:
        out = np.lib.stride_tricks.as_strided(np.zeros(1000, np.float32), case.query.shape, (128, 28, 4))
    with pytest.raises(paged_kv.LayoutError, match="several elements in one place"):
        case.attend(out=out)


def test_an_out_that_is_read_only_or_an_input_is_refused() -> None:
    case = Case()
    out = np.zeros_like(case.query)
    out.flags.writeable = False
    for readonly in (out, Exporter(out)):
        with pytest.raises(paged_kv.LayoutError, match="out is read-only"):
            case.attend(out=readonly)
    with pytest.raises(paged_kv.LayoutError, match="out overlaps query"):
        case.attend(out=case.query)
    with pytest.raises(paged_kv.LayoutError, match="out overlaps value_pages"):
        case.attend(out=case.value_pages.reshape(-1)[: out.size].reshape(out.shape))
    pages = case.key_pages.copy()
    pages.flags.writeable = False
    rows = np.zeros((1, KV_HEADS, DIM), np.float32)
    with pytest.raises(paged_kv.LayoutError, match="key_pages is read-only"):
        paged_kv.write_pages(rows, rows, pages, case.value_pages, np.array([0]))


@pytest.mark.parametrize(
    "dtype", [np.int32, bool, np.float64, np.complex64, ">f4", ml_dtypes.float8_e4m3fn, object]
)
def test_other_dtypes_are_refused_with_the_list_of_those_that_work(dtype: Any) -> None:
    case = Case()
    query = np.zeros((TOKENS, HEADS, DIM), dtype)
    with pytest.raises(
        paged_kv.LayoutError, match=r"query has dtype .*; supported are float32, float16, bfloat16"
    ):
        case.attend(query=query)
    if np.dtype(dtype) in (np.int32, bool, np.float64, np.complex64):
        with pytest.raises(paged_kv.LayoutError, match="supported are float32"):
            case.attend(query=Exporter(query))
    if dtype is not ml_dtypes.float8_e4m3fn:
        quantised = "int8 and float8_e4m3fn, and uint8 as its bits"
        with pytest.raises(
            paged_kv.LayoutError, match=rf"key_pages has dtype .*; supported are float32.*{quantised}"
        ):
            case.attend(key_pages=case.key_pages.astype(dtype))


@pytest.mark.parametrize(("device", "name"), [((2, 1), "cuda 1"), ((12, 0), "npu"), ((99, 0), "type 99")])
def test_arrays_on_a_device_are_refused(device: tuple[int, int], name: str) -> None:
    case = Case()
    with pytest.raises(paged_kv.LayoutError, match=name):
        case.attend(query=Exporter(case.query, device=device))


@pytest.mark.parametrize("thing", [None, 3, [[[1.0]]], "text", object()])
def test_what_is_no_array_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="query must be a numpy array or have __dlpack__"):
        Case().attend(query=thing)


def test_a_huge_broadcast_is_refused_not_allocated() -> None:
    case = Case()
    huge = np.broadcast_to(np.zeros((), np.int32), (2**50,))
    case.tables = case.tables[0], huge, case.tables[2]
    with pytest.raises(MemoryError):
        case.attend()


@pytest.mark.parametrize("legacy", [False, True])
def test_dlpack_in_gives_a_tensor_that_others_take_without_a_copy(legacy: bool) -> None:
    case = Case()
    out, lse = case.attend(query=Exporter(case.query, legacy=legacy), return_lse=True)
    assert isinstance(out, paged_kv.Tensor)
    assert isinstance(lse, paged_kv.Tensor)
    assert (out.shape, out.strides, out.dtype) == ((TOKENS, HEADS, DIM), (HEADS * DIM, DIM, 1), "float32")
    assert (len(out), out.nbytes, out.readonly) == (TOKENS, 4 * TOKENS * HEADS * DIM, False)
    assert repr(out) == "paged_kv.Tensor(shape=[5, 4, 8], dtype=float32)"
    assert out.data_ptr % 64 == 0
    want, want_lse = case.attend(return_lse=True)
    for view in (np.asarray(out), np.from_dlpack(out)):
        assert view.ctypes.data == out.data_ptr
        assert view.flags.writeable
        np.testing.assert_array_equal(view, want)
    np.testing.assert_array_equal(np.asarray(lse), want_lse)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_tensor_is_what_dlpack_says_of_it(dtype: str) -> None:
    case = Case()
    shape = {
        "num_layers": 1,
        "num_pages": PAGES,
        "page_size": PAGE_SIZE,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
    }
    cache = paged_kv.KvCache(**shape, dtype=dtype)
    sequence = cache.sequence()
    batch = cache.batch([sequence], TOKENS)
    rows = np.random.default_rng(4).standard_normal((TOKENS, KV_HEADS, DIM)).astype(np.float32)
    cache.write(0, rows, -rows, batch)
    case.tables = batch.block_table, batch.seq_lens, batch.cu_seqlens_q
    key_pages, value_pages = cache.key_pages(0), cache.value_pages(0)
    scales: dict[str, Any] = {}
    if dtype in ("int8", "float8_e4m3fn"):
        scales = {"k_scale": cache.key_scales(0), "v_scale": cache.value_scales(0)}
    behind = {name: Exporter(scale) for name, scale in scales.items()}
    want = case.attend(key_pages=Exporter(key_pages), value_pages=Exporter(value_pages), **behind)
    got = case.attend(key_pages=key_pages, value_pages=value_pages, **scales)
    np.testing.assert_array_equal(got, want)
    assert np.abs(np.asarray(got)).max() > 0
    # Refused alike.
    for given in (key_pages, Exporter(key_pages)):
        with pytest.raises(paged_kv.LayoutError, match="query") as refused:
            case.attend(query=given, key_pages=given, value_pages=value_pages, **scales)
        assert f"{dtype} with shape {list(key_pages.shape)} and strides {list(key_pages.strides)}" in str(
            refused.value
        )
        with pytest.raises(paged_kv.LayoutError, match="read-only"):
            paged_kv.write_pages(rows, rows, given, value_pages, np.arange(TOKENS), **scales)


def test_a_tensor_copies_when_asked_and_only_then() -> None:
    case = Case()
    out = case.attend(query=Exporter(case.query))
    assert np.array(out).ctypes.data != out.data_ptr
    assert np.asarray(out, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="only by copying"):
        np.array(out, dtype=np.float64, copy=False)
    copy = np.from_dlpack(out, copy=True)
    assert copy.ctypes.data != out.data_ptr
    np.testing.assert_array_equal(copy, np.asarray(out))


def test_a_tensor_refuses_other_devices_and_streams() -> None:
    case = Case()
    out = case.attend(query=Exporter(case.query))
    assert out.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="2, 0"):
        out.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream 5"):
        out.__dlpack__(stream=5)


def test_views_of_a_tensor_keep_its_memory_alive() -> None:
    case = Case()
    want = case.attend()
    views = []
    for _ in range(20):
        out = case.attend(query=Exporter(case.query))
        views += [np.asarray(out), np.from_dlpack(out)]
        del out
        gc.collect()
    for view in views:
        np.testing.assert_array_equal(view, want)


@pytest.mark.parametrize("legacy", [False, True])
def test_capsules_nobody_takes_free_their_memory(legacy: bool) -> None:
    case = Case()
    out = case.attend(query=Exporter(case.query))
    for _ in range(1000):
        capsule = out.__dlpack__() if legacy else out.__dlpack__(max_version=(1, 0))
        assert ("versioned" in repr(capsule)) is not legacy
        del capsule
    assert len(out) == TOKENS


def test_arrays_are_given_back_after_the_call() -> None:
    class Owned(np.ndarray):  # type: ignore[type-arg]
        pass

    case = Case()
    query = case.query.view(Owned)
    gone = weakref.ref(query)
    case.attend(query=Exporter(query))
    case.attend(query=query)
    del query
    gc.collect()
    assert gone() is None


def test_a_producers_own_error_is_passed_on() -> None:
    class Broken(Exporter):
        def __dlpack__(self, **_options: Any) -> Any:
            raise RuntimeError("sparse")

    case = Case()
    with pytest.raises(RuntimeError, match="sparse"):
        case.attend(query=Broken(case.query))


def test_bfloat16_is_that_of_ml_dtypes_or_its_bits() -> None:
    case = Case(ml_dtypes.bfloat16)
    out = case.attend()
    assert out.dtype == ml_dtypes.bfloat16
    bits = {name: getattr(case, name).view(np.uint16) for name in ("query", "key_pages", "value_pages")}
    as_bits = case.attend(**bits)
    assert as_bits.dtype == np.uint16
    np.testing.assert_array_equal(as_bits.view(ml_dtypes.bfloat16), out)
    tensor = case.attend(query=Exporter(bits["query"]))
    assert tensor.dtype == "bfloat16"
    assert np.asarray(tensor).dtype == ml_dtypes.bfloat16
    assert np.asarray(tensor).ctypes.data == tensor.data_ptr
    np.testing.assert_array_equal(np.asarray(tensor), out)


@needs_torch
def test_torch_bfloat16_goes_in_and_out_without_a_copy() -> None:
    import torch

    case = Case(ml_dtypes.bfloat16)
    want = case.attend()

    def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)

    arguments = {name: to_torch(getattr(case, name)) for name in ("query", "key_pages", "value_pages")}
    out = torch.empty(case.query.shape, dtype=torch.bfloat16)
    assert case.attend(**arguments, out=out) is out
    np.testing.assert_array_equal(out.view(torch.uint16).numpy().view(ml_dtypes.bfloat16), want)

    tensor = case.attend(**arguments)
    back = torch.from_dlpack(tensor)
    assert (back.dtype, back.data_ptr()) == (torch.bfloat16, tensor.data_ptr)
    assert torch.equal(back, out)

    rows = torch.ones(1, KV_HEADS, DIM, dtype=torch.bfloat16)
    paged_kv.write_pages(rows, rows, arguments["key_pages"], arguments["value_pages"], torch.tensor([0]))
    assert (case.key_pages[0, :, 0] == 1).all(), "torch and numpy share the pages that were written"


class Exchanger:
    """A numpy array that its type hands over through C functions, as torch and tvm-ffi do."""

    calls = 0

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    @staticmethod
    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
    def from_object(exchanger: "Exchanger", out: Any) -> int:
        Exchanger.calls += 1
        capsule = exchanger.array.__dlpack__(max_version=(1, 0))
        out[0] = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor_versioned")
        ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), b"used_dltensor_versioned")
        return 0

    class Api(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_uint32 * 2),
            ("previous", ctypes.c_void_p),
            ("allocate", ctypes.c_void_p),
            ("from_object", ctypes.c_void_p),
        )


ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
CURRENT_API = Exchanger.Api((1, 3), None, None, ctypes.cast(Exchanger.from_object, ctypes.c_void_p))
FUTURE_API = Exchanger.Api((2, 0), ctypes.addressof(CURRENT_API), None, None)


@pytest.mark.parametrize("api", [CURRENT_API, FUTURE_API], ids=["current", "future"])
def test_the_c_exchange_api_of_a_type_is_used(api: Exchanger.Api, monkeypatch: pytest.MonkeyPatch) -> None:
    capsule = ctypes.pythonapi.PyCapsule_New(ctypes.byref(api), b"dlpack_exchange_api", None)
    monkeypatch.setattr(Exchanger, "__dlpack_c_exchange_api__", capsule, raising=False)
    case = Case()
    want = case.attend()
    before = Exchanger.calls
    out = np.zeros_like(case.query)
    given = Exchanger(out)
    assert case.attend(query=Exchanger(case.query), out=given) is given
    assert Exchanger.calls == before + 2
    np.testing.assert_array_equal(out, want)
