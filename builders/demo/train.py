"""Train the demo model: the vision tower on cell labels first, then the whole on questions.

The schedule follows the time spent, which the saved state records, so a run that was stopped goes
on where it was: start it again with the same --out. All data is drawn afresh from the step's seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from torch.multiprocessing.spawn import spawn

from builders.demo import scenes
from builders.demo.batches import (
    CELL_LABELS,
    SYSTEMS,
    Batch,
    Encoder,
    any_word,
    choose,
    pictures_as_tensors,
)
from builders.demo.export import make_tokenizer, new_model
from builders.demo.model import HIDDEN, int4, quantised, text, tower
from builders.demo.muon import Muon

log = logging.getLogger(__name__)

TOWER_ALONE = 0.07  # shares of the time budget
HOLD = 0.35
ROUNDED_FROM = 0.8
LAYOUTS = ("shared", "turns", "text first")
CELL_WEIGHT = 0.25


def learning_rate(done: float, since: int) -> float:
    """The factor on every learning rate: warm-up in each phase, hold, one cosine down."""
    warm = min(1.0, (since + 1) / 60)
    if done < HOLD:
        return warm
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - HOLD) / (1 - HOLD))))


def picture_size(rng: random.Random) -> tuple[int, int]:
    """A width and height; small pictures more often, they are cheaper."""
    while True:
        size = rng.choice(scenes.SIDES), rng.choice(scenes.SIDES)
        if rng.random() < 112 * 112 / (size[0] * size[1]):
            return size


class Trainer:
    """One process's model, optimizers and running accuracies."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.path = args.out / "state.pt"
        saved = torch.load(self.path, weights_only=True) if self.path.exists() else None
        torch.manual_seed(args.seed)
        self.tokenizer = Tokenizer.from_str(saved["tokenizer"]) if saved else make_tokenizer()
        self.encoder = Encoder(self.tokenizer)
        self.model = new_model(self.tokenizer)
        self.visual: Any = self.model.model.visual
        self.heads = nn.ModuleDict({k: nn.Linear(HIDDEN, n) for k, (n, _) in CELL_LABELS.items()})
        self.optimizers = self._optimizers()
        self.step, self.elapsed, self.pictures = 0, 0.0, 0
        self.alone = 0  # steps of the tower alone
        self.right = dict.fromkeys(scenes.KINDS, 0.5)
        self.cells = dict.fromkeys(CELL_LABELS, 0.0)
        if saved:
            self.model.load_state_dict(saved["model"])
            self.heads.load_state_dict(saved["heads"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.elapsed = saved["step"], saved["elapsed"]
            self.pictures, self.right = saved["pictures"], saved["right"]
            self.alone = saved["alone"]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        matrices, parts, rest = [], [], list(self.heads.parameters())
        for name, p in self.model.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                matrices.append(p)
                parts.append(3 if "qkv" in name else 1)
            else:
                rest.append(p)
        self.parameters = matrices + rest
        for p in self.parameters:  # gradients of what a batch leaves unused count as zero
            p.grad = torch.zeros_like(p)
        adamw = torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        optimizers: list[torch.optim.Optimizer] = [Muon(matrices, 4e-3, parts), adamw]
        for optimizer in optimizers:
            optimizer.param_groups[0]["base"] = optimizer.param_groups[0]["lr"]
        return optimizers

    def save(self) -> None:
        state = dict(
            model=self.model.state_dict(),
            heads=self.heads.state_dict(),
            optimizers=[o.state_dict() for o in self.optimizers],
            tokenizer=self.tokenizer.to_str(),
            step=self.step,
            alone=self.alone,
            elapsed=self.elapsed,
            pictures=self.pictures,
            right=self.right,
        )
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.path)

    def run(self) -> None:
        budget, saved = self.args.minutes * 60, time.monotonic()
        while True:
            begin = time.monotonic()
            # The first process's clock counts for all, or they would part ways.
            clock = torch.tensor([self.elapsed], dtype=torch.float64)
            if dist.is_initialized():
                dist.broadcast(clock, 0)
            self.elapsed = clock.item()
            done = self.elapsed / budget
            if done >= 1 or (self.args.steps and self.step >= self.args.steps):
                break
            self._one_step(done)
            self.step += 1
            self.elapsed += time.monotonic() - begin
            if self.rank == 0 and self.step % 50 == 0:
                self._report(done)
            if self.rank == 0 and time.monotonic() - saved > 120:
                self.save()
                saved = time.monotonic()
        if self.rank == 0:
            self.save()

    def _one_step(self, done: float) -> None:
        for p in self.parameters:
            assert p.grad is not None
            p.grad.zero_()
        shared = random.Random(f"{self.args.seed} {self.step}")
        own = random.Random(f"{self.args.seed} {self.step} {self.rank}")
        if done < TOWER_ALONE:
            self.alone = self.step + 1
            self._tower_step(shared, own)
        else:
            rounded = done > ROUNDED_FROM and shared.random() < 0.7
            with self._rounded(shared.choice((32, 64))) if rounded else _as_is():
                self._question_step(shared, own)
        self._average()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        since = self.step - self.alone if self.step >= self.alone else self.step
        factor = learning_rate(done, since)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["base"] * factor
            optimizer.step()

    def _tower_step(self, shared: random.Random, own: random.Random) -> None:
        size = picture_size(shared)
        count = max(8, 1400 // (size[0] * size[1] // 196))
        abouts = [own.choice(("shapes", "shapes", "digits", "word")) for _ in range(count)]
        drawn = [scenes.scene(own, about, size, any_word) for about in abouts]
        self.pictures += count
        tensors = pictures_as_tensors([p for s in drawn for p in s.pictures])
        seen = tower(self.visual, tensors["patches"], tensors["grids"])
        self._cell_loss(seen, tensors["labels"]).backward()  # type: ignore[no-untyped-call]

    def _question_step(self, shared: random.Random, own: random.Random) -> None:
        """Two backward passes: questions about shapes, then reading or two pictures."""
        wrong = {k: 0.04 + 1 - r for k, r in self.right.items()}
        other = ("digits", "word", "pair")
        weights = [wrong["digits"], wrong["word"], wrong["two_pictures"]]
        for about in ("shapes", shared.choices(other, weights)[0]):
            batch = self._draw(about, wrong, shared, own)
            seen = tower(self.visual, batch.patches, batch.grids)
            loss = self._answer_loss(batch, seen, 1.0 if about == "shapes" else 0.6)
            loss = loss + 0.5 * CELL_WEIGHT * self._cell_loss(seen, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]

    def _draw(
        self,
        about: str,
        wrong: dict[str, float],
        shared: random.Random,
        own: random.Random,
    ) -> Batch:
        size = picture_size(shared)
        if about == "pair":
            size = shared.choice(scenes.SIDES[:2]), shared.choice(scenes.SIDES[:2])
        # "shared" teaches most in a second, so the others get few samples.
        layout = shared.choices(LAYOUTS, (0.85, 0.1, 0.05))[0]
        system = shared.choice(SYSTEMS) if shared.random() < 0.1 else ""
        asked = {"shapes": 7, "pair": 3}.get(about, 2)
        count = {"shapes": 14, "pair": 10}.get(about, 14)
        drawn = [scenes.scene(own, about, size, any_word) for _ in range(count)]
        self.pictures += sum(len(s.pictures) for s in drawn)
        if about in ("digits", "word"):
            wrong = wrong | {about: 1.0, "count": 0.1, "color": 0.3, "caption": 0.3}
        samples = [(s, choose(own, s.questions, asked, wrong)) for s in drawn]
        return self.encoder.batch(samples, layout, system)

    def _answer_loss(self, batch: Batch, seen: torch.Tensor, weight: float) -> torch.Tensor:
        embeds = self.model.model.language_model.embed_tokens(batch.ids)
        embeds = embeds.masked_scatter((batch.ids == self.encoder.pad)[..., None], seen)
        keep = batch.targets != -100
        logits = text(self.model, embeds, batch.positions, batch.mask, keep)
        targets, owner = batch.targets[keep], batch.owner[keep]
        length = torch.bincount(owner)
        # Long answers count more than short ones, but not by as much as they are longer.
        w = length[owner].float().rsqrt()
        loss = (F.cross_entropy(logits, targets, reduction="none") * w).sum() / w.sum()
        with torch.no_grad():  # greedy decoding is right where every step is
            ok = torch.ones(len(length)).scatter_reduce(
                0, owner, (logits.argmax(-1) == targets).float(), "amin"
            )
        for kind, good in zip(batch.kinds, ok.tolist(), strict=True):
            self.right[kind] += 0.003 * (good - self.right[kind])
        return loss * weight

    def _cell_loss(self, seen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for (name, (_, weight)), target in zip(CELL_LABELS.items(), labels, strict=True):
            keep = target != -100
            if keep.any():
                logits, target = self.heads[name](seen[keep]), target[keep]
                loss = loss + weight * F.cross_entropy(logits, target)
                good = (logits.argmax(-1) == target).float().mean().item()
                self.cells[name] += 0.03 * (good - self.cells[name])
        return loss

    def _average(self) -> None:
        """Give every process the mean of all gradients and of the running accuracies."""
        if not dist.is_initialized():
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([g.view(-1) for g in grads] + [torch.tensor(list(self.right.values()))])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        self.right = dict(zip(self.right, flat[at:].tolist(), strict=True))

    @contextmanager
    def _rounded(self, group: int) -> Iterator[None]:
        """Train through INT4: forward and backward see rounded weights, the update does not."""
        weights = quantised(self.model)
        kept = [w.detach().clone() for w in weights]
        for w in weights:
            w.data = int4(w.data, group)
        yield
        for w, k in zip(weights, kept, strict=True):
            w.data = k

    def _report(self, done: float) -> None:
        running = self.right | {f"cell {k}": v for k, v in self.cells.items()}
        percent = {k: round(100 * v, 1) for k, v in running.items()}
        line = dict(
            step=self.step,
            seconds=round(self.elapsed),
            done=round(done, 3),
            pictures=self.pictures * self.args.processes,
            mean=round(100 * sum(self.right.values()) / len(self.right), 1),
            **percent,
        )
        log.info(json.dumps(line))
        with (self.args.out / "log.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")


@contextmanager
def _as_is() -> Iterator[None]:
    yield


def _process(rank: int, args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if args.processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{args.port}",
            world_size=args.processes,
            rank=rank,
        )
    Trainer(args, rank).run()
    if args.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the state and the log")
    parser.add_argument("--minutes", type=float, default=90, help="time budget of the schedule")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument("--processes", type=int, default=2, help="one thread each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=29517)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.processes == 1:
        _process(0, args)
    else:
        spawn(_process, (args,), nprocs=args.processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
