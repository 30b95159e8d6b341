import errno
import hashlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import (
    plain_errors,
    read_bytes,
    read_checksum,
    require_file,
    sha256_of,
    write_atomically,
    write_checksum,
)


def test_sha256_is_the_standard_one_and_reports_every_byte(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "f").write_bytes(data)
    told = []
    assert sha256_of(tmp_path / "f", told.append) == hashlib.sha256(data).hexdigest()
    assert sum(told) == len(data)


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_what_a_killed_run_left_behind_is_overwritten(tmp_path):
    (tmp_path / ".f.tmp").write_bytes(b"half of a long file that was never finished")
    write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".f.tmp").symlink_to(victim)
    with pytest.raises(CraftError, match="symbolic links"):
        write_atomically(tmp_path / "f", b"new")
    assert victim.read_bytes() == b"precious"


def test_the_process_umask_decides_who_may_read(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "f", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


WRITE_TOO_MUCH = """
import sys
from pathlib import Path
from lerobot_craft.io.files import write_atomically
from lerobot_craft.errors import CraftError
try:
    write_atomically(Path(sys.argv[1]) / "f", bytes(1 << 20))
except CraftError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_keeps_the_old_file_and_returns_the_space(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", WRITE_TOO_MUCH, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "ulimit -f" in done.stdout
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_full_disk_says_to_free_space_and_run_again():
    with (
        pytest.raises(CraftError, match="free some space, then run the same command again"),
        Path("/dev/full").open("wb", buffering=0) as full,
        plain_errors(Path("cache/shard")),
    ):
        full.write(b"x")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "dmesg"),
        (errno.ESTALE, os.strerror(errno.ESTALE)),
    ],
)
def test_errors_of_the_system_become_sentences(code, words):
    with pytest.raises(CraftError, match=f"cache/shard: .*{words}"), plain_errors(Path("cache/shard")):
        raise OSError(code, os.strerror(code))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(CraftError, match="permission denied"):
        write_atomically(tmp_path / "f", b"")


def test_a_missing_directory(tmp_path):
    with pytest.raises(CraftError, match="no such file"):
        write_atomically(tmp_path / "nowhere" / "f", b"")


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "loop", tmp_path / "missing"):
        for use in (require_file, read_bytes, sha256_of):
            with pytest.raises(CraftError, match=str(path)):
                use(path)


def test_sha256sum_accepts_the_checksum_file(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(b"rows")
    assert write_checksum(path) == read_checksum(path) == hashlib.sha256(b"rows").hexdigest()
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum here")
    subprocess.run([tool, "-c", "--strict", "shard-00000.sha256"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize(
    "text", ["", "x", "0" * 64, f"{'0' * 64}  other\n", f"{'0' * 63}  f.json\n", f"{'0' * 64}  f.json\n\n", "\xff"]
)
def test_a_malformed_checksum_file_is_refused(tmp_path, text):
    (tmp_path / "f.sha256").write_bytes(text.encode("latin-1"))
    with pytest.raises(CraftError, match=r"f\.sha256"):
        read_checksum(tmp_path / "f.json")
