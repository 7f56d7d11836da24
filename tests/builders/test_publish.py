"""A bundle appears whole or not at all, whatever happens to the one who writes it."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from builders import publish
from builders.publish import building
from edgevlm.bundle import MANIFEST
from edgevlm.errors import BuildError


def make(out, text="new", key="k", **options):
    with building(out, key, force=options.pop("force", False), **options) as work:
        (work / MANIFEST).write_text(text)


def entries(path):
    return sorted(p.name for p in path.iterdir())


def test_only_the_finished_bundle_is_left(tmp_path):
    make(tmp_path / "out")
    assert entries(tmp_path) == ["out"]
    assert entries(tmp_path / "out") == [MANIFEST]


def test_parents_are_made(tmp_path):
    make(tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / MANIFEST).read_text() == "new"


def test_a_bundle_is_replaced_only_when_told_to(tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    with pytest.raises(BuildError, match="--force"):
        make(out)
    assert (out / MANIFEST).read_text() == "old"
    make(out, force=True)
    assert (out / MANIFEST).read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_without_atomic_exchange_the_bundle_is_replaced_too(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    make(tmp_path / "out", "old")
    make(tmp_path / "out", force=True)
    assert (tmp_path / "out" / MANIFEST).read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_somebody_elses_directory_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(BuildError, match="not a bundle"):
        make(tmp_path, force=True)
    assert entries(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_name_that_is_no_directory_is_refused(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("x")
    else:
        (tmp_path / "real").mkdir()
        out.symlink_to(tmp_path / "real")
    with pytest.raises(BuildError, match="not a directory"):
        make(out, force=True)


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).read_text() == "new"


def test_an_error_leaves_the_old_bundle_and_nothing_else(tmp_path):
    make(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), building(tmp_path / "out", "k", force=True) as work:
        (work / MANIFEST).write_text("half")
        raise RuntimeError
    assert (tmp_path / "out" / MANIFEST).read_text() == "old"
    assert entries(tmp_path) == ["out"]


def test_a_full_disk_is_one_clear_error(tmp_path):
    with (
        pytest.raises(BuildError, match="disk of .* is full"),
        building(tmp_path / "out", "k", force=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert entries(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="cannot write"):
        make(tmp_path / "file" / "out")


def test_two_builds_of_one_bundle(tmp_path):
    out = tmp_path / "out"
    with building(out, "k", force=False) as work:
        with pytest.raises(BuildError, match="another build is writing"):
            make(out)
        (work / MANIFEST).write_text("first")
    assert (out / MANIFEST).read_text() == "first"


def _write_and_wait(out, ready):
    with building(out, "k", force=True) as work:
        (work / "stage").write_text("done")
        (work / MANIFEST).write_text("half")
        ready.set()
        time.sleep(60)


@pytest.fixture
def killed(tmp_path):
    """A build of tmp_path/out that was killed half-way, over an older bundle."""
    make(tmp_path / "out", "old")
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_and_wait, args=(tmp_path / "out", ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    return tmp_path / "out"


def test_a_killed_build_leaves_the_old_bundle(killed):
    assert (killed / MANIFEST).read_text() == "old"


def test_the_same_build_goes_on_after_a_kill(killed):
    with building(killed, "k", force=True) as work:
        assert (work / "stage").read_text() == "done"
        (work / MANIFEST).write_text("new")
    assert (killed / MANIFEST).read_text() == "new"
    assert entries(killed.parent) == ["out"]


def test_another_build_starts_afresh_after_a_kill(killed):
    with building(killed, "other", force=True) as work:
        assert not (work / "stage").exists()
        (work / MANIFEST).write_text("new")
    assert entries(killed.parent) == ["out"]


def test_work_worth_keeping_survives_an_error(tmp_path):
    def fail():
        with building(tmp_path / "out", "k", force=False, resumable=lambda work: True) as work:
            (work / "stage").write_text("done")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with building(tmp_path / "out", "k", force=False) as work:
        assert (work / "stage").read_text() == "done"
        (work / MANIFEST).write_text("new")
