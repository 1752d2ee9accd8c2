# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of docs/gallery.md are those that benchmarks/gallery.py draws from the results, and
what the page says of them is in the results."""

import copy
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")


@pytest.fixture(scope="module")
def gallery(benchmarks):
    import gallery

    return gallery


@pytest.fixture(scope="module")
def results(gallery):
    return json.loads(gallery.RESULTS.read_text("utf-8"))


def test_the_pictures_are_drawn_from_the_results(gallery, results):
    import paper_figures

    shown = set(re.findall(r"\]\((\S+\.svg)\)", PAGE))
    assert shown == {*gallery.PICTURES, *paper_figures.DRAWINGS, "trace.svg"}
    of_paper = json.loads((paper_figures.RESULTS / "paper-1-thread.json").read_text("utf-8"))
    for name, draw in paper_figures.DRAWINGS.items():
        drawn = (ROOT / "docs" / name).read_text("utf-8")
        assert drawn == draw(of_paper), f"draw docs/{name} again: benchmarks/paper_figures.py docs"
    for name, draw in gallery.PICTURES.items():
        drawn = (ROOT / "docs" / name).read_text("utf-8")
        assert drawn == draw(results), f"draw docs/{name} again: benchmarks/gallery.py docs"


def test_other_results_would_be_another_picture(gallery, results):
    other = copy.deepcopy(results)
    kinds = other["speed"][gallery.DEEP][gallery.KEPT]["kinds"]
    kinds["fused=True"]["ms"]["high"] += 1
    assert gallery.page_faults(other) != gallery.page_faults(results)


def test_no_words_are_outside_of_a_picture(gallery, results):
    beside = r'<text x="([\d.]+)" y="\d+" fill="#5a6570">(.*?)<'
    for draw in gallery.PICTURES.values():
        for x, words in re.findall(beside, draw(results)):
            assert float(x) + 6.3 * len(words) < gallery.WIDTH, words


def test_what_the_page_says_is_measured(gallery, results):
    speed = results["speed"]
    compared = (speed[gallery.DEEP][gallery.MALLOC], speed[gallery.DEEP][gallery.KEPT])
    compared += (speed[gallery.WIDE][gallery.MALLOC],)
    assert all(k["equal_bits"] for given in compared for k in given["kinds"].values())
    assert not any(kind["faults"] for kind in compared[2]["kinds"].values())
    assert "without page faults in any bar" in PAGE
    above, below = (
        given["kinds"]["fused=True"]["ms"]["median"]
        / given["kinds"]["forward, promises"]["ms"]["median"]
        for given in compared[:2]
    )
    assert above > 1.5 > below > 1, "half of the gain above was page faults"
    pale = [kind for kind in compared[0]["kinds"].values() if kind["faults"]]
    assert len(pale) == 3, "stock and the pale bars"
