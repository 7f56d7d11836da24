"""`edgevlm serve`: a bundle behind OpenAI's API until a signal ends it."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

from edgevlm.bundle import read_manifest
from edgevlm.server.app import create_app
from edgevlm.server.lifecycle import bind, make_server, notify, serve, url_of
from edgevlm.server.service import Line, Service
from edgevlm.server.settings import Settings, SettingsError, default_max_body
from edgevlm.vlm import VLM


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Load, listen, serve; returns after an orderly end."""
    manifest = read_manifest(args.bundle)
    settings = settings_of(args, manifest.limits.max_images)
    settings.check()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    with bind(settings) as sock:
        notify("STATUS=loading the model")
        with VLM(
            args.bundle,
            executor=args.executor,
            threads=args.threads,
            max_queue=settings.max_queue,
        ) as vlm:
            asyncio.run(_serve(vlm, settings, sock))
    return {}


async def _serve(vlm: VLM, settings: Settings, sock: Any) -> None:
    names = settings.model_names or (vlm.bundle.path.resolve().name,)
    service = Service(vlm, settings, names)
    try:
        server = make_server(create_app(service), service)
        print_ledger(service.ledger(), vlm.bundle.manifest.plan.total_bytes)

        def ready() -> None:
            print(f"serving {service.name} at {url_of(sock)}/v1", flush=True)

        await serve(server, sock, ready)
    finally:
        service.close()


def print_ledger(lines: list[Line], planned: int) -> None:
    """What may be taken, before anything can ask for it."""
    shown = [(planned, "the plan: taken at start, never grows")]
    shown += [(line.bytes, f"at most {line.name}: {line.formula}") for line in lines]
    for size, text in shown:
        print(f"{size / 2**20:10,.1f} MiB  {text}", file=sys.stderr)


def settings_of(args: argparse.Namespace, max_images: int) -> Settings:
    """Flags as settings. Raises SettingsError."""
    image_bytes = args.max_image_bytes
    max_body = args.max_body or default_max_body(image_bytes, max_images)
    return Settings(
        host=args.host,
        port=args.port,
        api_keys=read_keys(args.api_key, args.api_key_file),
        insecure=args.insecure,
        open_routes=frozenset({"/health", *args.open_route}),
        allow_hosts=tuple(args.allow_host),
        max_queue=args.max_queue,
        max_body=max_body,
        max_image_bytes=image_bytes,
        max_image_pixels=args.max_image_pixels,
        allow_image_hosts=tuple(h for given in args.allow_image_hosts for h in given.split(",")),
        image_folder=args.image_folder,
        cors_origins=tuple(args.cors_origin),
        grace=args.grace,
        deadline=args.deadline,
        model_names=tuple(args.model_name),
        access_log=args.access_log,
    )


def read_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """Keys of the command line and of a file: one a line, # begins a comment."""
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise SettingsError(f"--api-key-file {file} cannot be read: {reason}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise SettingsError(f"--api-key-file {file} holds no key; write one a line")
        keys += found
    return tuple(keys)
