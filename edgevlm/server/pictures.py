"""Where a request's pictures come from: data URLs, files of one folder, hosts that were named.

Each becomes encoded bytes within the limit, then an `OpenImage` whose header was read.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgevlm.errors import BadImage, BadParameter, RequestError
from edgevlm.images import OpenImage, decode_data_url, open_image
from edgevlm.server.errors import ApiError, from_error
from edgevlm.server.image_fetch import Fetcher
from edgevlm.server.intake import Held
from edgevlm.server.settings import Settings
from edgevlm.server.workers import Workers


@dataclass(frozen=True)
class PictureRef:
    """A picture as a request names it. `where` is the field, for errors."""

    url: str
    where: str


class Pictures:
    """Brings pictures in."""

    def __init__(self, settings: Settings, workers: Workers, max_images: int) -> None:
        self._settings, self._workers, self._max_images = settings, workers, max_images
        self._fetcher = Fetcher(
            settings.allow_image_hosts, settings.max_image_bytes, settings.fetch_timeout
        )

    async def load(self, refs: Sequence[PictureRef], held: Held) -> list[OpenImage]:
        """Headers read, nothing decoded. Raises ApiError 400 that names the picture's field."""
        if len(refs) > self._max_images:
            raise ApiError(
                400,
                f"the request has {len(refs)} images; this bundle was built for "
                f"{self._max_images}; send fewer or rebuild with --max-images",
                param="messages" if refs[0].where.startswith("messages") else "input",
                code="too_many_images",
            )
        return [await self._one(ref, held) for ref in refs]

    async def _one(self, ref: PictureRef, held: Held) -> OpenImage:
        """What does not come with the body counts like a body."""
        scheme = ref.url[:8].partition(":")[0].lower()
        try:
            if scheme in ("http", "https"):
                held.take(self._settings.max_image_bytes)
                data = await self._fetcher.fetch(ref.url, ref.where)
                held.give_back(self._settings.max_image_bytes - len(data))
                return await self._workers.run(self._open, data, ref.where)
            if scheme == "file":
                held.take(self._settings.max_image_bytes)
            return await self._workers.run(self._local, ref, scheme)
        except RequestError as error:
            raise from_error(error, ref.where) from None

    def _local(self, ref: PictureRef, scheme: str) -> OpenImage:
        if scheme == "data":
            data = decode_data_url(ref.url)
        elif scheme == "file":
            data = read_file(ref.url, self._settings.image_folder, self._settings.max_image_bytes)
        else:
            raise BadParameter(
                f"the picture's URL begins with {ref.url[:20]!r}; send a data URL "
                "(data:image/...;base64,...)"
            )
        return self._open(data, ref.where)

    def _open(self, data: bytes, where: str) -> OpenImage:
        limit = self._settings.max_image_bytes
        if len(data) > limit:
            raise BadImage(
                f"{where} has {len(data):,} bytes; the limit is {limit:,}: send it smaller, or "
                "start the service with a larger --max-image-bytes"
            )
        return open_image(data, max_decoded_pixels=self._settings.max_image_pixels)


def read_file(url: str, folder: Path | None, limit: int) -> bytes:
    """A picture below `folder`, links resolved; outside it nothing is told, not even existence."""
    if folder is None:
        raise BadParameter(
            "file: URLs are off; start the service with --image-folder DIR to read files below it"
        )
    parts = urlsplit(url)
    refused = BadImage("the file: URL names no picture below the folder that may be read")
    if parts.netloc not in ("", "localhost") or "\0" in unquote(parts.path):
        raise refused
    base = folder.resolve()
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(base):
            raise refused
        # What was checked is what is read: no link in its place, no pipe that blocks.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError):
        raise refused from None
    with open(handle, "rb") as file:
        opened = Path(f"/proc/self/fd/{handle}")
        if opened.exists() and not opened.resolve().is_relative_to(base):
            raise refused
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise refused
        return file.read(limit + 1)
