"""Builds the kernel library by CANN's compiler, from the sources that travel with the package."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from paged_kv.ascend.errors import unavailable

__all__ = ["build_kernels", "compiler", "library_path", "sources"]

ARCHITECTURE = "dav-2201"
"""Atlas A2 and A3."""


def sources() -> Path:
    """Return the folder of the kernels' sources, which come with the package."""
    return Path(__file__).parent / "kernel"


def library_path() -> Path:
    """Return where the library of this version's kernels is built and looked for.

    A folder of the user's cache; the name holds a digest of the sources, so that another version
    of the package never loads it.
    """
    digest = hashlib.sha256(ARCHITECTURE.encode())
    for file in sorted(sources().iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paged_kv" / "ascend" / f"libpaged_kv_ascend-{digest.hexdigest()[:16]}.so"


def compiler() -> Path:
    """Find bisheng: in ``$ASCEND_HOME_PATH``, else on the path.

    Raises
    ------
    UnavailableError
        It isn't there; the message says where it was looked for.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    places = (
        [Path(home, *rest, "bisheng") for rest in (["bin"], ["compiler", "ccec_compiler", "bin"])]
        if home
        else []
    )
    found = next((str(place) for place in places if os.access(place, os.X_OK)), None) or shutil.which(
        "bisheng"
    )
    if found:
        return Path(found)
    looked = ", ".join(map(str, places)) or "$ASCEND_HOME_PATH, which is not set,"
    raise unavailable(
        f"no bisheng, CANN's compiler: looked in {looked} and on PATH",
        "install the CANN toolkit 8.5 or newer and source its set_env.sh",
    )


def command(target: Path) -> list[str]:
    """Return the command line that builds `target`."""
    options = ["-O2", "-std=c++17", "-fPIC", "-shared", "-xcce", f"--npu-arch={ARCHITECTURE}"]
    return [str(compiler()), *options, str(sources() / "entry.cpp"), "-o", str(target)]


def build_kernels(target: Path | None = None) -> Path:
    """Build the kernel library.

    Parameters
    ----------
    target : Path, optional
        The file to write; without it one in the user's cache, named by a digest of the sources.

    Returns
    -------
    Path
        What was written. An older file is replaced in one step.

    Raises
    ------
    UnavailableError
        There is no compiler, or it fails; its messages are in the error. Or the file can't be written.
    """
    target = target or library_path()
    try:
        _build(target)
    except OSError as error:
        raise unavailable(f"{target} can't be built: {error}", "name another file by --output") from error
    return target


def _build(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        line = command(fresh)
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise unavailable(
                f"{' '.join(line)} failed with status {done.returncode}:\n{done.stderr.strip()}"
            )
        fresh.replace(target)
