# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse doctor`: what is here, and whether it works."""
