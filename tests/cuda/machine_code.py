"""What the compiler made of the kernels: registers, spills, vector accesses, what PTX may do.

Read from NVRTC's log, from PTX and, where nvdisasm is installed, from SASS (the machine code of an
architecture). *Instructions per element* count the *main path*: through the body of the loop that
accesses most bytes, the path that accesses and adds most with the fewest instructions. That is
whole blocks, aligned rows, as many wires as the inner loop takes at once (four; two of casts and of
8-bit codes that are passed on; one where wires are transformed), and no division. Nothing is timed.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zcomm.codecs import compile as compiler

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
DISASSEMBLERS = ("cu13", "cuda_nvdisasm")
SMALLEST_PASS = 32  # bytes that a lane accesses in a main loop, at least
DIVISION = 100  # a start of one (FCHK) outweighs what is added (FFMA, FADD) after it

# Moves, exact conversions, memory.
HARMLESS = re.compile(
    r"(mov|selp|ld\.\S+|st\.\S+|shfl\.\S+|cvt\.rn)\.(f32|b32)(\.s32|\.u32|\.s16|\.u16|\.s8)? "
)
FLOATING = re.compile(r"\.(f16|f16x2|bf16|f32|f64)\b")
BY_HAND = {
    "add.rn.f32",
    "add.rm.f32",
    "sub.rn.f32",
    "mul.rn.f32",
    "div.rn.f32",
    "fma.rn.f32",
    "cvt.f32.f16",
    "cvt.rn.f16.f32",
    "rcp.approx.ftz.f32",  # start of 1 / scale, which is never subnormal; rcp.rn would be a call
}


@dataclass(frozen=True)
class Figures:
    """One instance on one architecture.

    The last three are None without nvdisasm, and for the general instances of encode, which have no
    body for vectors alone.
    """

    registers: int
    spilled_nbytes: int
    warnings: list[str]
    wide_loads: int | None = None
    wide_stores: int | None = None
    per_element: float | None = None


def figures(name, done):
    """Read the figures of one compiled instance."""
    registers = max(map(int, re.findall(r"Used (\d+) registers", done.log)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", done.log)))
    warnings = [line for line in done.log.splitlines() if "warning" in line.lower()]
    blocks = disassembled(done.cubin)
    if blocks is None:
        return Figures(registers, spilled, warnings)
    path = main_path(blocks)
    if sum(map(accessed_nbytes, path)) < SMALLEST_PASS:
        return Figures(registers, spilled, warnings)
    wide = [sum(kind in line and ".128" in line for line in path) for kind in ("LDG", "STG")]
    return Figures(registers, spilled, warnings, *wide, len(path) / elements_of_lane(name))


def elements_of_lane(name):
    """The elements that one lane does in one pass of the main loop."""
    kernel, arguments = re.fullmatch(r"zc::(\w+)<(.*)>", name).groups()
    sizes = [4 if each == "float" else 2 for each in arguments.split(", ")]
    if kernel == "encode":
        return 2 * 16 // sizes[0]
    if kernel == "reduce_casts":
        return 4 * 16 // max(sizes)
    return 32 if kernel == "decode_reduce_encode" else 16


def disassembled(cubin):
    """The basic blocks of SASS: (label, instructions) of each; None where there is no nvdisasm."""
    program = find_disassembler()
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([program, "-c", file.name], text=True)
    blocks = [("", [])]
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            blocks.append((label[1], []))
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            blocks[-1][1].append(found[1])
            if re.search(r"\b(BRA|EXIT|RET)\b", found[1]):
                blocks.append(("", []))
    return blocks


def main_path(blocks):
    """The instructions of the main path; see the top of this file."""

    def merit(path):
        added = sum(bool(re.search(r"\b(FFMA|FADD)\b", line)) for line in path)
        divided = sum("FCHK" in line for line in path)
        return sum(map(accessed_nbytes, path)), added - DIVISION * divided, -len(path)

    place = {label: i for i, (label, _) in enumerate(blocks) if label}
    loops = [
        (place[target], i)
        for i, (_, lines) in enumerate(blocks)
        for target in targets(lines)
        if place[target] <= i
    ]
    for_vectors = [loop for loop in loops if not loads_bytes(blocks, *loop)]
    paths = [best_path(blocks, place, merit, *loop) for loop in for_vectors or loops]
    return max(filter(None, paths), key=merit)


def loads_bytes(blocks, first, last):
    return any("LDG.E.U8" in line for _, lines in blocks[first : last + 1] for line in lines)


def best_path(blocks, place, merit, first, last):
    """The best way from one block to a later one, by jumps that lead on."""
    best = {first: blocks[first][1]}
    for i in range(first, last):
        if i not in best:
            continue
        lines = blocks[i][1]
        after = [place[target] for target in targets(lines)]
        if not lines or not re.match(r"BRA `|EXIT|RET", lines[-1]):
            after.append(i + 1)
        for j in after:
            if i < j <= last:
                path = best[i] + blocks[j][1]
                best[j] = max(best.get(j, []), path, key=merit)
    return best.get(last)


def targets(lines):
    """Where a block may jump to, other than for lanes that have diverged (BRA.DIV)."""
    return re.findall(r"BRA(?!\.DIV).*`\((\.L_x_\d+)\)", lines[-1]) if lines else []


def accessed_nbytes(line):
    """The bytes of a global access of a word or more, else 0; sums carried over are STRONG."""
    if not re.search(r"\b(LDG|STG)\b", line) or re.search(r"\.[US](8|16)\b|STRONG", line):
        return 0
    width = re.search(r"\.(64|128)\b", line)
    return int(width[1]) // 8 if width else 4


def find_disassembler():
    """The program from its wheel, or on the PATH."""
    for folder in sys.path:
        for each in DISASSEMBLERS:
            found = Path(folder) / "nvidia" / each / "bin" / "nvdisasm"
            if found.exists():
                return str(found)
    return shutil.which("nvdisasm")


def floating_point(ptx):
    """The floating-point instructions written by hand, and those that the compiler wrote."""
    by_hand, by_compiler, inside = set(), set(), False
    for line in map(str.strip, ptx.splitlines()):
        if line.startswith("//"):
            inside = "begin inline asm" in line or (inside and "end inline asm" not in line)
        elif not line.startswith(".") and FLOATING.search(line):
            line = re.sub(r"^@!?%p\d+ ", "", line).replace("\t", " ")
            if not HARMLESS.match(line):
                (by_hand if inside else by_compiler).add(line.split()[0])
    return by_hand, by_compiler


def compiled(arch, name):
    """Compile one instance with the compiler's report on resources."""
    return compiler.compiled(arch, [name], ["--ptxas-options=-v"])
