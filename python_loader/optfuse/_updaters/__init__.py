# SPDX-License-Identifier: BSD-3-Clause
"""How the updates of an optimizer are made, by kernels or by the class's own step(); and what the
library was told of its parameters, options and state."""
