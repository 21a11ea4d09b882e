"""Pictures of results: ``python -m benchmarks.plots sizes FILE ... -o sizes.png``.

Reads the JSON lines of ``benchmarks.wire`` (sizes, levels) and of whatever breaks training steps
down (steps): objects with ``name``, ``compute_s``, ``comm_s`` and ``other_s``. Nothing is measured
here, and no figure is in a picture that is not in a file. Pictures are not kept with the sources.
"""
