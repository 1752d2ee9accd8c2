# SPDX-License-Identifier: BSD-3-Clause
from guard_scenarios.player import main

main()
