# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs, run with stock and with fused optimizers.

A program is a setup (models, optimizers) and a list of actions, all drawn from
one seed. It is run with stock optimizers and with fused ones in both modes. In
each mode one of these must come of it:

  equal      everything it saw has the bits that stock gives, to the end
  raised     optfuse.Error; what it saw until then is equal
  outside    backward mode only: it looks at or changes weights or state between
             backward and step(), or an exception ended backward half-way
  autograd   backward mode only: a graph is needed again whose weights an update
             has changed, and autograd said so

Anything else fails: other bits, another exception than stock's, a crash. A
failing program is shrunk and printed as code. tests/python/run_hazard.py runs
any number of them."""
