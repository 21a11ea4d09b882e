"""Collectives: plain functions that execute a plan over a channel.

Each docstring is the numbered algorithm.
"""
