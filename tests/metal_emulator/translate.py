"""Metal source -> C++ that clang compiles: a pass over the text that touches only what C++ has no words for.

Attributes, host_name instantiations (taken out and registered at the end), `threadgroup T name[N];` locals and
`vec<T, N>(...)` constructors. Everything else is the shader's own text, line numbers included; vocabulary such as
`device`, `float4` or `simd_sum` comes from include/metal_stdlib. What the pass does not understand is an error: an
array whose `threadgroup` were merely dropped would silently become private to each thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

POSITIONS = (
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "dispatch_threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)
KERNEL = r"(?:\[\[\s*kernel\s*(?:,[^\]]*)?\]\]|\bkernel\b)"
DEFINITION = re.compile(rf"(template\s*<[^;{{}}]*?>\s*)?{KERNEL}\s*void\s+(\w+)\s*\(")
INSTANTIATION = re.compile(rf'template\s*\[\[\s*host_name\s*\(\s*((?:"[^"]*"\s*)+)\)\s*\]\]\s*{KERNEL}\s*([^;]*);')
ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*\]\]")
LOCAL = re.compile(
    r"(?P<before>[;{}]\s*)threadgroup\s+(?P<type>[\w:]+(?:\s*<[^;{}()]*?>)?)\s+(?P<name>\w+)\s*(?P<dims>(?:\[[^\]]*\])*)\s*;"
)


class MetalError(Exception):
    """The shader says something that Metal, or this pass, does not take."""


@dataclass(frozen=True)
class Kernel:
    host_name: str
    function: str
    binds: tuple[str, ...]


@dataclass(frozen=True)
class Translation:
    cpp: str
    kernels: tuple[str, ...]  # host names


def includes(source: str) -> tuple[str, str]:
    """(the source without its <metal_*> includes, those lines): the user's macros are expanded in between."""
    pattern = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>.*$", re.M)
    found = pattern.findall(source)
    if not found:
        raise MetalError("the shader does not include <metal_stdlib>")
    return pattern.sub("", source), "\n".join(line.strip() for line in found) + "\n"


def translate(expanded: str, headers: str) -> Translation:
    """Preprocessed Metal source and its <metal_*> includes -> a C++ file that registers every kernel."""
    text = re.sub(r"^#(?=\s*\d)", "#line", expanded, flags=re.M)  # `# 3 "file" 2` and its flags
    text = re.sub(r'^(#line\s+\d+\s+"[^"]*").*$', r"\1", text, flags=re.M)
    kernels, templates = _definitions(text)
    text, made = _instantiations(text, templates)
    kernels += made
    if "host_name" in text:
        raise MetalError("host_name is understood in `template [[host_name(..)]] [[kernel]] ..;` only")
    if not kernels:
        raise MetalError("no kernel")
    text = re.sub(KERNEL, "", text)
    text = ATTRIBUTE.sub(_drop, text)
    text = _threadgroup_locals(text)
    text = re.sub(r"\bvec\s*<\s*([^<>,]+),\s*([^<>,]+)>\s*\(", r"msl::make<\1, \2>(", text)
    return Translation(f"{headers}{text}\n{_registration(kernels)}", tuple(k.host_name for k in kernels))


def _definitions(text: str) -> tuple[list[Kernel], dict[str, tuple[str, ...]]]:
    plain, templates = [], {}
    for m in DEFINITION.finditer(text):
        binds = _binds(m[2], text[m.end() : _closing(text, m.end() - 1)])
        if m[1]:
            templates[m[2]] = binds
        else:
            plain.append(Kernel(m[2], m[2], binds))
    return plain, templates


def _instantiations(text: str, templates: dict[str, tuple[str, ...]]) -> tuple[str, list[Kernel]]:
    kernels = []

    def take(m: re.Match) -> str:
        host_name = "".join(re.findall(r'"([^"]*)"', m[1]))
        named = re.match(r"decltype\s*\((.*?)\)\s", m[2], re.S) or re.match(r"void\s+(\w+\s*<[^()]*>)\s*\(", m[2])
        if not named:
            raise MetalError(f"{host_name}: neither decltype(f<..>) f<..> nor void f<..>(..): {m[2].strip()!r}")
        function = " ".join(named[1].split())
        name = function.split("<")[0].strip()
        if name not in templates:
            raise MetalError(f"{host_name}: no kernel template {name}")
        kernels.append(Kernel(host_name, function, templates[name]))
        return "\n" * m[0].count("\n")

    return INSTANTIATION.sub(take, text), kernels


def _binds(kernel: str, parameters: str) -> tuple[str, ...]:
    binds, buffers = [], set()
    for parameter in _split(parameters):
        found = ATTRIBUTE.findall(parameter)
        if len(found) != 1:
            raise MetalError(f"{kernel}: a kernel parameter has exactly one attribute: {parameter.strip()!r}")
        name, index = found[0]
        if name == "buffer":
            if not index.isdigit() or index in buffers:
                raise MetalError(f"{kernel}: buffer({index}) is no number or is taken twice")
            buffers.add(index)
            binds.append(f"{{msl::Kind::buffer, {index}, 0, false}}")
        elif name in POSITIONS:
            binds.append(f"{{msl::Kind::position, msl::{name}, 0, false}}")
        elif name == "threadgroup":
            raise MetalError(f"{kernel}: PyTorch's library cannot size [[threadgroup]] arguments; use static arrays")
        else:
            raise MetalError(f"{kernel}: unknown attribute [[{name}]]")
    return tuple(binds)


def _drop(m: re.Match) -> str:
    if m[1] in (*POSITIONS, "buffer", "max_total_threads_per_threadgroup"):
        return ""
    raise MetalError(f"unknown attribute {m[0]}")


def _threadgroup_locals(text: str) -> str:
    count = 0

    def rewrite(m: re.Match) -> str:
        nonlocal count
        count += 1
        kind, name, dims = m["type"], m["name"], m["dims"]
        array = f"msl::identity_t<{kind}{dims}>"
        return (
            f"{m['before']}msl_threadgroup {kind} (&{name}){dims} = "
            f"*(msl_threadgroup {array}*)msl_threadgroup_array({count}, sizeof({array}));"
        )

    before = None
    while before != text:  # a match eats the `;` that starts the next declaration
        before, text = text, LOCAL.sub(rewrite, text)
    for m in re.finditer(r"\bthreadgroup\b([^;,(){}=\[]*)", text):
        if "*" not in m[1] and "&" not in m[1] and not text[m.end() :].startswith("(&"):
            line = text[m.start() : text.find(";", m.start()) + 1]
            raise MetalError(f"a threadgroup declaration that is not understood: {line!r}")
    return text


def _registration(kernels: list[Kernel]) -> str:
    names = [k.host_name for k in kernels]
    if len(set(names)) < len(names):
        raise MetalError(f"kernels of one name: {sorted({n for n in names if names.count(n) > 1})}")
    lines = []
    for i, k in enumerate(kernels):
        lines.append(f"msl::Bind binds{i}[] = {{{', '.join(k.binds)}}};")
        lines.append(f'const int added{i} = msl::Kernel<(&{k.function})>::add("{k.host_name}", binds{i});')
    # the lint registers nothing, but a template's body is looked at only where it is used
    used = [f"auto* msl_used{i} = &{k.function};" for i, k in enumerate(kernels)]
    return "\n".join(["#ifndef MSL_LINT", "namespace {", *lines, "}  // namespace", "#else", *used, "#endif", ""])


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise MetalError("unbalanced parentheses")


def _split(parameters: str) -> list[str]:
    """At the commas outside all brackets."""
    parts, depth, part = [], 0, ""
    for c in parameters + ",":
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            if part.strip():
                parts.append(part)
            part = ""
        else:
            part += c
    return parts
