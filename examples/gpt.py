"""Train a small GPT from scratch on this file's own text, with ZeRO++.

mpirun -n 4 python examples/gpt.py            # ZCOMM_TOPOLOGY=2x2 plays two nodes
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import zcomm
import zero

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


class GPT(nn.Module):
    def __init__(self, width: int = 128, num_layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places.weight
        for layer in self.layers:
            y = layer(y, self.mask, is_causal=True)
        return y @ self.tokens.weight.T


with zcomm.init() as comm:
    torch.manual_seed(comm.rank)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero.shard(model, optimizer, zero.Config.zeropp(), comm=comm)
    for step in range(STEPS):
        starts = torch.randint(len(TEXT) - 65, (8, 1))
        batch = TEXT[starts + torch.arange(65)]
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = zero.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} norm {norm.item():.2f}", flush=True)
