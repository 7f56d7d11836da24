"""Start-up checks: each failure says what was found, what is needed, and what to do."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from edgevlm import VLM
from edgevlm.bundle import (
    FORMAT_VERSION,
    BuiltOn,
    FileRecord,
    Manifest,
    StageSpec,
    open_bundle,
    record,
    write_manifest,
)
from edgevlm.checks import (
    bundle_checks,
    check_start,
    largest_chunk,
    needed_bytes,
    one_line,
    require,
)
from edgevlm.config import Limits, ModelConfig
from edgevlm.device import Machine, read_machine
from edgevlm.errors import BundleError, ExecutorError
from edgevlm.executors import host
from edgevlm.libraries import Libraries
from edgevlm.machine_checks import Check
from edgevlm.meminfo import MIB, Memory
from edgevlm.memory_plan import MemoryPlan, Placement, Pool

TREES = Path(__file__).resolve().parents[1] / "trees"
GIB = 1 << 30
UPGRADE = (
    "sudo sed -i s/r36.4/r36.5/ /etc/apt/sources.list.d/nvidia-l4t-apt-source.list && "
    "sudo apt update && sudo apt dist-upgrade && sudo reboot"
)


def plan(weights: int = 100 * MIB, cache: int = 100 * MIB, scratch: int = MIB) -> MemoryPlan:
    pools = (
        Pool("weights.llm", weights, ""),
        Pool("kv_cache", cache, ""),
        Pool("activations", scratch, ""),
        Pool("embedding_table", 90 * GIB, "", reclaimable=True),  # a mapped file: never counted
    )
    key = Placement("past_key_values.0.key", "kv_cache", 0, "float16", (1, 1, cache // 4, 1))
    return MemoryPlan(Limits(64, 16, 1), pools, (key,))


@pytest.fixture
def manifest(text_config: ModelConfig) -> Manifest:
    return Manifest(
        version=FORMAT_VERSION,
        edgevlm="0",
        target="orin-nano-8gb",
        executor="tensorrt",
        lowering="classic",
        weights="int4",
        model=text_config,
        special_tokens={},
        phases={"prefill": (StageSpec("llm.engine", (), ()),)},
        plan=plan(),
        build={},
        files={"llm.engine": FileRecord(100 * MIB, "")},
        built_on=BuiltOn("10.3.0", "8.7", "36.4.3"),
    )


@pytest.fixture
def nano() -> Machine:
    """The Orin Nano of the tree, with cuda-bindings."""
    machine = read_machine(TREES / "orin-nano-8gb-jp62")
    return replace(machine, libraries=replace(machine.libraries, cuda_bindings="12.9.10"))


@pytest.fixture
def bad_nx() -> Machine:
    return read_machine(TREES / "orin-nx-16gb-l4t-36.4.7")


@pytest.fixture
def laptop() -> Machine:
    return read_machine(TREES / "laptop-no-gpu")


def for_host(manifest: Manifest) -> Manifest:
    return replace(manifest, executor="host", lowering="host", target="host", built_on=None)


def named(checks: list[Check], name: str) -> Check:
    (check,) = (c for c in checks if c.name == name)
    return check


def test_a_bundle_on_the_board_it_was_built_on(manifest: Manifest, nano: Machine) -> None:
    checks = bundle_checks(manifest, nano)
    assert {c.name for c in checks if c.status != "ok"} == {"zram", "swap", "desktop"}
    require(checks)


@pytest.mark.parametrize(
    ("built", "name", "found", "needed"),
    [
        (BuiltOn(tensorrt="10.16.2.10"), "bundle tensorrt", "10.3.0.30-1+cuda12.5", "10.16.2.10"),
        (BuiltOn(compute_capability="11.0"), "bundle compute capability", "8.7", "11.0"),
        (BuiltOn(l4t="39.2.0"), "bundle l4t", "36.4.3", "39.2.0"),
    ],
)
def test_another_machines_engine(
    manifest: Manifest, nano: Machine, built: BuiltOn, name: str, found: str, needed: str
) -> None:
    checks = bundle_checks(replace(manifest, built_on=built), nano)
    assert [c for c in checks if c.status == "fail"] == [
        Check(
            name,
            "fail",
            f"{found} on this machine",
            f"{needed}, as built",
            "run `edgevlm compile` on this machine, or copy a bundle built for it",
        )
    ]
    with pytest.raises(BundleError) as error:
        require(checks)
    assert str(error.value) == (
        f"{name}: found {found} on this machine; needed {needed}, as built; "
        "run `edgevlm compile` on this machine, or copy a bundle built for it"
    )


def test_another_l4t_of_the_same_release_is_only_said(manifest: Manifest, nano: Machine) -> None:
    checks = bundle_checks(replace(manifest, built_on=BuiltOn("10.3.0", "8.7", "36.5.0")), nano)
    assert named(checks, "bundle l4t").status == "warn"
    require(checks)


def test_engines_without_a_record_are_only_said(manifest: Manifest, nano: Machine) -> None:
    checks = bundle_checks(replace(manifest, built_on=None), nano)
    assert named(checks, "bundle tensorrt").status == "warn"
    require(checks)


def test_native_needs_a_later_tensorrt(manifest: Manifest, nano: Machine) -> None:
    check = named(bundle_checks(replace(manifest, lowering="native"), nano), "bundle lowering")
    assert check == Check(
        "bundle lowering",
        "fail",
        "native, and TensorRT 10.3.0.30-1+cuda12.5 here",
        "TensorRT 10.15 for native",
        "build with --lowering classic",
    )
    agx = read_machine(TREES / "agx-orin-64gb-jp72")
    check = named(bundle_checks(replace(manifest, lowering="native"), agx), "bundle lowering")
    assert check.status == "ok"


def test_a_lowering_of_another_executor(manifest: Manifest, nano: Machine) -> None:
    for executor, lowering in (("host", "classic"), ("tensorrt", "host")):
        wrong = replace(manifest, executor=executor, lowering=lowering)
        assert named(bundle_checks(wrong, nano), "bundle lowering").status == "fail"


def test_an_engine_on_a_laptop_without_a_gpu(manifest: Manifest, laptop: Machine) -> None:
    with pytest.raises(ExecutorError) as error:
        require(bundle_checks(manifest, laptop))
    assert str(error.value) == (
        "bundle executor: found no libcuda.so.1, no cuda-bindings, no TensorRT for this Python; "
        "needed libcuda.so.1, cuda-bindings, TensorRT for this Python for tensorrt; "
        "run it where there is an NVIDIA GPU, or build with --target host"
    )


def test_an_executor_that_does_not_exist(manifest: Manifest, laptop: Machine) -> None:
    check = named(bundle_checks(replace(manifest, executor="npu"), laptop), "bundle executor")
    assert (check.status, check.found) == ("fail", "'npu'")
    assert check.needed == "one of host, tensorrt, tensorrt-rtx"


def test_a_plan_that_does_not_fit(manifest: Manifest, nano: Machine) -> None:
    too_much = replace(manifest, plan=plan(cache=5 * GIB))
    assert needed_bytes(too_much) == 5 * GIB + 101 * MIB  # and no embedding table
    checks = bundle_checks(too_much, nano)
    assert named(checks, "bundle memory") == Check(
        "bundle memory",
        "fail",
        "4,295 MiB usable (4,895 MiB available less 600 MiB)",
        "5,221 MiB, 926 MiB more",
        "stop the desktop with `sudo systemctl isolate multi-user.target`, close other programs, "
        "or build with --memory-budget 4294MiB (lower --max-seq-len, --max-pixels or --slots)",
    )
    with pytest.raises(ExecutorError, match="bundle memory: found 4,295 MiB usable"):
        require(checks)


def test_page_cache_is_no_reason_to_refuse(manifest: Manifest, nano: Machine) -> None:
    full = Memory(free=200 * MIB, available=6000 * MIB)
    checks = bundle_checks(replace(manifest, plan=plan(cache=5 * GIB)), replace(nano, memory=full))
    assert named(checks, "bundle memory").status == "ok"


def test_files_larger_than_the_planned_weights_count(manifest: Manifest) -> None:
    files = {
        "llm.engine": FileRecord(3 * GIB, ""),
        "embed_tokens.bin": FileRecord(GIB, ""),
        "tokenizer.json": FileRecord(GIB, ""),
    }
    assert needed_bytes(replace(manifest, files=files)) == 3 * GIB + 101 * MIB


def test_unknown_memory_is_said_and_not_refused(manifest: Manifest, nano: Machine) -> None:
    check = named(bundle_checks(manifest, replace(nano, memory=Memory())), "bundle memory")
    assert (check.status, check.found) == ("warn", "unknown: /proc/meminfo has no MemAvailable")


def test_a_cards_memory_is_left_to_cuda(manifest: Manifest) -> None:
    desktop = read_machine(TREES / "desktop-rtx3060")
    huge = replace(manifest, executor="tensorrt-rtx", built_on=None, plan=plan(cache=60 * GIB))
    assert named(bundle_checks(huge, desktop), "bundle memory").status == "ok"
    # On the host executor it is the machine's memory that counts.
    check = named(bundle_checks(for_host(huge), desktop), "bundle memory")
    assert check.status == "fail"


def test_the_l4t_that_refuses_large_pieces(manifest: Manifest, bad_nx: Machine) -> None:
    small = named(bundle_checks(manifest, bad_nx), "bundle allocations")
    assert (small.status, small.remedy) == ("warn", UPGRADE)
    large = replace(manifest, plan=plan(scratch=GIB + 256))
    assert named(bundle_checks(large, bad_nx), "bundle allocations") == Check(
        "bundle allocations",
        "fail",
        "1,024 MiB for scratch is the largest piece, on L4T 36.4.7",
        "pieces of at most 1,024 MiB: L4T 36.4.7 refuses larger ones",
        UPGRADE,
    )
    with pytest.raises(ExecutorError, match="bundle allocations"):
        require(bundle_checks(large, bad_nx))
    # The host executor asks the kernel, which does not mind.
    assert named(bundle_checks(for_host(large), bad_nx), "bundle allocations").status == "ok"


def test_the_largest_piece(manifest: Manifest) -> None:
    assert largest_chunk(manifest) == (100 * MIB, "the engine llm.engine")
    big = replace(manifest, plan=plan(cache=4 * GIB))
    assert largest_chunk(big) == (2 * GIB, "the tensor past_key_values.0.key")


def test_fragmented_memory_and_little_cma(manifest: Manifest, nano: Machine) -> None:
    memory = replace(
        nano.memory, largest_free_block=256 * 1024, largest_free_blocks=3, cma_free=MIB
    )
    checks = bundle_checks(manifest, replace(nano, memory=memory))
    block = named(checks, "largest free block")
    assert (block.status, block.found) == ("warn", "3 x 256 KiB: memory is fragmented")
    assert block.remedy == "echo 1 | sudo tee /proc/sys/vm/compact_memory, or reboot"
    cma = named(checks, "cma")
    assert (cma.status, cma.found, cma.needed) == ("warn", "1 MiB free of 256 MiB", "16 MiB free")
    require(checks)


@pytest.fixture
def bundle(tmp_path: Path, manifest: Manifest, tokenizer_file: Path) -> Path:
    """A directory that is whole, for the host, and asks for 5 GiB."""
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "llm.onnx").write_bytes(b"graph")
    (path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    files = {name: record(path / name) for name in ("llm.onnx", "tokenizer.json")}
    phases = {"prefill": (StageSpec("llm.onnx", (), ()),)}
    big = replace(for_host(manifest), plan=plan(cache=5 * GIB), files=files, phases=phases)
    write_manifest(path, big)
    return path


def test_too_large_a_plan_is_refused_before_any_pool_is_taken(
    bundle: Path, nano: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: object) -> None:
        raise AssertionError("a pool was asked for")

    monkeypatch.setattr(host.HostExecutor, "_take", taken)
    with_ort = replace(nano, libraries=Libraries(onnxruntime="1.32.0"))
    with pytest.raises(ExecutorError, match="bundle memory: found 4,295 MiB usable"):
        VLM(bundle, machine=with_ort)


def test_conditions_of_memory_are_only_logged(
    bundle: Path, nano: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = replace(open_bundle(bundle).manifest, plan=plan())
    with_ort = replace(nano, libraries=Libraries(onnxruntime="1.32.0"))
    with caplog.at_level(logging.WARNING, "edgevlm.checks"):
        check_start(manifest, with_ort)
    assert [message.partition(":")[0] for message in caplog.messages] == ["zram", "swap", "desktop"]
    assert "3,810 MiB" in caplog.messages[0]
    assert "sudo systemctl disable --now nvzramconfig" in caplog.messages[0]


def test_this_machine_is_read_where_none_is_given(manifest: Manifest) -> None:
    with pytest.raises(ExecutorError, match="bundle memory"):
        check_start(replace(for_host(manifest), plan=plan(cache=1 << 50)))


def test_one_line() -> None:
    assert one_line(Check("x", "ok", "a")) == "x: found a"
    assert one_line(Check("x", "fail", "a", "b", "c")) == "x: found a; needed b; c"


def test_what_built_on_knows_survives_the_file(bundle: Path, manifest: Manifest) -> None:
    built = BuiltOn("10.16.2.10", "11.0", None)
    write_manifest(bundle, replace(open_bundle(bundle).manifest, built_on=built))
    assert open_bundle(bundle).manifest.built_on == built
