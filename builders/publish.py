"""A bundle appears whole under its name, or not at all.

The work happens in a hidden directory beside it, held by a lock that dies with its process, and
is renamed at the end. It knows nothing about what is built.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from edgevlm.bundle import MANIFEST
from edgevlm.errors import BuildError

LOCK = "lock"
KEY = "build.key"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextlib.contextmanager
def building(
    out: Path, key: str, *, force: bool, resumable: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """The directory to build in; published as `out` when the block ends without an error.

    What an earlier run with the same `key` left there is kept, so that it can go on. After an
    error the directory goes away, unless `resumable` says that its work is worth keeping.
    Raises BuildError.
    """
    _check_out(out, force)
    work = out.parent / f".{out.name}.partial"
    with _clear_errors(out), _locked(work) as lock:
        _prepare(work, key)
        try:
            yield work
        except BaseException:
            if not resumable(work):
                shutil.rmtree(work, ignore_errors=True)
            raise
        _sync(work)
        (work / KEY).unlink()
        lock.unlink()
        _publish(work, out)


def _check_out(out: Path, force: bool) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise BuildError(f"{out} exists and is not a directory; choose another name")
    if out.is_dir() and any(out.iterdir()):
        if not (out / MANIFEST).is_file():
            raise BuildError(
                f"{out} exists and is not a bundle: it has no {MANIFEST}; choose another name"
            )
        if not force:
            raise BuildError(f"{out} is a bundle already; give --force to replace it")


@contextlib.contextmanager
def _clear_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(_existing(out)).free
            raise BuildError(
                f"the disk of {out} is full ({free:,} bytes free); free some space and run again"
            ) from error
        raise BuildError(f"cannot write {out}: {error}") from error


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[Path]:
    path = work / LOCK
    while True:
        work.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BuildError(
                    f"another build is writing {work}; wait for it or stop it"
                ) from None
            # The one who held it may have published the directory, and this file with it.
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                yield path
                return


def _prepare(work: Path, key: str) -> None:
    """Keep what the same build left behind, drop everything else."""
    path = work / KEY
    if path.is_file() and path.read_text(encoding="utf-8") == key:
        return
    for entry in work.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    path.write_text(key, encoding="utf-8")


def _sync(work: Path) -> None:
    """Data first, names after: a power cut must not publish empty files."""
    for path in [*work.rglob("*"), work]:
        if path.is_file() or path == work:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _publish(work: Path, out: Path) -> None:
    if not out.exists():
        os.rename(work, out)
        return
    if not _exchange(work, out):
        # No atomic exchange on this file system: the old bundle keeps a name at every moment.
        aside = out.parent / f".{out.name}.old"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(out, aside)
        os.rename(work, out)
        shutil.rmtree(aside, ignore_errors=True)
        return
    shutil.rmtree(work, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0)
