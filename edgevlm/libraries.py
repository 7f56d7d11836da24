"""Which vendor libraries a machine has and in which version, without importing any of them.

Versions come from Python's package metadata, from dpkg, and from the names of shared libraries.
"""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass

from edgevlm.filesystem import FileSystem

LIBRARY_DIRS = (
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/cuda/compat",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
)
# A tree from another machine has no running Python; these are where its packages lie.
PACKAGE_ROOTS = ("usr/lib", "usr/local/lib")
PACKAGE_DIRS = ("dist-packages", "site-packages")


@dataclass(frozen=True)
class Libraries:
    """Versions; None where a library was not found. `tensorrt_python`: can be imported here."""

    libcuda: str | None = None  # its path
    driver: str | None = None
    tensorrt: str | None = None
    tensorrt_python: str | None = None
    tensorrt_rtx: str | None = None
    cuda_bindings: str | None = None
    onnxruntime: str | None = None


def read_libraries(files: FileSystem) -> Libraries:
    """What is there."""
    packages = _packages(files)

    def package(*names: str) -> str | None:
        return next((packages[name] for name in names if name in packages), None)

    tensorrt_python = package("tensorrt", "tensorrt-cu12", "tensorrt-cu13")
    from_dpkg = dpkg_version(files, "libnvinfer10") or dpkg_version(files, "libnvinfer8")
    tensorrt = from_dpkg or _nvinfer_version(files) or tensorrt_python
    if files.live and tensorrt is not None and tensorrt_python is None:
        # Yocto's images and source builds leave a module without metadata.
        tensorrt_python = tensorrt if _importable("tensorrt") else None
    return Libraries(
        libcuda=_libcuda(files),
        driver=_driver(files),
        tensorrt=tensorrt,
        tensorrt_python=tensorrt_python,
        tensorrt_rtx=package("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
        # cuda-python 12.6 has the bindings in itself; later ones only require cuda-bindings.
        cuda_bindings=package("cuda-bindings", "cuda-python"),
        onnxruntime=package("onnxruntime", "onnxruntime-gpu"),
    )


def dpkg_version(files: FileSystem, package: str) -> str | None:
    """The version of an installed Debian package."""
    paragraph = _dpkg_paragraph(files, package)
    match = re.search(r"^Version: (\S+)$", paragraph, re.MULTILINE)
    installed = re.search(r"^Status: \S+ ok installed$", paragraph, re.MULTILINE)
    return match[1] if match and installed else None


def debian_architecture(files: FileSystem) -> str | None:
    """The machine word of the tree's C library: "aarch64", "x86_64"."""
    match = re.search(r"^Architecture: (\S+)$", _dpkg_paragraph(files, "libc6"), re.MULTILINE)
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(match[1], match[1]) if match else None


def _dpkg_paragraph(files: FileSystem, package: str) -> str:
    text = files.data("var/lib/dpkg/status") or b""  # megabytes: searched before it is decoded
    start = (b"\n" + text).find(f"\nPackage: {package}\n".encode())
    if start < 0:
        return ""
    end = text.find(b"\n\n", start)
    return text[start : end if end >= 0 else len(text)].decode("utf-8", "replace")


def _packages(files: FileSystem) -> dict[str, str]:
    """Distributions by name. importlib.metadata would take longer to import than this to run."""
    if files.live:
        directories = [directory for directory in sys.path if directory.startswith("/")]
    else:
        directories = [
            f"{root}/{python}/{packages}"
            for root in PACKAGE_ROOTS
            for python in files.names(root)
            if python.startswith("python3")
            for packages in PACKAGE_DIRS
        ]
    found: dict[str, str] = {}
    for directory in directories:
        for name in files.names(directory):
            match = re.fullmatch(r"([\w.]+)-([0-9][^-]*)\.(?:dist|egg)-info", name)
            if match is not None:
                found.setdefault(match[1].replace("_", "-").lower(), match[2])
    return found


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _nvinfer_version(files: FileSystem) -> str | None:
    """From libnvinfer.so.10.3.0."""
    for directory in LIBRARY_DIRS:
        for name in files.names(directory):
            if match := re.fullmatch(r"libnvinfer\.so\.([0-9]+\.[0-9.]*[0-9])", name):
                return match[1]
    return None


def _libcuda(files: FileSystem) -> str | None:
    directories = list(LIBRARY_DIRS)
    if files.live:
        # Where the dynamic linker looks first; an absolute path replaces the root it is joined to.
        directories = os.environ.get("LD_LIBRARY_PATH", "").split(":") + directories
    for directory in filter(None, directories):
        if files.has(path := f"{directory}/libcuda.so.1"):
            return f"/{path.lstrip('/')}"
    cache = files.data("etc/ld.so.cache") or b""
    match = re.search(rb"/([\x21-\x7e]{1,200}/libcuda\.so\.1)\0", cache)
    path = match[1].decode("ascii") if match else ""
    return f"/{path}" if path and files.has(path) else None


def _driver(files: FileSystem) -> str | None:
    first = (files.text("proc/driver/nvidia/version") or "").split("\n", 1)[0]
    match = re.search(r"NVRM version:.*?\s([0-9]{3,4}\.[0-9]+(?:\.[0-9]+)?)\b", first)
    return match[1] if match else None
