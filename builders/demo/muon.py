"""Muon in fp32: momentum whose update is orthogonalised, for the hidden matrices.

torch.optim.Muon runs its Newton-Schulz steps in bf16, which a CPU without bf16 emulates slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push the singular values of a stack of matrices towards one. [N, R, C] -> [N, R, C]"""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: torch.Tensor = x.mT if tall else x
    return out


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised as one stack; the stacks are shared out over ranks.

    ``parts`` says into how many row blocks a fused matrix falls (3 for q, k and v in one). A matrix
    without gradient stays as it is.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        lr: float,
        parts: Sequence[int],
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.parts = list(parts)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        group = self.param_groups[0]
        kept = [(p, n) for p, n in zip(group["params"], self.parts, strict=True) if p.grad.any()]
        params = [p for p, _ in kept]
        blocks: dict[tuple[int, int], list[tuple[int, int, torch.Tensor]]] = {}
        for i, p in enumerate(params):
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            u = p.grad.lerp(state["momentum"], group["momentum"])
            for part, block in enumerate(u.chunk(kept[i][1])):
                shape = (min(block.shape), max(block.shape))
                blocks.setdefault(shape, []).append((i, part, block))
        flat = torch.zeros(sum(p.numel() for p in params))
        offsets = [0]
        for p in params:
            offsets.append(offsets[-1] + p.numel())
        for (_, longest), members in blocks.items():
            mine = members[rank::world]
            if not mine:
                continue
            stack = torch.stack([m if m.shape[0] <= m.shape[1] else m.mT for _, _, m in mine])
            # The factor gives an update the root mean square that AdamW's has.
            done = orthogonalise(stack) * (0.2 * longest**0.5)
            for (i, part, block), u in zip(mine, done, strict=True):
                start = offsets[i] + part * block.numel()
                u = u if block.shape[0] <= block.shape[1] else u.mT
                flat[start : start + block.numel()] = u.reshape(-1)
        if world > 1:
            dist.all_reduce(flat)
        for i, p in enumerate(params):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(flat[offsets[i] : offsets[i + 1]].view_as(p), alpha=group["lr"])
