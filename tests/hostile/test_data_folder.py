"""Attacks on the folder that `SandboxConfig.data` shows to guest code: nothing writes to it or leads out of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import Sandbox, SandboxConfig, SandboxUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "4a9c71"
ATTACKS = {
    "write": "open('/data/a.txt', 'w')",
    "append": "open('/data/a.txt', 'a')",
    "a new file": "open('/data/new', 'x')",
    "a new folder": "os.mkdir('/data/new')",
    "a folder below": "open('/data/sub/new', 'x')",
    "remove": "os.unlink('/data/a.txt')",
    "rename": "os.rename('/data/a.txt', '/data/b.txt')",
    "replace": "open('/tmp/x', 'w').close(); os.replace('/tmp/x', '/data/a.txt')",
    "mode": "os.chmod('/data/a.txt', 0o777)",
    "owner": "os.chown('/data/a.txt', 0, 0)",
    "time": "os.utime('/data/a.txt', (1, 1))",
    "truncate": "os.truncate('/data/a.txt', 0)",
    "a link to it": "os.link('/data/a.txt', '/tmp/a')",
    "a link in it": "os.symlink('/tmp', '/data/link')",
    "attribute": "os.setxattr('/data/a.txt', 'user.x', b'1')",
    "shared mapping": "mmap.mmap(os.open('/data/a.txt', os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_WRITE)[:1] = b'x'",
    "through the descriptor": "os.write(os.open('/data/a.txt', os.O_RDONLY), b'x')",
    "mount again": "worked(libc.mount(b'none', b'/data', None, 32, None))",
    "mount over": "worked(libc.mount(b'/tmp', b'/data', None, 4096, None))",
    "unmount": "worked(libc.umount2(b'/data', 2))",
    "read by a link": "print(open('/data/out.txt').read())",
    "read by a relative link": "print(open('/data/up.txt').read())",
    "a linked folder": "print(os.listdir('/data/folder'))",
    "the parent": "print(open('/data/../secret.txt').read())",
    "the parent of a descriptor": "print(os.read(os.open('../secret.txt', 0, dir_fd=os.open('/data', 0)), 9))",
    "what others may not read": "print(open('/data/private.txt').read())",
}  # fmt: skip
MISUSED = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
def worked(result):
    if result != 0: raise OSError
try: {}
except (OSError, TypeError): pass
else: print('done')
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret.txt").write_text(SECRET)
    data = outside / "data"
    (data / "sub").mkdir(parents=True)
    (data / "a.txt").write_text("as it was")
    (data / "sub" / "b.txt").write_text("below")
    (data / "out.txt").symlink_to(outside / "secret.txt")
    (data / "up.txt").symlink_to("../secret.txt")
    (data / "folder").symlink_to(outside)
    for path in (data, *data.rglob("*")):  # nothing but the mount keeps guest code from them
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    (data / "private.txt").write_text(SECRET)
    (data / "private.txt").chmod(0o600)
    return data


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(folder: Path) -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=2, data=folder)) as sandbox:
        yield sandbox


def seen(folder: Path) -> list[tuple[object, ...]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [(str(path), path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns) for path in files]


@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_changes_the_folder_or_leads_out_of_it(box: Sandbox, folder: Path, name: str) -> None:
    if name == "what others may not read" and os.geteuid() != 0:
        pytest.skip("guest code has the id of this user, who may read it")
    before = seen(folder)
    result = await box.run(MISUSED.format(ATTACKS[name]))
    assert (result.outcome, result.stdout) == ("ok", ""), result.stderr
    assert seen(folder) == before
    honest = await box.run("print(open('/data/a.txt').read(), open('/data/sub/b.txt').read())")
    assert honest.stdout == "as it was below\n"


async def test_without_the_option_there_is_no_such_folder() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as box:
        assert (await box.run("import os; print(os.path.lexists('/data'))")).stdout == "False\n"


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="nowhere"):
        async with Sandbox(SandboxConfig(slots=1, data=tmp_path / "nowhere")):
            pass


async def test_without_a_jail_no_folder_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data"):
        SandboxConfig(isolation="none", data=tmp_path)
