# SPDX-License-Identifier: BSD-3-Clause
"""The table of optimizers is the C library's: Python reads names and order from it."""

import pytest
from torch.optim import SGD

from optfuse import _rules
from optfuse._library.bindings import lib
from optfuse.optim import Lion

TEXT = lib.of_shim_rules().decode()
LION = "lion:OP_BY_OP:UNCOUNTED: exp_avg: lr beta1 beta2 weight_decay maximize:\n"


def test_a_row_has_state_and_options_in_the_order_of_the_kernels():
    assert LION in TEXT
    rule = _rules.RULES[Lion]
    assert rule.options == ("lr", "betas.0", "betas.1", "weight_decay", "maximize")
    assert rule.state == ("exp_avg",) and not rule.counts_steps


def test_two_options_that_change_places_do_so_in_python():
    swapped = TEXT.replace(LION, LION.replace("beta1 beta2", "beta2 beta1"))
    assert _rules._rows(swapped)["lion"]["options"][:3] == ("lr", "betas.1", "betas.0")
    assert _rules._rows(TEXT)["lion"]["options"][:3] == ("lr", "betas.0", "betas.1")


@pytest.mark.parametrize("row", ["adam", "rprop"])
def test_a_row_of_another_optimizer_does_not_pass_for_this_one(row, monkeypatch):
    """As a library would have it whose rows are out of place."""
    wrong = _rules.Rule("sgd", **_rules.ROWS[row])
    monkeypatch.setitem(_rules.RULES, SGD, wrong)
    with pytest.raises(ImportError, match=r"rule 'sgd' has an option '[\w.]+', which SGD"):
        _rules._check_table()


def test_every_option_is_one_of_its_class():
    _rules._check_table()
