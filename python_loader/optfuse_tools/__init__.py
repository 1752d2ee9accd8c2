# SPDX-License-Identifier: BSD-3-Clause
"""The commands `python -m optfuse run`, `ab` and `doctor`, and optfuse.ab()."""
