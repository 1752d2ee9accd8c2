# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse run`: fuses the optimizers of a script that knows nothing of it."""
