"""Look, ask, print, again: a camera in front of a bundle.

  python examples/webcam.py bundles/qwen2-vl "What is on the table?"
  python examples/webcam.py bundles/demo-int4 "What is this?" --pictures builders/demo/pictures

Without a camera `--pictures` takes the files of a folder, by name, one after the other. A camera
needs OpenCV, which edgevlm itself never does.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from edgevlm import VLM, EdgeVLMError, SamplingParams

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


class CameraError(Exception):
    """There is nothing to look at; the message says what to do."""


def camera(index: int) -> Iterator[Any]:
    """The newest frame each time, [height, width, RGB] uint8. Raises CameraError."""
    try:
        import cv2
    except ImportError as error:
        raise CameraError(
            f"a camera needs OpenCV ({error}): pip install opencv-python-headless, on a Jetson "
            "apt install python3-opencv; or give --pictures FOLDER"
        ) from error
    capture = cv2.VideoCapture(index)
    try:
        if not capture.isOpened():
            raise CameraError(
                f"camera {index} does not open; see ls /dev/video*, or give --pictures FOLDER"
            )
        capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # frames that wait while we think are old
        while True:
            capture.grab()  # a driver may keep one all the same
            ok, frame = capture.read()
            if not ok:
                raise CameraError(f"camera {index} gave no frame; was it unplugged?")
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        capture.release()


def pictures(folder: Path) -> Iterator[Path]:
    """The pictures of a folder, by name. Raises CameraError."""
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise CameraError(f"{folder} has no pictures ({', '.join(sorted(SUFFIXES))})")
    yield from found


def main() -> int:
    """Answer the same question about one frame after another."""
    parser = argparse.ArgumentParser(description="Ask about what a camera sees.")
    parser.add_argument("bundle")
    parser.add_argument("question")
    parser.add_argument("--camera", type=int, default=0, help="number of the camera")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="instead of a camera")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help="at the most")
    parser.add_argument("--count", type=int, help="stop after so many answers")
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    frames = camera(given.camera) if given.pictures is None else pictures(given.pictures)
    params = SamplingParams(max_tokens=given.max_tokens, temperature=0)
    try:
        with VLM(given.bundle) as vlm:
            for frame in islice(frames, given.count):
                start = time.monotonic()
                if isinstance(frame, Path):
                    print(f"{frame.name}: ", end="")
                for delta in vlm.stream(given.question, [frame], params):
                    print(delta.text, end="", flush=True)
                print(flush=True)
                time.sleep(max(0.0, start + given.every - time.monotonic()))
    except KeyboardInterrupt:
        print()
    except (CameraError, EdgeVLMError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
