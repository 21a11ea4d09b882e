"""Damaged files: an error in one line that names the row, a warning, or no difference; no crash."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from topology import TopologyError
from topology.documents import to_json
from topology.files import parse_text
from topology.report import report

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
MATRIX = (DATA / "smi_dgx1_v100_cube_mesh.txt").read_text().partition("\n\nLegend")[0]
DOCUMENT = (DATA / "nccl_dgx1_v100.xml").read_text()
JSON = to_json(parse_text((DATA / "smi_a100_pcie_nvlink_bridge_pairs.txt").read_text()))
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=3000)


def read(text):
    """Read and show a text: the system, or None and one line that says why not."""
    try:
        system = parse_text(text)
    except TopologyError as error:
        message = str(error)
    else:
        assert report(system)
        return system
    assert message.strip()
    assert "\n" not in message
    return None


@st.composite
def damaged(draw, text):
    """Return the text with one place deleted, doubled, or written over."""
    start = draw(st.integers(0, len(text) - 1))
    end = start + draw(st.integers(0, 12))
    kept = text[start:end]
    new = draw(st.sampled_from(["", kept * 2, "\t", "SYS", "NV1", "9", "\n", "<", '"', "-"]))
    return text[:start] + new + text[end:]


def check_matrix(text):
    """Whatever changes what is read of the paths is an error or a warning."""
    system, whole = read(text), parse_text(MATRIX)
    assert system is None or system.warnings or system.paths == whole.paths


def check_text(text):
    read(text)


def check_document(values):
    read(json.dumps(values))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
WORDS = ["GPU0", "GPU1", "NIC0", "X", "NV4", "SYS", "N/A", "CPU Affinity", "0-3", "\t", "\n", " "]


@st.composite
def changed_json(draw):
    """Return our JSON with one entry of one part replaced."""
    document = json.loads(JSON)
    part = draw(st.sampled_from(sorted(document)))
    if isinstance(document[part], list) and document[part] and draw(st.booleans()):
        entry = draw(st.integers(0, len(document[part]) - 1))
        if isinstance(document[part][entry], dict):
            document[part][entry][draw(st.sampled_from(sorted(document[part][entry])))] = draw(
                values
            )
        else:
            document[part][entry] = draw(values)
    else:
        document[part] = draw(values)
    return document


STRATEGIES = {
    "matrix": (damaged(MATRIX), check_matrix),
    "xml": (damaged(DOCUMENT), check_text),
    "json": (changed_json(), check_document),
    "damaged json": (damaged(JSON), check_text),
    "words": (st.lists(st.sampled_from(WORDS), max_size=30).map("".join), check_text),
    "text": (st.text(max_size=60), check_text),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_damage(name):
    strategy, check = STRATEGIES[name]
    FEW(given(strategy)(check))()


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_much_damage(name):
    strategy, check = STRATEGIES[name]
    MANY(given(strategy)(check))()


@FEW
@given(st.integers(0, 10**6))
@example(0)
def test_every_row_counts(position):
    """A row that is missing, or there twice, is an error."""
    lines = MATRIX.splitlines()
    row = 1 + position % (len(lines) - 1)
    for text in (lines[:row] + lines[row + 1 :], lines[: row + 1] + lines[row:]):
        assert read("\n".join(text)) is None or text == [*lines, lines[-1]]
