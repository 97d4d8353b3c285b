"""The emulation of Ascend C: each wrong kernel is refused by the one rule it breaks, the right ones run."""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest

from ascend_support import ASCEND, address, build

SOURCE = (ASCEND / "tests" / "faults.cpp").read_text()
RULES = re.findall(r'constexpr Rule \w+\{"([a-z-]+)"', (ASCEND / "emu" / "rules.h").read_text())
KERNELS = re.findall(r"^KERNEL\((\w+)\)", SOURCE, re.MULTILINE)
RIGHT = [name for name in KERNELS if name.startswith("right_")]
WRONG = [name for name in KERNELS if name not in RIGHT]

# Kernels that break a rule in another way than the one named after it.
OTHER_WAYS = {
    "race_on_missing_dequeue": "race-read-after-write",
    "race_with_scalar": "race-read-after-write",
    "race_in_global_memory": "race-read-after-write",
}


def rule_of(kernel: str) -> str:
    """Find the rule that a kernel's name begins with."""
    return OTHER_WAYS.get(kernel) or max(
        (rule for rule in RULES if kernel.startswith(rule.replace("-", "_"))), key=len
    )


def library() -> ctypes.CDLL:
    faults = build("tests/faults.cpp", "-O1")
    faults.kernel_names.restype = ctypes.c_char_p
    return faults


class Arrays(ctypes.Structure):
    """What the kernels of faults.cpp work on."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("source", "target")]


def run(kernel: str) -> tuple[str, str]:
    """Return the rule that the kernel broke and the message, or two empty strings."""
    faults = library()
    source, target = np.ones(256, np.float32), np.zeros(256, np.float32)
    faults.emu_clear_memory()
    faults.emu_add_memory(address(source), source.nbytes, 0)
    faults.emu_add_memory(address(target), target.nbytes, 1)
    arrays = Arrays(source.ctypes.data, target.ctypes.data)
    status = faults.run_kernel(kernel.encode(), arrays)
    rule, message = faults.emu_rule().decode(), faults.emu_message().decode()
    assert status == (rule != "")
    return rule, message


def lines(start: str, end: str) -> range:
    """Return the lines of faults.cpp from `start` to the next `end`."""
    first = SOURCE.index(start)
    return range(SOURCE[:first].count("\n") + 1, SOURCE[: SOURCE.index(end, first)].count("\n") + 3)


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_refused_by_its_rule_and_told_where(kernel: str) -> None:
    rule, message = run(kernel)
    assert rule == rule_of(kernel), message
    where, what, _ = re.fullmatch(
        rf"kernel {kernel}, block \d, (.+?): {rule}: (.+) \[(.+)\]", message
    ).groups()
    assert what
    if rule in ("queue-left", "flag-left"):
        assert where == "the kernel's end:0"
    else:
        file, line = where.split(":")
        one_line = f"KERNEL({kernel}) {{ " in SOURCE
        body = lines(f"KERNEL({kernel})", "}\n" if one_line else "\n}\n")
        assert file == "faults.cpp"
        assert int(line) in body or int(line) in lines("struct Bench", "\n};\n"), message


@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_runs(kernel: str) -> None:
    assert run(kernel) == ("", "")


def test_every_rule_has_a_kernel_that_breaks_it() -> None:
    assert {rule_of(kernel) for kernel in WRONG} == set(RULES)
    assert len(RULES) >= 30
    assert sorted(library().kernel_names().decode().split()) == sorted(KERNELS)


def test_an_unknown_kernel_is_not_taken_for_a_right_one() -> None:
    assert library().run_kernel(b"missing", Arrays()) == -1


def test_halves_and_bfloats_convert_as_in_numpy() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    halves = np.empty(65536, np.float32)
    library().widen(address(bits), address(halves), 65536)
    np.testing.assert_array_equal(halves, bits.view(np.float16).astype(np.float32))

    # Every half, the middle between any two, and a little to each side of it; then anything at all.
    exact = halves[np.isfinite(halves)]
    middle = (exact[:-1] + exact[1:]) / 2
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    sides = [np.nextafter(middle, np.float32(sign * np.inf)) for sign in (1, -1)]
    edges = np.array([np.inf, -np.inf, 65519, 65520, 0.0, -0.0], np.float32)
    values = np.concatenate([exact, middle, *sides, random[~np.isnan(random)], edges])
    narrow, brains = np.empty(len(values), np.uint16), np.empty(len(values), np.uint16)
    library().narrow(address(values), address(narrow), address(brains), len(values))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow, values.astype(np.float16).view(np.uint16))
        np.testing.assert_array_equal(brains, values.astype(ml_dtypes.bfloat16).view(np.uint16))
