// SPDX-License-Identifier: BSD-3-Clause
// gil.h: Python's global lock. An update that runs an optimizer's own step()
// takes it while it holds the lock of its plan; so whoever waits for such a lock
// must not hold it. PyTorch calls some operators with it held.
#pragma once

namespace optfuse {

// From now on WithoutGil does something: there are plans whose updates run Python.
void updates_take_the_gil();

// As long as it lives the thread does not hold the GIL, if it did.
class WithoutGil {
  public:
    WithoutGil();
    ~WithoutGil();
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;

  private:
    void *thread; // its PyThreadState, or NULL
};

} // namespace optfuse
