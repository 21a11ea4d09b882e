"""Print what NVRTC makes of the kernels: ``python -m tests.cuda.table [ARCH ...]``.

One row an instance and architecture: registers, 128-bit loads and stores of the main path, its
instructions per element. machine_code.py says what these are. Needs CuPy, NVRTC and nvdisasm.
"""

import sys

from tests.cuda import machine_code
from zcomm.codecs import compile as compiler
from zcomm.codecs import instances


def row(arch, name, found):
    """A row of a Markdown table."""
    short = name.replace("zc::", "")
    per_element = "" if found.per_element is None else f"{found.per_element:.1f}"
    cells = (short, arch, found.registers, found.wide_loads, found.wide_stores, per_element)
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def main(archs):
    if compiler.why_not():
        sys.exit(f"no NVRTC: {compiler.why_not()}")
    print("| kernel | architecture | registers | LDG.128 | STG.128 | instructions per element |")
    print("|---|---|---|---|---|---|")
    for arch in archs or ("sm_90",):
        for name in instances.every():
            found = machine_code.figures(name, machine_code.compiled(arch, name))
            print(row(arch, name, found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
