"""The scripts of jetson/ against copies of machines, with every command that they call replaced.

The replacements write what they were called with into calls.txt, and do as little as the real ones
would have to do for the scripts to notice.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgevlm.boards import JETPACKS, JetPack
from edgevlm.device import read_machine
from edgevlm.machine_checks import HEADLESS, NO_ZRAM, machine_checks

ROOT = Path(__file__).resolve().parents[1]
TREES = ROOT / "tests" / "trees"
NANO, NX, AGX, THOR = (
    "orin-nano-8gb-jp62",
    "orin-nx-16gb-l4t-36.4.7",
    "agx-orin-64gb-jp72",
    "thor-t5000-jp72",
)
# By command: what it does beside writing its words down. $R is the copy of the machine.
TOOLS = {
    "id": "echo 1000",
    "sudo": '"$@"',
    "apt-get": """[ "$1" = install ] || exit 0
for word; do case $word in install | -*) ;; *)
printf '\\nPackage: %s\\nStatus: install ok installed\\n' "$word" >> "$R/var/lib/dpkg/status" ;;
esac; done""",
    "nvpmodel": """[ ! -e "$R/needs-reboot" ] || exit 1
[ "$1" != -m ] || printf 'pmode:%04d' "$2" > "$R/var/lib/nvpmodel/status\"""",
    "jetson_clocks": """case ${1:-} in
--store) [ ! -e "$2" ] || exit 1; cat "$R/var/lib/nvpmodel/status" > "$2" ;;
--restore) [ -e "$2" ] ;;
esac""",
    "systemctl": """case $1 in
set-default) ln -sfn "/lib/systemd/system/$2" "$R/etc/systemd/system/default.target" ;;
cat) [ ! -e "$R/no-zram-unit" ] ;;
is-enabled) cat "$R/zram" ;;
enable) echo enabled > "$R/zram" ;;
disable) echo disabled > "$R/zram" ;;
esac""",
    "swapoff": 'sed -i "\\\\,^$1 ,d" "$R/proc/swaps"',
    "sync": "",
}
VENV = """#!/bin/bash
echo "python3 $*" >> "$R/calls.txt"
[ "$1 $2 $3" = "-m venv --system-site-packages" ] || exit 1
mkdir -p "$4/bin"
printf 'include-system-site-packages = true\\nversion = VERSION.12\\n' > "$4/pyvenv.cfg"
for name in python edgevlm; do
  printf '#!/bin/bash\\necho "venv %s $*" >> "%s/calls.txt"\\n' "$name" "$R" > "$4/bin/$name"
  chmod +x "$4/bin/$name"
done
echo 'if [ -e "'"$R"'/sick" ]; then exit 1; fi' >> "$4/bin/edgevlm"
"""


class Board:
    """A copy of a tree, with commands of its own."""

    def __init__(self, tree: str, folder: Path) -> None:
        self.root = folder / "root"
        self.venv = folder / "venv"
        shutil.copytree(TREES / tree, self.root, symlinks=True)
        (self.root / "zram").write_text("enabled\n")
        (self.root / "proc/sys/vm").mkdir(parents=True)
        for name, does in TOOLS.items():
            note = f'echo "{name} $*" >> "$R/calls.txt"'
            if name in ("id", "systemctl"):  # questions are not calls
                note = f"case ${{1:-}} in cat | is-enabled | -u | -un) ;; *) {note} ;; esac"
            self.tool(name, f"#!/bin/bash\n{note}\n{does}\n")
        for version in ("3.10", "3.12"):
            self.tool(f"python{version}", VENV.replace("VERSION", version))

    def tool(self, name: str, text: str) -> None:
        path = self.root / "usr/bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, path: str | None = None) -> tuple[int, str]:
        """(exit status, stdout and stderr)"""
        done = subprocess.run(
            [str(ROOT / "jetson" / script), *arguments, "--root", str(self.root)],
            env={"PATH": path or os.environ["PATH"], "HOME": "/nowhere", "R": str(self.root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def setup(self, *arguments: str) -> tuple[int, str]:
        return self.run("setup.sh", "--venv", str(self.venv), *arguments)

    def calls(self) -> list[str]:
        """What was called since the last time, with our folders written as R and VENV."""
        path = self.root / "calls.txt"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        text = text.replace(str(self.root), "R").replace(str(self.venv), "VENV")
        return text.replace(str(ROOT), "CHECKOUT").splitlines()

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): str(path.readlink())
            if path.is_symlink()
            else path.read_bytes().hex()
            for path in self.root.rglob("*")
            if (path.is_symlink() or path.is_file()) and path.name != "calls.txt"
        }


@pytest.fixture
def nano(tmp_path: Path) -> Board:
    return Board(NANO, tmp_path)


# --- setup.sh ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "python", "extra", "packages"),
    [
        (NANO, "3.10", "jetson6", "libnvinfer-plugin10 libnvonnxparsers10 python3.10-venv"),
        (
            THOR,
            "3.12",
            "jetson7",
            "libnvinfer-plugin10 libnvonnxparsers10 python3-libnvinfer python3.12-venv",
        ),
    ],
)
def test_setup_calls(tree: str, python: str, extra: str, packages: str, tmp_path: Path) -> None:
    board = Board(tree, tmp_path)
    status, text = board.setup("--yes")
    assert status == 0, text
    install = f"apt-get install --yes --no-install-recommends {packages}"
    pip = f"venv python -m pip --disable-pip-version-check install --editable CHECKOUT[{extra}]"
    assert board.calls() == [
        "sudo apt-get update",
        "apt-get update",
        f"sudo {install}",
        install,
        "python3 -m venv --system-site-packages VENV",
        pip,
        "venv edgevlm doctor --root R",
    ]
    assert f"Python {python}" in text
    # Again: nothing is missing any more.
    status, text = board.setup("--yes")
    assert status == 0, text
    assert board.calls() == [pip, "venv edgevlm doctor --root R"]


def test_setup_ends_as_doctor_does(nano: Board) -> None:
    (nano.root / "sick").touch()
    status, text = nano.setup("--yes")
    assert status == 1, text
    assert nano.calls()[-1] == "venv edgevlm doctor --root R"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "bundle.json").touch()
    return path


def test_setup_installs_the_service_last(nano: Board, bundle: Path) -> None:
    status, text = nano.setup("--yes", "--service", str(bundle))
    assert status == 0, text
    calls = nano.calls()
    assert any(call.endswith("--editable CHECKOUT[jetson6,server]") for call in calls)
    after = calls[calls.index("venv edgevlm doctor --root R") + 1 :]
    assert [call for call in after if call.startswith("systemctl")] == [
        "systemctl daemon-reload",
        "systemctl enable edgevlm.service",
        "systemctl restart edgevlm.service",
    ]
    unit = (nano.root / "etc/systemd/system/edgevlm.service").read_text().splitlines()
    assert f"ExecStart={nano.venv}/bin/edgevlm serve ${{BUNDLE}} $OPTIONS" in unit
    assert "User=1000" in unit, "who id says ran it"
    conf = nano.root / "etc/edgevlm.conf"
    assert conf.read_text() == f"BUNDLE={bundle}\nOPTIONS=\n"
    # Again: what its owner wrote there stays.
    conf.write_text(f"BUNDLE={bundle}\nOPTIONS=--port 9000\n")
    assert nano.setup("--yes", "--service", str(bundle))[0] == 0
    assert "OPTIONS=--port 9000" in conf.read_text()


def test_setup_leaves_the_service_out_when_doctor_found_something(
    nano: Board, bundle: Path
) -> None:
    (nano.root / "sick").touch()
    status, text = nano.setup("--yes", "--service", str(bundle))
    assert status == 1
    assert text.splitlines()[-1].startswith("error: the service was left out")
    assert nano.calls()[-1] == "venv edgevlm doctor --root R"


@pytest.mark.parametrize("case", ["no bundle", "odd path", "other bundle"])
def test_setup_refuses_a_service_that_could_not_start(
    case: str, nano: Board, bundle: Path, tmp_path: Path
) -> None:
    says = {
        "no bundle": "is no bundle",
        "odd path": "misread",
        "other bundle": "another",
    }
    if case == "no bundle":
        (bundle / "bundle.json").unlink()
    elif case == "odd path":
        bundle = bundle.rename(tmp_path / "a $HOME bundle")
    else:
        (nano.root / "etc/edgevlm.conf").write_text("BUNDLE=/elsewhere\n")
    before = nano.files()
    status, said = nano.setup("--yes", "--service", str(bundle))
    assert (status, nano.calls(), nano.files()) == (1, [], before)
    assert says[case] in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("setup.sh", "--yes"),
        ("max_performance.sh", "on"),
        ("free_memory.sh", "headless"),
        ("free_memory.sh", "zram-off"),
        ("free_memory.sh", "drop-caches"),
    ],
)
def test_a_dry_run_says_all_and_does_nothing(script: str, command: str, nano: Board) -> None:
    before = nano.files()
    venv = ("--venv", str(nano.venv)) if script == "setup.sh" else ()
    status, said = nano.run(script, command, "--dry-run", *venv)
    assert status == 0, said
    assert nano.calls() == []
    assert nano.files() == before
    assert not nano.venv.exists()
    assert nano.run(script, command, *venv)[0] == 0
    done = [call for call in nano.calls() if not call.startswith(("apt-get", "venv"))]
    for call in done:
        words = call.replace("R/", f"{nano.root}/").replace("VENV", str(nano.venv))
        assert words.removeprefix("python3 ").rstrip() in said


def test_setup_asks_before_it_starts(nano: Board) -> None:
    before = nano.files()
    status, text = nano.setup()
    assert (status, nano.calls(), nano.files()) == (1, [], before)
    assert "--yes" in text.splitlines()[-1]


@pytest.mark.parametrize("release", JETPACKS, ids=lambda release: release.l4t)
def test_setup_takes_the_releases_that_boards_takes(release: JetPack, tmp_path: Path) -> None:
    major, rest = release.l4t.split(".", 1)
    for chip in ("tegra234", "tegra264"):
        if chip == "tegra264" and "Thor" not in release.boards:
            continue
        root = tmp_path / chip
        (root / "etc").mkdir(parents=True)
        (root / "etc/nv_tegra_release").write_text(
            f"# R{major} (release), REVISION: {rest}, GCID: 1, BOARD: generic\n"
        )
        (root / "proc/device-tree").mkdir(parents=True)
        (root / "proc/device-tree/compatible").write_bytes(
            b"nvidia,p0\0nvidia,%s\0" % chip.encode()
        )
        done = subprocess.run(
            [ROOT / "jetson/setup.sh", "--dry-run", "--root", root, "--venv", tmp_path / "venv"],
            capture_output=True,
            text=True,
        )
        if release.lowering is None or (chip == "tegra234" and "Orin" not in release.boards):
            assert done.returncode == 1
            assert done.stdout == ""
            assert re.fullmatch(r"error: L4T .* flash JetPack .*\n", done.stderr)
        else:
            assert done.returncode == 0, done.stderr
            extra = "jetson6" if release.cuda.startswith("12.") else "jetson7"
            assert f"Python {release.python}, [{extra}]" in done.stdout


@pytest.mark.parametrize(
    ("tree", "text", "says"),
    [
        ("laptop-no-gpu", None, "this is no Jetson"),
        ("desktop-rtx3060", None, "this is no Jetson"),
        (NANO, "# R32 (release), REVISION: 7.1, GCID: 1\n", "too old"),
        (NANO, "# R40 (release), REVISION: 1.0, GCID: 1\n", "not a release that edgevlm knows"),
        (NANO, "nonsense\n", "does not say which L4T"),
    ],
)
def test_setup_refuses(tree: str, text: str | None, says: str, tmp_path: Path) -> None:
    board = Board(tree, tmp_path)
    if text is not None:
        (board.root / "etc/nv_tegra_release").write_text(text)
    before = board.files()
    status, said = board.setup("--yes")
    assert (status, board.calls(), board.files()) == (1, [], before)
    assert said.startswith("error: ") and says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        (None, "no virtual environment"),
        ("include-system-site-packages = false\nversion = 3.10.12\n", "--system-site-packages"),
        ("include-system-site-packages = true\nversion = 3.12.3\n", "not for Python 3.10"),
        ("include-system-site-packages = true\nversion = 3.10.12\n", "no working bin/python"),
    ],
)
def test_setup_refuses_an_environment_that_cannot_work(
    cfg: str | None, says: str, nano: Board
) -> None:
    nano.venv.mkdir()
    if cfg is not None:
        (nano.venv / "pyvenv.cfg").write_text(cfg)
    status, said = nano.setup("--yes")
    assert (status, nano.calls()) == (1, [])
    assert says in said


def test_setup_names_what_is_wrong_with_36_4_7(tmp_path: Path) -> None:
    status, said = Board(NX, tmp_path).setup("--dry-run")
    assert status == 0
    assert "note: L4T 36.4.7 refuses large CUDA allocations" in said


# --- max_performance.sh --------------------------------------------------------------------------


def test_max_performance_and_back(nano: Board) -> None:
    before = nano.files()
    assert nano.run("max_performance.sh")[0] == 0
    assert nano.calls() == [
        "jetson_clocks --store R/var/lib/edgevlm/clocks.new",
        "nvpmodel -m 2",
        "jetson_clocks ",
    ]
    assert "MAXN_SUPER" in nano.run("max_performance.sh", "status")[1]
    assert read_machine(nano.root).power.mode == "MAXN_SUPER"
    # Again, as after a reboot: what was before stays what undo restores.
    assert nano.run("max_performance.sh", "on")[0] == 0
    assert nano.calls() == ["jetson_clocks "]
    assert "undo restores: power mode 1" in nano.run("max_performance.sh", "status")[1]
    assert nano.run("max_performance.sh", "undo")[0] == 0
    assert nano.calls() == ["jetson_clocks --restore R/var/lib/edgevlm/clocks", "nvpmodel -m 1"]
    after = nano.files()
    assert after.pop("var/lib/nvpmodel/status") == b"pmode:0001".hex()
    before.pop("var/lib/nvpmodel/status")
    assert after == before
    status, said = nano.run("max_performance.sh", "undo")
    assert (status, nano.calls()) == (0, [])
    assert "nothing to undo" in said


@pytest.mark.parametrize("tree", [NANO, NX, AGX, THOR])
def test_the_fastest_mode_is_the_one_doctor_names(tree: str, tmp_path: Path) -> None:
    power = read_machine(TREES / tree).power
    said = Board(tree, tmp_path).run("max_performance.sh", "status")[1]
    assert f"power mode: {power.mode_id} ({power.mode})\n" in said
    assert f"fastest: {power.fastest_id} ({power.fastest})\n" in said


def test_a_board_without_maxn_gets_the_mode_with_most_watts(nano: Board) -> None:
    (nano.root / "etc/nvpmodel.conf").write_text(
        "< POWER_MODEL ID=0 NAME=7W >\n\n< POWER_MODEL ID=1 NAME=MODE_15W >\n"
    )
    assert "fastest: 1 (MODE_15W)" in nano.run("max_performance.sh", "status")[1]


def test_a_mode_that_needs_a_reboot_is_said_and_undo_stays_possible(nano: Board) -> None:
    (nano.root / "needs-reboot").touch()
    status, said = nano.run("max_performance.sh")
    assert status == 1
    assert "answer yes" in said.splitlines()[-1]
    (nano.root / "needs-reboot").unlink()
    nano.calls()
    assert nano.run("max_performance.sh")[0] == 0
    assert nano.calls() == ["nvpmodel -m 2", "jetson_clocks "]
    assert "undo restores: power mode 1" in nano.run("max_performance.sh", "status")[1]


def test_max_performance_refuses_what_is_no_jetson(tmp_path: Path) -> None:
    status, said = Board("desktop-rtx3060", tmp_path).run("max_performance.sh")
    assert status == 1
    assert said.startswith("error: there is no") and said.count("\n") == 1


# --- free_memory.sh ------------------------------------------------------------------------------


def test_headless_and_back(nano: Board) -> None:
    before = nano.files()
    assert nano.run("free_memory.sh", "headless")[0] == 0
    (call,) = nano.calls()
    assert f"sudo {call}" in HEADLESS
    assert read_machine(nano.root).desktop_at_boot is False
    # Again: what was before is not forgotten.
    assert nano.run("free_memory.sh", "headless")[0] == 0
    assert nano.calls() == []
    assert nano.run("free_memory.sh", "undo-headless")[0] == 0
    assert nano.calls() == ["systemctl set-default graphical.target"]
    assert nano.files() == before
    assert "nothing to undo" in nano.run("free_memory.sh", "undo-headless")[1]
    assert nano.calls() == []


def test_the_desktop_is_stopped_only_when_asked(nano: Board) -> None:
    assert nano.run("free_memory.sh", "headless", "--now")[0] == 0
    assert nano.calls()[-1] == "systemctl isolate multi-user.target"


def test_undo_headless_leaves_a_board_alone_that_was_headless(tmp_path: Path) -> None:
    board = Board(AGX, tmp_path)
    before = board.files()
    for command in ("headless", "undo-headless"):
        assert board.run("free_memory.sh", command)[0] == 0
    assert (board.calls(), board.files()) == ([], before)


def test_zram_off_and_on(nano: Board) -> None:
    assert nano.run("free_memory.sh", "zram-off")[0] == 0
    first, *swaps = nano.calls()
    assert f"sudo {first}" in NO_ZRAM
    assert swaps == [f"swapoff /dev/zram{i}" for i in range(6)]
    assert read_machine(nano.root).memory.zram == 0
    assert nano.run("free_memory.sh", "zram-off")[0] == 0
    assert nano.calls() == []
    assert nano.run("free_memory.sh", "zram-on")[0] == 0
    assert nano.calls() == ["systemctl enable nvzramconfig"]
    assert nano.run("free_memory.sh", "zram-on")[0] == 0
    assert nano.calls() == []


def test_zram_stays_where_its_contents_would_not_fit(nano: Board) -> None:
    swaps = nano.root / "proc/swaps"
    swaps.write_text("Filename Type Size Used Priority\n/dev/zram0 partition 9000000 8000000 5\n")
    status, said = nano.run("free_memory.sh", "zram-off")
    assert (status, nano.calls()) == (1, [])
    assert "would not fit" in said


def test_zram_off_refuses_where_there_is_no_such_unit(nano: Board) -> None:
    (nano.root / "no-zram-unit").touch()
    status, said = nano.run("free_memory.sh", "zram-off")
    assert (status, nano.calls()) == (1, [])
    assert "there is no nvzramconfig.service" in said


def test_drop_caches(nano: Board) -> None:
    assert nano.run("free_memory.sh", "drop-caches")[0] == 0
    assert nano.calls() == ["sync "]
    assert (nano.root / "proc/sys/vm/drop_caches").read_text() == "3\n"


def test_status_changes_nothing(nano: Board) -> None:
    before = nano.files()
    status, said = nano.run("free_memory.sh", "status")
    assert (status, nano.calls(), nano.files()) == (0, [], before)
    assert "zram: 3810 MiB of swap" in said
    assert "at boot: graphical.target" in said


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("setup.sh", ["--surprise"]),
        ("setup.sh", ["--venv"]),
        ("max_performance.sh", ["on", "undo"]),
        ("max_performance.sh", ["off"]),
        ("free_memory.sh", []),
        ("free_memory.sh", ["zram-off", "headless"]),
        ("free_memory.sh", ["zram-off", "--now"]),
    ],
)
def test_wrong_usage_is_2_and_does_nothing(script: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [ROOT / "jetson" / script, *arguments], capture_output=True, text=True, env={"PATH": "/bin"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    ("script", "command"), [("max_performance.sh", "on"), ("free_memory.sh", "headless")]
)
def test_a_copy_is_never_served_by_the_commands_of_this_machine(
    script: str, command: str, nano: Board, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("nvpmodel", "systemctl"):
        shutil.move(nano.root / "usr/bin" / name, here / name)
    status, said = nano.run(script, command, path=f"{here}:{os.environ['PATH']}")
    assert (status, nano.calls()) == (1, [])
    assert "of its own" in said


def test_doctor_and_setup_name_the_same_package() -> None:
    checks = {check.name: check for check in machine_checks(read_machine(TREES / THOR))}
    assert "python3-libnvinfer" in checks["tensorrt"].remedy
    assert "python3-libnvinfer" in (ROOT / "jetson/setup.sh").read_text()
