// SPDX-License-Identifier: BSD-3-Clause
// settings.h: what the bits of PyTorch's operators depend on beside their arguments. A line runs
// under the settings of the moment when step() called its operator.
#pragma once

#include <ATen/Context.h>
#include <omp.h>

#include "floating.h"

namespace optfuse::recorded {

struct Settings {
    unsigned floating = of_floating_now(); // denormals
    int threads = omp_get_max_threads();
    bool deterministic = at::globalContext().deterministicAlgorithms();
    bool warns_only = at::globalContext().deterministicAlgorithmsWarnOnly();

    bool operator==(const Settings &o) const {
        return floating == o.floating && threads == o.threads &&
               deterministic == o.deterministic && warns_only == o.warns_only;
    }
    void set() const {
        of_floating_set(floating);
        omp_set_num_threads(threads);
        at::globalContext().setDeterministicAlgorithms(deterministic, warns_only);
    }
};

// As long as one exists, these are this thread's.
class WithSettings {
  public:
    explicit WithSettings(const Settings &settings) : is_other(!(settings == before)) {
        if (is_other)
            settings.set();
    }
    ~WithSettings() {
        if (is_other)
            before.set();
    }
    WithSettings(const WithSettings &) = delete;
    WithSettings &operator=(const WithSettings &) = delete;

  private:
    const Settings before;
    const bool is_other;
};

} // namespace optfuse::recorded
