"""Training steps of programs whose memory other people measured, on random tokens.

    python others.py gollem-float32 --batch-size 1

The models and the order of the steps are those of the programs, the code is ours. On a GPU the
last line prints what PyTorch allocated and reserved at most.

- gollem: https://github.com/Jjschwartz/gollem at 26babd6, gollem/models/gpt2/model.py and
  gollem/train/core.py
- gb10: https://github.com/manavsehgal/ai-field-notes at f68990d,
  articles/nemo-framework-on-spark/evidence/vanilla_train.py
"""

import argparse
import contextlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, CONTEXT = 50_257, 1024


@dataclass(frozen=True)
class Program:
    """What differs between the programs."""

    width: int = 768
    heads: int = 12
    layers: int = 12
    batch: int = 1
    bias: bool = True
    gelu: str = "tanh"
    flash: bool = False
    autocast: bool = False
    has_buffers: bool = True  # each layer has a mask, and a cache for sampling
    keeps_logits: bool = False  # until the next step's are there
    # Gradients are set to None before the forward pass; else after it, before the backward pass.
    clears_first: bool = True
    fused: bool = False


PROGRAMS = {
    "gollem-float32": Program(),
    "gollem-bfloat16": Program(autocast=True),
    "gollem-flash": Program(autocast=True, flash=True),
    "gb10": Program(
        width=1024,
        heads=16,
        layers=24,
        batch=4,
        bias=False,
        gelu="none",
        flash=True,
        autocast=True,
        has_buffers=False,
        keeps_logits=True,
        clears_first=False,
        fused=True,
    ),
}


class Attention(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.program, width = program, program.width
        self.qkv = nn.Linear(width, 3 * width, bias=program.bias)
        self.out = nn.Linear(width, width, bias=program.bias)
        if program.has_buffers:
            future = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
            self.register_buffer("mask", future[None, None])
            self.register_buffer("cache", torch.zeros(1, CONTEXT, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.program.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(C, dim=2)
        )
        if self.program.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
            y = (scores + self.mask[:, :, :T, :T]).softmax(-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        width = program.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(program)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=program.bias),
            nn.GELU(approximate=program.gelu),
            nn.Linear(4 * width, width, bias=program.bias),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.keeps_logits = program.keeps_logits
        self.tokens = nn.Embedding(VOCABULARY, program.width)
        self.positions = nn.Embedding(CONTEXT, program.width)
        self.blocks = nn.ModuleList([Block(program) for _ in range(program.layers)])
        self.norm = nn.LayerNorm(program.width)
        self.head = nn.Linear(program.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        return logits if self.keeps_logits else None, loss


def make_optimizer(model: nn.Module, program: Program) -> torch.optim.Optimizer:
    """Decays matrices only, as gollem does; the other program decays all."""
    parameters = [*model.parameters()]
    groups = [dict(params=parameters)]
    if program.has_buffers:
        groups = [
            dict(params=[p for p in parameters if p.dim() > 1]),
            dict(params=[p for p in parameters if p.dim() == 1], weight_decay=0.0),
        ]
    return torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1, fused=program.fused)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    program = PROGRAMS[options.program]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(program).to(device)
    optimizer = make_optimizer(model, program)
    shape = options.batch_size or program.batch, CONTEXT
    for _ in range(options.steps):
        if program.clears_first:
            optimizer.zero_grad()
        ids = torch.randint(VOCABULARY, shape).to(device)
        targets = ids.roll(-1, dims=1)
        context = contextlib.nullcontext()
        if program.autocast:
            context = torch.autocast(device, torch.bfloat16)
        with context:
            logits, loss = model(ids, targets)  # noqa: F841 (how long they live is what counts)
        if not program.clears_first:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if device == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"allocated {allocated / 2**20:.0f} MiB, reserved {reserved / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
