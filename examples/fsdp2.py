"""Train a small GPT with FSDP2 and ZeRO++'s communication; neither MPI nor a GPU is needed.

ZCOMM_TOPOLOGY=2x2 torchrun --nproc-per-node 4 examples/fsdp2.py      # plays two nodes
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import zcomm.torch

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


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
comm = zcomm.torch.quantize_fsdp(model)  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(STEPS):
    starts = torch.randint(len(TEXT) - 65, (8, 1))
    batch = TEXT[starts + torch.arange(65)]
    loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 == 0:
        megabytes = comm.traffic.wire_nbytes(level=1) / 1e6
        print(f"step {step} loss {loss.item():.3f}, {megabytes:.1f} MB to other nodes", flush=True)
dist.destroy_process_group()
