"""The table of variables: its readers, its page in docs, and that nothing else reads them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcomm import environment

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("topology", "zcomm", "zero", "benchmarks", "examples")
CPP = (".h", ".hpp", ".cpp", ".cu")
TEXTS = (".py", ".md", *CPP)
NAMES = [variable.name for variable in environment.VARIABLES]


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS)


def test_sources_name_no_variable_that_the_table_lacks():
    anywhere = re.compile(r"\bZCOMM_[A-Z0-9_]*[A-Z0-9]\b")
    in_quotes = re.compile(r'"(ZCOMM_\w+)"')  # macros of C++ may have the same prefix
    found = {
        (name, str(path.relative_to(ROOT)))
        for path in [*files(*SOURCES, "docs"), ROOT / "README.md", ROOT / "Makefile"]
        for name in (in_quotes if path.suffix in CPP else anywhere).findall(path.read_text())
        if name not in NAMES
    }
    assert found == set()


def test_only_environment_reads_zcomm_variables():
    """No other module of the packages looks into os.environ with one of these names in it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files("topology", "zcomm", "zero")
        if path.suffix == ".py" and path.name != "environment.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Call, ast.Subscript))
        and re.match(r"(os\.)?(environ\b|getenv\b)", ast.unparse(node))
        and "ZCOMM_" in ast.unparse(node)
    ]
    assert found == []


def test_page_lists_every_variable_with_its_default_and_choices():
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = dict(re.findall(r"^\| `(ZCOMM_\w+)` (\|.*)$", page, re.MULTILINE))
    assert list(rows) == NAMES
    for variable in environment.VARIABLES:
        default, meaning = rows[variable.name].split("|")[1:3]
        assert variable.default in default
        assert [choice for choice in variable.choices if f"`{choice}`" not in meaning] == []


def test_values_come_from_the_environment_at_the_call(monkeypatch):
    monkeypatch.delenv("ZCOMM_TIMEOUT", raising=False)
    assert environment.seconds("ZCOMM_TIMEOUT") == 600.0
    monkeypatch.setenv("ZCOMM_TIMEOUT", "2.5")
    assert environment.seconds("ZCOMM_TIMEOUT") == 2.5
    monkeypatch.setenv("ZCOMM_TIMEOUT", "")
    assert environment.seconds("ZCOMM_TIMEOUT") == 600.0


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("off", False), ("0", False)]
)
def test_flag(monkeypatch, value, expected):
    monkeypatch.setenv("ZCOMM_CHECK", value)
    assert environment.flag("ZCOMM_CHECK") is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", 1), ("4096", 4096), ("64KiB", 65536), ("3 mib", 3 * 2**20), ("1GiB", 2**30)],
)
def test_nbytes(monkeypatch, value, expected):
    monkeypatch.setenv("ZCOMM_MESSAGE_LIMIT", value)
    assert environment.nbytes("ZCOMM_MESSAGE_LIMIT") == expected


@pytest.mark.parametrize(
    ("reader", "name", "value", "possible"),
    [
        (environment.flag, "ZCOMM_CHECK", "maybe", "possible are 1 and 0"),
        (environment.seconds, "ZCOMM_TIMEOUT", "soon", "greater than 0"),
        (environment.seconds, "ZCOMM_TIMEOUT", "0", "greater than 0"),
        (environment.seconds, "ZCOMM_TIMEOUT", "nan", "greater than 0"),
        (environment.seconds, "ZCOMM_TIMEOUT", "inf", "greater than 0"),
        (environment.nbytes, "ZCOMM_MESSAGE_LIMIT", "1.5GiB", "64KiB"),
        (environment.nbytes, "ZCOMM_MESSAGE_LIMIT", "0", "64KiB"),
        (environment.nbytes, "ZCOMM_MESSAGE_LIMIT", "-1", "64KiB"),
        (environment.text, "ZCOMM_CPU", "sse9", "avx512, avx2, baseline"),
        (environment.text, "ZCOMM_CODEC_BACKEND", "cuda13", "numpy, native"),
    ],
)
def test_bad_value_is_one_line_with_the_name_the_value_and_what_is_possible(
    monkeypatch, reader, name, value, possible
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=possible) as caught:
        reader(name)
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "\n" not in message


def test_settings_are_the_set_ones_and_unknown_names_the_strangers(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZCOMM_TOPOLOGY", " 2x2 ")
    monkeypatch.setenv("ZCOMM_CHECK", "")
    monkeypatch.setenv("ZCOMM_TIMEOUTS", "5")
    assert environment.settings() == {"ZCOMM_TIMEOUTS": "5", "ZCOMM_TOPOLOGY": "2x2"}
    assert environment.unknown() == ["ZCOMM_TIMEOUTS"]
