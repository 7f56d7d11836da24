"""A plan for people: the ledger with bars, what fits, and projected times with their grounds."""

from collections.abc import Callable

from rich.table import Table

from builders.limits import change_text
from builders.plan_report import Report, image_tokens, notes
from edgevlm.commands.plan_report import human_bytes, print_limits
from edgevlm.commands.terminal import terminal

BAR = 32  # columns
Say = Callable[[str], None]


def print_report(found: Report) -> None:
    """All of it on stdout."""
    console = terminal()
    ledger, config = found.planned.plan, found.model.config

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    say(
        f"{found.model.name} ({config.model_type}, weights {found.options.weights}) on "
        f"{found.device.title}, {found.target.executor} (lowering {found.lowering})"
    )
    say("memory plan")
    console.print(_ledger(found))
    left = found.budget.bytes - ledger.total_bytes
    size = human_bytes(abs(left))
    say(f"FITS: {size} of the budget left" if left >= 0 else f"DOES NOT FIT: {size} too many")
    say(f"budget: {human_bytes(found.budget.bytes)} = {found.budget.formula}")
    for pool in ledger.pools:
        say(f"  {pool.name}: {pool.formula}")
    print_limits(console, ledger)
    _say_figures(say, found)
    say("longest context that fits; in brackets: tokens of the largest picture")
    console.print(_what_fits(found))
    _say_projection(say, found)
    for note in notes(found):
        say(f"note: {note}")
    for change in found.planned.changes:
        say(f"would fit: {change_text(change)}")


def _ledger(found: Report) -> Table:
    ledger = found.planned.plan
    table = Table(box=None, pad_edge=False)
    table.add_column("pool", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("of the budget", no_wrap=True)
    before, whole = 0, max(found.budget.bytes, ledger.total_bytes, 1)
    for pool in ledger.pools:
        if pool.reclaimable:
            table.add_row(f"({pool.name})", human_bytes(pool.bytes), "", "")
            continue
        share = f"{pool.bytes / max(1, ledger.total_bytes):.1%}"
        bar = _bar(before, before + pool.bytes, whole)
        table.add_row(pool.name, human_bytes(pool.bytes), share, bar)
        before += pool.bytes
    bar = _bar(0, ledger.total_bytes, whole)
    table.add_row("total", human_bytes(ledger.total_bytes), "", bar, style="bold")
    bar = _bar(0, found.budget.bytes, whole)
    table.add_row("budget", human_bytes(found.budget.bytes), "", bar)
    return table


def _bar(start: int, end: int, whole: int) -> str:
    """From where the pool before ended, so that the bars add up to the total's."""
    first, last = round(start / whole * BAR), round(end / whole * BAR)
    return " " * first + ("█" * (last - first) or "▏")


def _say_figures(say: Say, found: Report) -> None:
    if tokens := image_tokens(found):
        say(f"largest picture: {tokens:,} tokens")
    say(f"KV cache: {found.kv_bytes_per_token:,} bytes per token and slot")
    for name, figure in (
        ("to load it", found.load_peak),
        ("to build it", found.build_peak),
        ("on disk", found.disk),
    ):
        say(f"{name}: {human_bytes(figure.bytes)} ({figure.formula})")


def _what_fits(found: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("slots", justify="right")
    pixels = sorted({(fit.max_pixels, fit.image_tokens) for fit in found.fits})
    for cap, tokens in pixels:
        table.add_column(f"{cap:,} px ({tokens:,})" if cap else "tokens", justify="right")
    for slots in sorted({fit.slots for fit in found.fits}):
        row = {fit.max_pixels: fit.max_seq_len for fit in found.fits if fit.slots == slots}
        cells = [row[cap] for cap, _ in pixels]
        table.add_row(str(slots), *("-" if n is None else f"{n:,}" for n in cells))
    return table


def _say_projection(say: Say, found: Report) -> None:
    projected = found.projection
    asked = f"{projected.prompt_tokens:,} tokens, {projected.image_tokens:,} of them a picture"
    if projected.reason is not None:
        say(f"projected times: none ({projected.reason})")
        return
    say(f"projected, not measured, for a prompt of {asked}:")
    say(
        f"  projected first token {projected.first_token_ms:,.0f} ms = vision "
        f"{projected.vision_ms:,.0f} + prefill {projected.prefill_ms:,.0f}; projected decode "
        f"{projected.decode_tok_s:.1f} tokens/s, {projected.decode_tok_s_full_context:.1f} with a "
        "full context"
    )
    for assumption in projected.assumptions:
        say(f"  - {assumption}")
