# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse ab`: what fusion gains in a script, which runs as it is in fresh processes."""
