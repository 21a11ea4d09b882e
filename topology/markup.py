"""XML elements that know their line, read without anything that a topology file does not need.

Document types and entities are refused: no such file has them, and they are how small texts grow.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from topology.errors import TopologyError

MAX_DEPTH = 64
_XML_ERRORS = re.compile(r": line \d+, column \d+$")


@dataclass
class Element:
    """A tag with its attributes, children and line."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list["Element"] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Return the line and the start of the tag, for messages."""
        shown = next(((k, v) for k, v in self.attributes.items() if k != "host_hash"), None)
        words = f' {shown[0]}="{shown[1][:40]}"' if shown else ""
        return f"line {self.line}, <{self.tag}{words}>"

    def find(self, tag: str) -> "list[Element]":
        """Return the children of a tag."""
        return [child for child in self.children if child.tag == tag]

    def walk(self) -> "Iterator[Element]":
        """Yield this element and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def number(self, name: str) -> int | None:
        """Return a whole number, None where the attribute is not there or empty.

        Raises:
            TopologyError: another text.
        """
        text = self.attributes.get(name, "").strip()
        if not text:
            return None
        try:
            value = int(text, 16) if text.lower().startswith("0x") else int(text)
        except ValueError:
            value = None
        if value is None or abs(value) >= 2**63:
            raise TopologyError(f"{self.where}: {name}={text[:40]!r} is not a whole number")
        return value


def parse_xml(text: str) -> Element:
    """Return the root of a document.

    Raises:
        TopologyError: not well-formed, deeper than ``MAX_DEPTH``, or with a document type. The
            message names the line.
    """
    parser = expat.ParserCreate()
    open_elements: list[Element] = []
    roots: list[Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (open_elements[-1].children if open_elements else roots).append(element)
        open_elements.append(element)
        if len(open_elements) > MAX_DEPTH:
            raise TopologyError(f"{element.where}: more than {MAX_DEPTH} elements deep")

    def end(tag: str) -> None:
        open_elements.pop()

    def doctype(*_: object) -> None:
        raise TopologyError(f"line {parser.CurrentLineNumber}: a document type is not expected")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text.lstrip("\ufeff").encode(errors="surrogatepass"), True)
    except expat.ExpatError as error:
        words = _XML_ERRORS.sub("", str(error))
        raise TopologyError(f"line {error.lineno}: XML is damaged: {words}") from None
    except LookupError as error:
        raise TopologyError(f"line 1: XML is damaged: {error}") from None
    return roots[0]
