# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() on several processes is K-FAC of one process on the joint batch, whatever the
fusion and the placement."""

import kfac_scripts
import ranks

SCRIPTS = "kfac_scripts"
SAMPLE = [
    "chosen planned balanced stock",
    "chosen each round_robin stock",
    "trained adamw forward",
    "some_ranks_that_know_different_numbers_of_groups_are_refused stock",
    "no_sync copies forward",
    "rows_say_how_unequal_batches_are stock",
    "unequal_batches_are_refused later forward",
    "resumed_by_another_number_of_processes to_many stock",
]


@ranks.by(kfac_scripts.SCENARIOS, three=SAMPLE, four=SAMPLE)
def test_it_is_k_fac_on_the_joint_batch(world, scenario, played):
    assert played is None, played
