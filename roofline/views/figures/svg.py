"""Converts a figure's SVG for a page: small, themed, with an accessible name and the values of its points.

matplotlib writes files meant to stand alone. Inside a page, ids must be unique to the figure, colours follow the
reader's theme (CSS variables), and a cloud of thousands of points takes more bytes than all else. So attributes that
marks share move to their group, coordinates are rounded to 0.01 points (the page's pixel is larger), and marks that
would land on the same half point are drawn once, with their hover texts joined. Letters with an outline stay letters:
matplotlib would draw each of them twice as a path, 0.3 MB of a page. Hover texts stand in `data-tips` of their group,
separated by "|", with their common beginning in `data-head`; a small script of the page shows them. The same holds for
a grid of cells (`data-columns` per row).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

SPACE = "{http://www.w3.org/2000/svg}"
CLIP = "clip-path"
LINK = "{http://www.w3.org/1999/xlink}href"
CELL = 0.5  # points: marks nearer to each other than that are merged
SEPARATOR = "|"
OUTLINED = "outlined"  # the id of letters that are to have an outline in the background's colour
OUTLINE = 2.5  # points, half of them outside the letters
WORDS_SHOWN = 3  # of merged marks, this many have their hover text in full
FONT = "'DejaVu Sans', Verdana, system-ui, sans-serif"  # Verdana is as wide: no overlaps without DejaVu

_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_NUMBERS = re.compile(r"-?[\d.]+")
_FAMILY = re.compile(r"font-family: [^;]*;? ?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline(
    svg: str, name: str, alt: str, tips: Mapping[str, Sequence[str]], colours: Sequence[str],
    columns: Mapping[str, int] | None = None, behind: str = "#ffffff",
) -> str:  # fmt: skip
    """Converts an SVG for use inside a page.

    `tips`: by group id, the hover texts of its marks, or of an image's cells, row by row, `columns` per row. `colours`
    become CSS variables. `behind`: the colour around letters of the id OUTLINED. A group whose numbers of marks and
    texts differ gets no hover texts.
    """
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata"):
                parent.remove(child)
    for group in list(root.iter()):
        words = tips.get(group.get("id", ""))
        if words:
            _tell(group, words, (columns or {}).get(group.get("id", "")))
        if group.get("id") == OUTLINED:
            group.set(
                "style", f"paint-order: stroke; stroke: {behind}; stroke-width: {OUTLINE:g}; stroke-linejoin: round"
            )
    _shrink(root)
    _own_names(root, name)
    pattern = re.compile("|".join(map(re.escape, colours)))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            if not key.startswith("data-"):
                element.set(key, pattern.sub(lambda found: f"var(--f-{found[0][1:]})", value))
    for key in ("version", "height", "width"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": alt, "width": "100%", "style": f"font-family: {FONT}"}
    return ET.tostring(root, encoding="unicode")


def alone(svg: str) -> str:
    """Converts the SVG to a file of its own, with colours resolved: few programs but browsers know CSS variables."""
    plain = re.sub(r"var\(--f-([0-9a-f]{6})\)", r"#\1", svg)
    return plain.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _tell(group: ET.Element, words: Sequence[str], columns: int | None) -> None:
    words = [word.replace(SEPARATOR, "/") for word in words]
    if columns is not None:
        _say(group, [[word] for word in words])
        group.set("data-columns", str(columns))
        return
    _clip_once(group)
    # one mark per point: many equal marks are <use> of one <path>, a few are paths of their own
    defined = {path for defs in group.iter(f"{SPACE}defs") for path in defs.iter()}
    marks = list(group.iter(f"{SPACE}use")) or [e for e in group.iter(f"{SPACE}path") if e not in defined]
    if len(marks) != len(words):
        return
    kept: dict[tuple[object, ...], list[str]] = {}
    drawn = []
    parents = {child: parent for parent in group.iter() for child in parent}
    for mark, word in zip(marks, words, strict=True):
        if mark.tag == f"{SPACE}use":
            x, y = (float(mark.get(axis, "0")) for axis in "xy")
            place: tuple[object, ...] = (round(x / CELL), round(y / CELL), mark.get(LINK), mark.get("style"))
            mark.attrib |= {"x": f"{x:.1f}".removesuffix(".0"), "y": f"{y:.1f}".removesuffix(".0")}
        else:
            corners = (round(float(number) / CELL) for number in _NUMBERS.findall(mark.get("d", "")))
            place = (*corners, mark.get("style"))
        if place in kept:
            kept[place].append(word)
            parents[mark].remove(mark)
            continue
        kept[place] = [word]
        drawn.append(mark)
    _say(group, list(kept.values()))
    _hoist(drawn, group)


def _clip_once(group: ET.Element) -> None:
    """Clips a group where matplotlib clips each of its marks, in a group of its own, by the same path."""
    holders = {child for child in group if child.tag == f"{SPACE}g" and len(child) == 1 and set(child.attrib) == {CLIP}}
    cut = {holder.get(CLIP, "") for holder in holders}
    if len(cut) == 1:
        group[:] = [child[0] if child in holders else child for child in group]
        group.set(CLIP, cut.pop())


def _say(group: ET.Element, told: Sequence[Sequence[str]]) -> None:
    """Sets `data-tips` and, as `data-head`, the common beginning of all hover texts up to its last comma."""
    words = [word for mark in told for word in mark]
    first, last = min(words), max(words)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    head = first[:same]
    head = head[: head.rfind(", ") + 2] if ", " in head else ""
    if head:
        group.set("data-head", head)
    group.set("data-tips", SEPARATOR.join(_joined([word.removeprefix(head) for word in mark]) for mark in told))


def _joined(words: Sequence[str]) -> str:
    more = len(words) - WORDS_SHOWN
    return "; ".join(words[:WORDS_SHOWN]) + (f"; and {more} more here" if more > 0 else "")


def _hoist(marks: Sequence[ET.Element], group: ET.Element) -> None:
    """Moves the style properties and the clip path that all marks share to their group."""
    cut = {mark.get(CLIP) for mark in marks}
    if len(cut) == 1 and (where := cut.pop()) is not None:
        for mark in marks:
            del mark.attrib[CLIP]
        group.set(CLIP, where)
    styles = [_style(mark) for mark in marks]
    if not styles:
        return
    common = {key: value for key, value in styles[0].items() if all(s.get(key) == value for s in styles)}
    for mark, style in zip(marks, styles, strict=True):
        _set_style(mark, {key: value for key, value in style.items() if key not in common})
    _set_style(group, {**_style(group), **common})


def _style(element: ET.Element) -> dict[str, str]:
    parts = (part.partition(":") for part in element.get("style", "").split(";"))
    return {key.strip(): value.strip() for key, _, value in parts if value}


def _set_style(element: ET.Element, style: Mapping[str, str]) -> None:
    element.attrib.pop("style", None)
    if style:
        element.set("style", ";".join(f"{key}:{value}" for key, value in style.items()))


def _shrink(root: ET.Element) -> None:
    """Rounds numbers to a hundredth of a point, sets one font family, and removes white space and empty definitions."""
    for element in root.iter():
        if element.tag != f"{SPACE}text":
            element.text = None
        element.tail = None
        for key in ("d", "x", "y", "transform", "width", "height"):
            if key in element.attrib and not element.get(key, "").startswith("data:"):
                element.set(key, _NUMBER.sub(_rounded, element.get(key, "")).replace("\n", " "))
        if "style" in element.attrib:
            element.set("style", _FAMILY.sub("", element.get("style", "")))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{SPACE}defs" and not len(child):
                parent.remove(child)


def _rounded(found: re.Match[str]) -> str:
    """Rounds a number; small ones (scales of letters) keep four significant digits."""
    value = float(found[0])
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) >= 0.1 else f"{value:.4g}"


def _own_names(root: ET.Element, name: str) -> None:
    """Makes ids short and begin with the figure's name; removes those that nothing refers to."""
    wanted = {
        reference
        for element in root.iter()
        for value in element.attrib.values()
        for reference in [*_REFERENCE.findall(value), *([value[1:]] if value.startswith("#") else [])]
    }
    own = {reference: f"{name}-{number}" for number, reference in enumerate(sorted(wanted))}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                if value in wanted:
                    element.set(key, own[value])
                else:
                    del element.attrib[key]
            elif key == LINK:
                del element.attrib[key]
                element.set("href", f"#{own[value[1:]]}" if value.startswith("#") else value)
            elif key.startswith("{"):
                del element.attrib[key]
                element.set(key.rpartition("}")[2], value)
            elif "url(#" in value and not key.startswith("data-"):
                element.set(key, _REFERENCE.sub(lambda found: f"url(#{own[found[1]]})", value))
