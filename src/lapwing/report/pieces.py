"""Pieces of HTML: sections, paragraphs, charts with captions, legends, tables, and the document around them. Texts are
escaped here, so that nobody else need think of it; `body` and `svg` are HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources


def section(title: str, body: str) -> str:
    """A part of the page, with its heading."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def words(text: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(text)}</p>"


def charts(found: Iterable[tuple[str, str]]) -> str:
    """(svg, caption) side by side where there is room."""
    each = (f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for svg, caption in found)
    return f'<div class="charts">{"".join(each)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What each style stands for."""
    each = (f'<li><i class="{style}"></i>{html.escape(name)}</li>' for style, name in entries)
    return f'<ul class="legend">{"".join(each)}</ul>'


def table(rows: Sequence[Sequence[str]], style: str) -> str:
    """Rows of cells, the first of them the head, which may be blank."""
    head, *body = rows
    lines = (
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in body
    )
    return wrapped(head, "".join(lines), style)


def wrapped(head: Sequence[str], body: str, style: str) -> str:
    """A table of rows in HTML."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    shown = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return scrolled(f'<table class="{style}">{shown}<tbody>{body}</tbody></table>')


def scrolled(body: str) -> str:
    """In a box that scrolls where the page is narrow."""
    return f'<div class="scroll">{body}</div>'


def document(title: str, parts: Iterable[str]) -> str:
    """The whole page, with its style and script in it."""
    style, script = (_own(f"page.{ending}") for ending in ("css", "js"))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style>'
    )
    body = f"<main>{''.join(parts)}</main><script>{script}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _own(name: str) -> str:
    return resources.files("lapwing.report").joinpath(name).read_text("utf-8")
