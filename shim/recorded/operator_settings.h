// SPDX-License-Identifier: BSD-3-Clause
// operator_settings.h: what the bits of PyTorch's operators depend on beside their arguments, and where GPUs
// run them. A line runs under the settings of the moment when step() called its operator.
#pragma once

#include <ATen/Context.h>
#include <omp.h>

#include <algorithm>
#include <vector>

#include "base/device.h"
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
class WithSettings : Pinned {
  public:
    explicit WithSettings(const Settings &settings) : is_other(!(settings == before)) {
        if (is_other)
            settings.set();
    }
    ~WithSettings() {
        if (is_other)
            before.set();
    }

  private:
    const Settings before;
    const bool is_other;
};

// The streams on which operators were called, one for each device.
class Streams {
  public:
    bool has_one_of(int device) const {
        return std::any_of(all.begin(), all.end(),
                           [device](const of_stream &its) { return its.device == device; });
    }
    bool has(const of_stream &stream) const {
        return has_one_of(stream.device) && have_room_for(stream);
    }
    // Whether these operators and one on that stream run on one stream of each device.
    bool have_room_for(const of_stream &stream) const {
        for (const of_stream &its : all)
            if (its.device == stream.device)
                return its.id == stream.id;
        return true;
    }
    void put(const of_stream &stream) {
        for (const of_stream &its : all)
            if (its.device == stream.device)
                return;
        all.push_back(stream);
    }
    std::vector<of_stream> all;
};

// As long as one exists, these are this thread's current ones.
class WithStreams : Pinned {
  public:
    explicit WithStreams(const Streams &streams) {
        for (const of_stream &stream : streams.all) {
            const of_stream now = current_stream(stream.device);
            if (now.id == stream.id)
                continue;
            before.push_back(now);
            gpu_functions.exchange(nullptr, &stream);
        }
    }
    ~WithStreams() {
        for (const of_stream &stream : before)
            gpu_functions.exchange(nullptr, &stream);
    }

  private:
    std::vector<of_stream> before;
};

} // namespace optfuse::recorded
