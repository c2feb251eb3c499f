"""One line of a graph's listing as a reader would write it: ``mul_4 = aten.mul(getitem_5, x)``.

Listings are data (a stored report has them, pages are drawn from them), in two spellings: that of
``torch.fx`` (a site's nodes) and that of :meth:`fusion.graph.snapshot.Snapshot.listing`. What this
module makes of either is for eyes only: overloads that say nothing, arguments that are None and
the book-keeping of functionalised calls are left out.
"""

from __future__ import annotations

import re

_FX = re.compile(r"%?(\w+) : .*?= (\w+)\[target=([^\]]+)\](?:\(args = (.*), kwargs = \{(.*)\}\))?$")
_PLAIN = re.compile(r"(\w+) = ([\w.]+)(\(.*[)}])$")
_OPERATOR = re.compile(r"<OpOverload\(op='([\w.:]+)', overload='(\w+)'\)>")
_FUNCTIONALIZED = re.compile(r"auto_functionalized(_v2)?$")
_TO_THE_END = str(2**63 - 1)
"""How a slice says that it goes on to the end."""


def name_of(line: str) -> str:
    """The name of the node that a line of a listing is about, or ""."""
    match = re.match(r"%?(\w+) (?::|=)", line)
    return match[1] if match else ""


def readable(line: str) -> str:
    """The line as an assignment; text that is no line of a listing comes back as it is."""
    if (match := _FX.match(line)) is not None:
        name, kind, target, args, pairs = match.groups()
        if args is None:
            return f"{name} = {kind} {target}"
        given = _inside(args.replace("%", ""))
        named = _pairs(pairs.replace("%", ""))
    elif (match := _PLAIN.match(line)) is not None:
        name, target, rest = match.groups()
        end = _closing(rest)
        given = _inside(rest[:end])
        named = _pairs(_inside_text(rest[end:].strip()))
    else:
        return line
    return f"{name} = {_call(target, given, named)}"


def _call(target: str, given: list[str], named: dict[str, str]) -> str:
    target = target.removeprefix("torch.ops.").removeprefix("higher_order.")
    if target in ("getitem", "operator.getitem", "_operator.getitem") and len(given) == 2:
        return f"{given[0]}[{given[1]}]"
    if _FUNCTIONALIZED.match(target) and given:
        target, given = _OPERATOR.sub(r"\1.\2", given[0]), given[1:]
        written = named.get("_all_bases")
        named = {k: v for k, v in named.items() if not k.startswith("_")}
        if written is not None:
            named["writes"] = written
    words = [w.replace(_TO_THE_END, "end") for w in given]
    words += [f"{k}={v}" for k, v in named.items() if v != "None"]
    return f"{target.removesuffix('.default').removesuffix('.Tensor')}({', '.join(words)})"


def _pairs(text: str) -> dict[str, str]:
    """``key: %cat, 'scale': None`` as a mapping."""
    found = (part.partition(": ") for part in split(text))
    return {key.strip("'"): value for key, _, value in found}


def split(text: str) -> list[str]:
    """The parts of ``a, f(b, c), [d, e]`` between commas that stand in no bracket or string."""
    parts, depth, quote, start = [], 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def _closing(text: str) -> int:
    """The place behind the bracket that closes the first one of ``text``."""
    depth, quote = 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth == 0:
                return i + 1
    return len(text)


def _inside_text(text: str) -> str:
    return text[1:-1] if text[:1] in ("(", "{") and len(text) > 1 else text


def _inside(text: str) -> list[str]:
    return split(_inside_text(text))
