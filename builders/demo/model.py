"""The demo model's shape and the forward pass that training uses.

The weights live in transformers' Qwen2VLForConditionalGeneration; the functions here run them
batched (pictures of one size, questions that share a picture) and give what its forward gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

PATCH, MERGE = 14, 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 192, 6, 2, 32
VISION, VISION_HEADS = 128, 4


def config(ids: dict[str, int], vocab: int) -> Qwen2VLConfig:
    """``ids`` maps the special tokens' strings to their numbers."""
    text: dict[str, Any] = dict(
        vocab_size=-(-vocab // 64) * 64,
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.03,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        # Contexts are short: a small theta lets the row and column sections, which have the
        # slowest frequencies, tell neighbouring cells apart.
        rope_parameters=dict(rope_type="default", rope_theta=30.0, mrope_section=[4, 6, 6]),
    )
    vision: dict[str, Any] = dict(
        depth=4,
        embed_dim=VISION,
        num_heads=VISION_HEADS,
        mlp_ratio=3,
        hidden_size=HIDDEN,
        initializer_range=0.03,
    )
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@cache
def _vision_angles(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for a grid of patches in merged order. -> 2 x [rows * columns, HEAD_DIM]"""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    merged = [
        t.view(rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(1, 2).reshape(-1)
        for t in (y, x)
    ]
    half = VISION // VISION_HEADS // 2
    freq = 1.0 / 10000.0 ** (torch.arange(0, half, 2).float() / half)
    angles = torch.cat([t[:, None] * freq for t in merged], -1).repeat(1, 2)
    return angles.cos(), angles.sin()


def tower(visual: Any, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Run the vision tower on pictures that have one number of patches each.

    patches  [B * N, 3 * PATCH * PATCH]  still pictures: no second frame
    grids    B pairs (rows, columns) of patches
    returns  [B * N / MERGE**2, HIDDEN]
    """
    count, heads = len(grids), VISION_HEADS
    # Both frames of a still picture are the same, so their weights add up.
    h = F.linear(patches, visual.patch_embed.proj.weight.sum(2).flatten(1))
    angles = [_vision_angles(*g) for g in grids]
    cos = torch.stack([a[0] for a in angles])[:, None]  # [B, 1, N, D]
    sin = torch.stack([a[1] for a in angles])[:, None]
    for block in visual.blocks:
        qkv = block.attn.qkv(block.norm1(h)).view(count, -1, 3, heads, VISION // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, N, D]
        o = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        h = h + block.attn.proj(o.transpose(1, 2).reshape(h.shape))
        h = h + block.mlp(block.norm2(h))
    out: torch.Tensor = visual.merger(h)
    return out


def text(
    model: Qwen2VLForConditionalGeneration,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    keep: torch.Tensor,
    head: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the language model; only the rows in ``keep`` leave the last layer's attention.

    embeds     [B, L, HIDDEN]
    positions  [3, B, L]
    mask       [B, 1, L, L]  added to the scores
    keep       [B, L]        bool, R of them true
    head       [vocab, HIDDEN]  in place of the tied embedding
    returns    [R, vocab]    logits
    """
    lm: Any = model.model.language_model
    cos, sin = (t[:, None] for t in lm.rotary_emb(embeds, positions))
    h, (b, n) = embeds, embeds.shape[:2]
    for i, layer in enumerate(lm.layers):
        norm, a = layer.input_layernorm, layer.self_attn
        x = F.rms_norm(h, (HIDDEN,), norm.weight, norm.variance_epsilon)
        q = a.q_proj(x).view(b, n, HEADS, HEAD_DIM).transpose(1, 2)
        k = a.k_proj(x).view(b, n, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = a.v_proj(x).view(b, n, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        o = o.transpose(1, 2).reshape(b, n, HIDDEN)
        if i == len(lm.layers) - 1:
            h, o = h[keep], o[keep]
        h = h + a.o_proj(o)
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        x = F.rms_norm(h, (HIDDEN,), norm.weight, norm.variance_epsilon)
        h = h + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    h = F.rms_norm(h, (HIDDEN,), lm.norm.weight, lm.norm.variance_epsilon)
    return F.linear(h, lm.embed_tokens.weight if head is None else head)


def int4(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Round to four bits, symmetric, one fp16 scale for ``group`` inputs. [N, K] -> [N, K]"""
    x = weight.view(weight.shape[0], -1, group)
    scale = x.abs().amax(-1, keepdim=True) / 7
    scale = torch.where(scale == 0, torch.ones_like(scale), scale).half().float()
    return ((x / scale).round().clamp(-8, 7) * scale).view_as(weight)


def quantised(model: Qwen2VLForConditionalGeneration) -> list[nn.Parameter]:
    """What W4A16 rounds: the language model's linears and the tied embedding that is its head."""
    lm: Any = model.model.language_model
    linears = [m.weight for m in lm.modules() if isinstance(m, nn.Linear)]
    return [*linears, lm.embed_tokens.weight]
