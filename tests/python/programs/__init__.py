# SPDX-License-Identifier: BSD-3-Clause
"""Training programs of deeds, run with stock and with fused optimizers.

A program is a setup (models, optimizers) and a list of deeds. It is run with
stock optimizers and with fused ones in both modes. In each mode one of these
must come of it:

  equal      everything it saw has the bits that stock gives, to the end
  raised     optfuse.Error; what it saw until then is equal
  outside    backward mode only: it looks at or changes weights or state between
             backward and step(), or an exception ended backward half-way
  autograd   backward mode only: a graph is needed again whose weights an update
             has changed, and autograd said so

Anything else fails: other bits, another exception than stock's, a crash, and in
test_each.py whatever the deed does not say. A failing random program is shrunk
and printed as code. tests/python/run_programs.py runs any number of them."""

import folders  # noqa: F401 - optimizers and models of other folders are imported by their names
