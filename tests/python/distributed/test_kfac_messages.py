# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() on several processes is K-FAC of one process on the joint batch, whatever the
order in which contributions come, and sends as many messages as it says."""

import kfac_messages
import ranks

SCRIPTS = "kfac_messages"
SAMPLE = [
    "ranks_that_use_layers_in_another_order planned stock",
    "late_contributions_on_one_rank paper stock",
]


@ranks.by(kfac_messages.SCENARIOS, three=SAMPLE, four=SAMPLE)
def test_it_is_k_fac_on_the_joint_batch(world, scenario, played):
    assert played is None, played
