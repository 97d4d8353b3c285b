"""The table for ctypes and the shared structures, against declarations in C; what is missing is said."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from ascend_support import ASCEND, ROOT, compiled, fake_runtime
from paged_kv import DeviceError, PagedKvError, ascend
from paged_kv.ascend import acl, build, errors, tiling
from paged_kv.ascend.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

DECLARED = re.findall(
    r"^([\w ]+\*?) (acl\w+)\(([^)]*)\);", (ASCEND / "fake_acl" / "acl.h").read_text(), re.MULTILINE
)
SCALARS = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
}


def as_ctypes(declaration: str) -> type:
    """Translate a parameter of a C declaration."""
    kind, stars, _ = re.fullmatch(r"(?:const )?(\w+)( ?\**) ?(\w+)", " ".join(declaration.split())).groups()
    depth = stars.count("*")
    if kind == "void":
        return [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)][depth - 1]
    if kind == "char":
        return ctypes.c_char_p
    base = SCALARS.get(kind) or getattr(acl, kind)
    return ctypes.POINTER(base) if depth else base


@pytest.mark.parametrize(("result", "name", "parameters"), DECLARED, ids=[name for _, name, _ in DECLARED])
def test_each_function_has_the_arguments_of_its_declaration(result, name, parameters) -> None:
    if name in acl.TEXTS:
        assert (result, parameters) == ("const char*", "")
        return
    assert result == "int"
    declared = [as_ctypes(parameter) for parameter in parameters.split(",") if parameter]
    assert (acl.REQUIRED | acl.OPTIONAL)[name] == declared


def test_every_function_of_the_table_is_declared() -> None:
    assert {name for _, name, _ in DECLARED} == {*acl.REQUIRED, *acl.OPTIONAL, *acl.TEXTS}
    assert acl.REQUIRED.keys().isdisjoint(acl.OPTIONAL)


class Entry(ctypes.Structure):
    """A line of ascend/tests/layout.cpp."""

    _fields_ = (
        ("structure", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
    )


def test_shared_structures_have_their_fields_where_the_compiler_puts_them() -> None:
    library = ctypes.CDLL(str(compiled("tests/layout.cpp", "-O0")))
    library.layout_entry.restype, library.layout_entry.argtypes = Entry, [ctypes.c_size_t]
    told: dict[str, dict[str, tuple[int, int]]] = {}
    for i in range(1000):
        entry = library.layout_entry(i)
        if entry.structure is None:
            break
        told.setdefault(entry.structure.decode(), {})[entry.name.decode()] = (entry.offset, entry.size)
    for name, fields in told.items():
        structure = getattr(tiling, name, None) or getattr(acl, name)
        assert fields.pop("") == (0, ctypes.sizeof(structure))
        descriptors = {label: getattr(structure, label) for label, *_ in structure._fields_}
        assert fields == {label: (one.offset, one.size) for label, one in descriptors.items()}, name
    declared = {
        name
        for module in (acl, tiling)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure | ctypes.Union)
    }
    assert declared - set(told) == {"DecodeArrays", "PrefillArrays"}  # pointers only, which entry.cpp reads


# ---- without CANN, and with the wrong one ----


def run(program: str, **environment: str) -> str:
    """Run Python without CANN in its environment; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("ASCEND_HOME_PATH", "PAGED_KV_ASCEND_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_field_c81_everything_imports_without_cann_and_says_what_is_missing() -> None:
    program = """
import paged_kv, paged_kv.ascend as ascend
import paged_kv.ascend.binary, paged_kv.ascend.__main__
maps = open("/proc/self/maps").read()
assert "libascendcl" not in maps and "libacl_rt" not in maps
ready = ascend.is_available()
assert not ready
print(ready.reason)
for function in (ascend.open_device, ascend.info):
    try:
        function(0)
    except paged_kv.DeviceError as error:
        assert isinstance(error, ascend.UnavailableError) and error.hint
        assert str(error) == ready.reason
"""
    reason = run(program)
    assert "no CANN runtime: libascendcl.so: cannot open shared object file" in reason
    assert "libacl_rt.so: cannot open" in reason
    assert "source its set_env.sh" in reason


def broken_home(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").write_bytes(content)
    return str(tmp_path)


def test_field_c81_a_library_that_is_none_is_named_with_what_is_wrong(tmp_path) -> None:
    home = broken_home(tmp_path, b"not a library")
    reason = run("from paged_kv import ascend; print(ascend.is_available().reason)", ASCEND_HOME_PATH=home)
    assert f"{home}/lib64/libascendcl.so: " in reason
    assert "too short" in reason or "invalid ELF header" in reason
    assert f"{home}/lib64/libacl_rt.so: cannot open" in reason


def without(*names: str) -> bytes:
    """Return the fake runtime as if it had never had these functions."""
    content = (fake_runtime() / "libascendcl.so").read_bytes()
    for name in names:
        assert f"\0{name}\0".encode() in content
        content = content.replace(f"\0{name}\0".encode(), f"\0X{name[1:]}\0".encode())
    return content


def test_field_c81_a_runtime_that_lacks_what_is_needed_is_refused_by_name(tmp_path) -> None:
    home = broken_home(tmp_path, without("aclrtStreamWaitEvent", "aclrtMemsetAsync"))
    reason = run("from paged_kv import ascend; print(ascend.is_available().reason)", ASCEND_HOME_PATH=home)
    assert "libascendcl.so lacks aclrtStreamWaitEvent, aclrtMemsetAsync" in reason
    assert "CANN 8.5" in reason


def test_what_an_older_runtime_lacks_is_done_without_or_refused(tmp_path) -> None:
    names = [
        "aclrtGetVersion",
        "aclrtGetDeviceInfo",
        "aclrtSynchronizeStreamWithTimeout",
        "aclrtCmoAsync",
        "aclrtBinaryLoadFromFile",
    ]
    program = """
from paged_kv import ascend
from paged_kv.ascend.binary import KernelBinary
device = ascend.open_device(0)
stream = ascend.Stream(device)
memory = ascend.allocate(device, 64)
assert memory.prefetch(stream) is False
assert device.num_vector_cores == 40
described = ascend.info()
print(*described.lacks)
assert (described.runtime_version, described.vector_cores, described.l2_bytes) == (None, None, None)
for attempt in (lambda: stream.synchronize(timeout=1.0), lambda: KernelBinary(device, "/nowhere")):
    try:
        attempt()
        raise SystemExit("passed")
    except ascend.UnavailableError as error:
        print(error)
stream.synchronize()
"""
    told = run(program, ASCEND_HOME_PATH=broken_home(tmp_path, without(*names)))
    lacks, timeout, binary = told.splitlines()
    assert set(names) <= set(lacks.split())
    assert "lacks aclrtSynchronizeStreamWithTimeout" in timeout
    assert "lacks aclrtBinaryLoadFromFile" in binary


# ---- errors ----


@pytest.mark.parametrize(
    ("code", "name", "hint"),
    [
        (507015, "ACL_ERROR_RT_AICORE_EXCEPTION", "block-table"),
        (107003, "ACL_ERROR_RT_STREAM_CONTEXT", "another context"),
        (207001, "ACL_ERROR_RT_MEMORY_ALLOCATION", "fewer pages"),
        (100002, "ACL_ERROR_REPEAT_INITIALIZE", "fine"),
        (500001, "ACL_ERROR_GE_FAILURE", "different CANN versions"),
        (999999, "ACL_ERROR_999999", ""),
    ],
)
def test_a_code_has_a_name_and_a_hint(code, name, hint) -> None:
    error = errors.device_error("aclrtX", code, "the runtime\n  said this ")
    assert isinstance(error, PagedKvError)
    assert (error.code, error.name, error.message) == (code, name, "the runtime said this")
    assert hint in error.hint
    assert str(error).startswith(f"aclrtX: {code} {name}: the runtime said this")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.hint) == (str(error), code, error.hint)


# ---- building ----


def test_the_kernels_sources_are_in_the_package_and_nothing_of_the_tests_is() -> None:
    package = ROOT / "python" / "paged_kv"
    assert sorted(p.name for p in build.sources().iterdir()) == sorted(
        p.name for p in (ASCEND / "kernel").iterdir()
    )
    assert build.sources().resolve() == ASCEND / "kernel"  # one source of truth
    assert not [path for path in package.rglob("*") if path.name in ("fake_acl", "emu", "libascendcl.so")]


def test_building_without_bisheng_says_where_it_was_looked_for(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert main(["build"]) == 1
    assert (
        "no bisheng, CANN's compiler: looked in $ASCEND_HOME_PATH, which is not set" in capfd.readouterr().err
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    assert main(["build"]) == 1
    assert f"{tmp_path}/cann/bin/bisheng" in capfd.readouterr().err


def stand_in(folder: Path, body: str) -> None:
    """Put a program called bisheng where CANN has it."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "bisheng"
    program.write_text(f"#!{shutil.which('sh')}\n{body}\n")
    program.chmod(0o755)


def test_building_calls_bisheng_as_documented_and_replaces_in_one_step(tmp_path, monkeypatch, capfd) -> None:
    stand_in(
        tmp_path / "cann",
        'echo "$@" > "$(dirname "$0")/arguments"; while [ "$1" != -o ]; do shift; done; echo x > "$2"',
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["build"]) == 0
    target = build.library_path()
    assert capfd.readouterr().out == f"built {target}\n"
    assert target.read_text() == "x\n"
    assert list(target.parent.iterdir()) == [target]
    arguments = (tmp_path / "cann" / "bin" / "arguments").read_text().split()
    assert arguments[:6] == ["-O2", "-std=c++17", "-fPIC", "-shared", "-xcce", "--npu-arch=dav-2201"]
    assert arguments[6] == str(build.sources() / "entry.cpp")
    assert main(["build", "--output", str(tmp_path / "here.so")]) == 0
    assert (tmp_path / "here.so").exists()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path, monkeypatch, capfd) -> None:
    stand_in(tmp_path / "cann", "echo no such intrinsic >&2; exit 3")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    assert main(["build", "--output", str(tmp_path / "out" / "here.so")]) == 1
    assert "failed with status 3:\nno such intrinsic" in capfd.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kernel_library_that_is_missing_or_another_one_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAGED_KV_ASCEND_KERNELS", str(tmp_path / "none.so"))
    with pytest.raises(ascend.UnavailableError, match=r"none\.so \(run python -m paged_kv\.ascend build\)"):
        ascend.load_kernels()
    with pytest.raises(ascend.UnavailableError, match="lacks plan_decode"):
        ascend.KernelLibrary(fake_runtime() / "libascendcl.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ascend.UnavailableError, match="can't be loaded"):
        ascend.KernelLibrary(tmp_path / "text.so")


def test_loading_from_many_threads_loads_once(monkeypatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(fake_runtime().parent))
    monkeypatch.setattr(acl, "_loaded", None)
    found: list[acl.Acl] = []
    threads = [threading.Thread(target=lambda: found.append(acl.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    with pytest.raises(AttributeError):
        found[0].aclrtNothing()
    assert isinstance(DeviceError(), PagedKvError)
