"""griffe's extension: the one-line sections of riftco's docstrings (`Numerics: ..`) as paragraphs with a bold name.

Google's style would take a name with an indented second line for an admonition, and the first line for its title.
"""

import re

from griffe import Docstring, Extension, Object

SECTION = re.compile(r"^([A-Z][a-z]+(?: [a-z]+)*): (?=\S)")


def paragraphs(text: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        if SECTION.match(line):
            inside = True
            lines += ["", SECTION.sub(r"**\1**: ", line)]
        elif inside and line.startswith("    "):
            lines.append(line.strip())
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines)


class Paragraphs(Extension):
    def on_object(self, *, obj: Object, **kwargs) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = paragraphs(obj.docstring.value)
