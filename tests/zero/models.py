"""Models and data of the ZeRO tests. Made in one thread, copied by the ranks."""

import copy
import threading

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 17
_GENERATOR = threading.Lock()


class Block(nn.Module):
    """A residual block; ``recompute`` checkpoints its inside: "reentrant", "plain" or None."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.recompute = None

    def inside(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.recompute is None:
            return x + self.inside(x)
        reentrant = self.recompute == "reentrant"
        return x + checkpoint(self.inside, x, use_reentrant=reentrant)


class Tower(nn.Module):
    """Embedding, blocks, head. ``recompute`` checkpoints whole blocks."""

    def __init__(self, width=33, hidden=71, num_blocks=2, *, tied=False, vocabulary=VOCABULARY):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(num_blocks)])
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("offset", torch.zeros(3, dtype=torch.int64))
        self.recompute = None
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


class Reordered(nn.Module):
    """Units called in another order, or left out, from one call to the next; mixed dtypes."""

    def __init__(self, width=33):
        super().__init__()
        self.parts = nn.ModuleList([Block(width, 40) for _ in range(3)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x, order):
        for index in order:
            x = self.parts[index](x)
        return self.norm(x.to(self.norm.weight.dtype))


def make(kind, *arguments, seed=0, dtype=torch.float32, **options):
    """Build a model from a seed, without touching the state of the global generator."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(*arguments, **options).to(dtype)


def differing_copy(model, rank):
    """Return what a rank starts from: rank 0 the model, the others something else."""
    copied = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for tensor in (*copied.parameters(), *copied.buffers()):
                tensor.add_(rank)
    return copied


def tokens(rank, step, batch=1, length=5, vocabulary=VOCABULARY):
    """Return a rank's tokens of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def loss_of(model, x):
    """Predict the sum of a token and the one before, modulo the vocabulary."""
    logits = model(x)
    target = (x + x.roll(1, 1)) % logits.shape[-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
