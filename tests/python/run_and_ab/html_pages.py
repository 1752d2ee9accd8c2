# SPDX-License-Identifier: BSD-3-Clause
"""Reads the page that `python -m optfuse ab` writes."""

import html.parser


class Page(html.parser.HTMLParser):
    """The elements of a page, and the addresses that they load."""

    EMPTY = {"meta", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v[:1] != "#"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
