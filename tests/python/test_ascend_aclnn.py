"""CANN's operator in the place of the decode kernel: calls and arguments, on a fake of it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

import paged_kv
from ascend_device import HEADS, append, device_cache, empty_pool, rows, settle
from ascend_support import compiled, fake_runtime
from paged_kv.ascend import aclnn
from paged_kv.ascend.errors import UnavailableError

if TYPE_CHECKING:
    from ascend_fake import Fake


@pytest.fixture
def operators(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Ask for the operator, found on the loader's path."""
    del fake
    folder = fake_runtime()
    options = (f"-L{folder}", f"-Wl,--no-as-needed,-rpath,{folder}", "-lascendcl")
    path = compiled("fake_acl/libopapi.cpp", "-O1", *options, name="libopapi.so")
    monkeypatch.setattr(aclnn, "LIBRARY", str(path))
    monkeypatch.setenv(aclnn.VARIABLE, "aclnn")
    library = ctypes.CDLL(str(path))
    library.fake_opapi_said.restype = ctypes.c_char_p
    return library


def decode(cache: paged_kv.KvCache, **options: object) -> np.ndarray:
    """Two sequences, one step."""
    first, second = cache.sequence(), cache.sequence()
    append(cache, [first, second], [20, 3], 0)
    with cache.batch([first, second], 1) as batch:
        for layer in range(2):
            cache.write(layer, rows(layer, 2), rows(layer + 9, 2), batch)
        out = cache.attend(1, rows(5, 2, HEADS), batch, **options)
    return np.asarray(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_decode_step_goes_through_both_phases(operators, fake: Fake, monkeypatch, dtype) -> None:
    cache = device_cache(dtype=dtype)
    assert cache.device == "ascend:0"
    launches = fake.calls("emu_enqueue")
    got = decode(cache)
    assert fake.calls("emu_enqueue") > launches
    assert operators.fake_opapi_live() == 0  # tensors, lists, arrays and executors are given back
    monkeypatch.setenv(aclnn.VARIABLE, "kernels")
    np.testing.assert_array_equal(got, decode(device_cache(dtype=dtype)))


@pytest.mark.usefixtures("operators")
def test_what_the_operator_does_not_take_is_done_by_the_kernels(monkeypatch) -> None:
    monkeypatch.setattr(aclnn.Operators, "decode", None)  # fails if it is called
    cases = [{"return_lse": True}, {"window_left": 5}, {"logits_soft_cap": 3.0}]
    asked = [decode(device_cache(), **options) for options in cases] + [decode(device_cache(layout="NHD"))]
    with pytest.raises(TypeError):
        decode(device_cache())
    monkeypatch.setenv(aclnn.VARIABLE, "kernels")
    want = [decode(device_cache(), **options) for options in cases] + [decode(device_cache(layout="NHD"))]
    np.testing.assert_array_equal(asked, want)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda shape, dtype: (shape[:3], dtype), b"query is no [B, 4, 1, D]"),
        (lambda shape, dtype: (shape, 27 if dtype == 1 else dtype + 1), b"no int32 table [B, width]"),
        (lambda shape, dtype: (shape, 0 if dtype == 1 else dtype), b"dtypes 0, 0, 0"),
    ],
)
def test_a_refusal_of_the_operator_is_a_typed_error_and_leaves_nothing(
    operators, monkeypatch, wrong, said
) -> None:
    cache = device_cache()
    describe = aclnn._Given._describe
    monkeypatch.setattr(
        aclnn._Given,
        "_describe",
        lambda self, memory, shape, dtype: describe(self, memory, *wrong(shape, dtype)),
    )
    with pytest.raises(paged_kv.DeviceError, match="aclnnIncreFlashAttentionV4GetWorkspaceSize: 161002"):
        decode(cache)
    assert operators.fake_opapi_said() == said
    assert operators.fake_opapi_live() == 0
    settle(cache)
    assert empty_pool(cache)


NHD = {"layout": "NHD", "page_size": 128}


def prefill(cache: paged_kv.KvCache, **options: object) -> np.ndarray:
    """Two sequences, of which one has tokens before, and queries of both."""
    first, second = cache.sequence(), cache.sequence()
    append(cache, [first], 150, 0)
    with cache.batch([first, second], [7, 5]) as batch:
        for layer in range(2):
            cache.write(layer, rows(layer, 12), rows(layer + 9, 12), batch)
        out = cache.attend(1, rows(5, 12, HEADS), batch, **options)
    return np.asarray(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_chunk_of_queries_goes_through_both_phases(operators, monkeypatch, dtype, causal) -> None:
    asked = []
    run = aclnn.Operators._run
    monkeypatch.setattr(
        aclnn.Operators,
        "_run",
        lambda self, lane, name, *rest: asked.append(name) or run(self, lane, name, *rest),
    )
    got = prefill(device_cache(dtype=dtype, **NHD), causal=causal)
    assert asked == [aclnn.PREFILL]
    assert operators.fake_opapi_live() == 0
    monkeypatch.setenv(aclnn.VARIABLE, "kernels")
    np.testing.assert_array_equal(got, prefill(device_cache(dtype=dtype, **NHD), causal=causal))


@pytest.mark.usefixtures("operators")
def test_chunks_that_the_operator_does_not_take_are_done_by_the_kernels(monkeypatch) -> None:
    monkeypatch.setattr(aclnn.Operators, "prefill", None)  # fails if it is called
    cases = [({"return_lse": True}, NHD), ({"window_left": 5}, NHD), ({"logits_soft_cap": 3.0}, NHD)]
    cases += [({}, NHD | sizes) for sizes in ({"page_size": 64}, {"layout": "HND"})]
    asked = [prefill(device_cache(**sizes), **options) for options, sizes in cases]
    with pytest.raises(TypeError):
        prefill(device_cache(**NHD))
    monkeypatch.setenv(aclnn.VARIABLE, "kernels")
    want = [prefill(device_cache(**sizes), **options) for options, sizes in cases]
    np.testing.assert_array_equal(asked, want)


@pytest.mark.parametrize(
    ("number", "value", "said"),
    [
        (27, 3, b"query is no [T, 3, D]"),
        (31, b"BSND", b"layout BSND"),
        (33, 2, b"sparseMode 2"),
        (34, 1, b"innerPrecise 1"),
        (35, 64, b"keys are no [blocks, 64, H]"),
        (4, None, b"sparseMode 3"),
        (6, None, b"a needed argument is null"),
        (14, None, b"a needed argument is null"),
    ],
)
def test_each_argument_of_a_chunk_has_its_place(operators, monkeypatch, number, value, said) -> None:
    run = aclnn.Operators._run

    def wrong(self, lane, name, arguments, arrays) -> None:
        run(self, lane, name, (*arguments[:number], value, *arguments[number + 1 :]), arrays)

    monkeypatch.setattr(aclnn.Operators, "_run", wrong)
    cache = device_cache(**NHD)
    with pytest.raises(paged_kv.DeviceError, match="aclnnFusedInferAttentionScoreV3GetWorkspaceSize: 16100"):
        prefill(cache)
    assert operators.fake_opapi_said() == said
    assert operators.fake_opapi_live() == 0
    settle(cache)
    assert empty_pool(cache)


def test_a_missing_operator_library_is_named_and_another_value_refused(fake: Fake, monkeypatch) -> None:
    del fake
    monkeypatch.setenv(aclnn.VARIABLE, "aclnn")
    monkeypatch.setattr(aclnn, "LIBRARY", "libmissing.so")
    with pytest.raises(UnavailableError, match=r"no operator library: libmissing.so"):
        device_cache()
    monkeypatch.setattr(aclnn, "LIBRARY", str(fake_runtime() / "libascendcl.so"))
    with pytest.raises(UnavailableError, match=r"lacks aclCreateTensor"):
        device_cache()
    monkeypatch.setenv(aclnn.VARIABLE, "atb")
    with pytest.raises(ValueError, match="PAGED_KV_ASCEND_ATTENTION=atb: kernels or aclnn"):
        device_cache()
    monkeypatch.setenv(aclnn.VARIABLE, "")  # as if it were not set
    assert device_cache().device == "ascend:0"
