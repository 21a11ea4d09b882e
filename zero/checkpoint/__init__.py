"""Checkpoints: safetensors shards and a JSON index, from any number of ranks to any other."""
