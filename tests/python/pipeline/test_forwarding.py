# SPDX-License-Identifier: BSD-3-Clause
"""The order of one process that fast-forwards: what runs when, without running anything."""

from optfuse_layers.pipeline.flow import Flow
from optfuse_layers.pipeline.forwarding import Forwarding
from optfuse_layers.pipeline.plan import PlannedLayer, Task, placed

KINDS = {"F": "forward", "X": "input_gradient", "W": "weight_gradient", "U": "update"}


def tasks(text):
    """Such as "F1.0": kind, layer, batch."""
    return [Task(KINDS[word[0]], *map(int, word[1:].split("."))) for word in text.split()]


def played(text, here=lambda key: True, waits=False, in_flight=0, micro_batches=1):
    layers = [PlannedLayer(str(n), 1.0, 1.0 * n, 1.0, 0.0, 8, 8, 8, False, 0) for n in range(2)]
    options = {"in_flight": in_flight}
    plan = placed(layers, "fast_forward", 1, (0.0, 0.0), micro_batches, **options)
    ran = []
    Forwarding(Flow(plan), 0, tasks(text), None, waits, here, ran.append).play()
    letters = {kind: letter for letter, kind in KINDS.items()}
    return " ".join(f"{letters[kind]}{layer}.{batch}" for kind, layer, batch in ran)


GROUP = "F0.0 F1.0 X1.0 W0.0 U0.0 F0.1 W1.0 U1.0 F1.1 X1.1 W1.1 U1.1 W0.1 U0.1"


def test_a_forward_waits_for_the_updates_of_its_layer():
    assert played(GROUP) == GROUP


def test_a_forward_waits_for_all_updates_that_one_step_makes():
    expected = "F0.0 F1.0 X1.0 W0.0 U0.0 W1.0 U1.0 F0.1 F1.1 X1.1 W1.1 U1.1 W0.1 U0.1"
    assert played(GROUP, waits=True) == expected


MANY = "F0.0 F1.0 X1.0 F0.1 F1.1 X1.1 W1.0 W0.0 W1.1 U1.1 W0.1 U0.1"


def test_dw_run_at_the_end_where_nothing_waits():
    assert played(MANY, micro_batches=2) == MANY


def test_no_batch_begins_while_as_many_are_open_as_may_be():
    one_open = "F0.0 F1.0 X1.0 W1.0 W0.0 F0.1 F1.1 X1.1 W1.1 U1.1 W0.1 U0.1"
    assert played(MANY, in_flight=1, micro_batches=2) == one_open
    assert played(MANY, in_flight=2, micro_batches=2) == MANY


def test_dw_run_while_a_message_has_not_come():
    asked = []

    def here(key):
        """The second forward's input is there when it is asked for the third time."""
        if (key.kind, key.batch) != ("output", 1):
            return True
        asked.append(key)
        return len(asked) > 2

    expected = "F0.0 F1.0 X1.0 F0.1 W1.0 W0.0 F1.1 X1.1 W1.1 U1.1 W0.1 U0.1"
    assert played(MANY, here, micro_batches=2) == expected
