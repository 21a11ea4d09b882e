"""What quantisation costs in quality: validation losses paired by seed, and errors of gradients.

``python -m benchmarks.quality`` trains a small GPT on real text with every *setting* and seed, each
run a line of a JSON file that the next call goes on from, and prints the tables of docs/quality.md.

Words: a *setting* is a ``zero.Config`` and a topology. A *pair* is a run and that of ``exact`` with
the same seed: the same initial weights, batches and held-out text. The *floor* is how far another
order of summation, which nobody would call a loss, moves the loss in the same runs.
"""
