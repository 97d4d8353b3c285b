"""The exceptions: who derives from whom, what they carry, and that they survive pickling."""

import pickle

import pytest

import paged_kv
from paged_kv import errors

ATTRIBUTES: dict[str, dict[str, object]] = {
    "OutOfPagesError": {"requested": 9, "free": 1, "evictable": 2, "deferred": 3, "index": 4},
    "NeverFitsError": {"requested": 9, "total": 8, "index": None},
    "SequenceBusyError": {"sequence": 7, "index": 0},
    "SequenceFreedError": {"indices": [1, 3]},
    "RefCountError": {"page": 5, "ref_count": 0},
    "InvalidPageError": {"page": -5, "num_pages": 4},
    "LayoutError": {},
    "CorruptionError": {},
    "NotQuiescentError": {},
    "CacheMemoryError": {"bytes": 1 << 40},
    "DeviceError": {"code": 507015, "name": "ACL_X", "message": "said", "hint": "try"},
}


def test_every_error_is_named_here_and_exported() -> None:
    names = {"PagedKvError", *ATTRIBUTES}
    assert names == set(errors.__all__)
    assert all(getattr(paged_kv, name) is getattr(errors, name) for name in names)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_errors_carry_their_numbers_through_pickling(name: str) -> None:
    error = getattr(errors, name)("what happened", **ATTRIBUTES[name])
    assert isinstance(error, paged_kv.PagedKvError)
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert type(copy) is type(error)
        assert str(copy) == "what happened"
        assert {key: getattr(copy, key) for key in ATTRIBUTES[name]} == ATTRIBUTES[name]


def test_bases_say_what_a_caller_can_do() -> None:
    assert issubclass(errors.OutOfPagesError, MemoryError)
    assert issubclass(errors.CacheMemoryError, MemoryError)
    # A loop that preempts and retries on MemoryError must not spin on what can never fit.
    assert not issubclass(errors.NeverFitsError, MemoryError)
    assert issubclass(errors.LayoutError, ValueError)


def test_errors_from_rust_carry_their_numbers() -> None:
    import numpy as np

    pages = np.zeros((2, 1, 4, 8), np.float32)
    rows = np.zeros((1, 1, 8), np.float32)
    with pytest.raises(paged_kv.InvalidPageError) as caught:
        paged_kv.write_pages(rows, rows, pages, pages.copy(), np.array([8]))
    assert (caught.value.page, caught.value.num_pages) == (2, 2)
    assert pickle.loads(pickle.dumps(caught.value)).num_pages == 2
