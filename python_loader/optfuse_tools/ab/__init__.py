# SPDX-License-Identifier: BSD-3-Clause
"""ab(): what fusion gains on the user's own model, in interleaved rounds."""
