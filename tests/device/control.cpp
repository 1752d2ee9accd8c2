// SPDX-License-Identifier: BSD-3-Clause
// control.cpp: what fakecuda.py asks of the machine.
#include <torch/library.h>

#include "device.h"
#include "graphs.h"
#include "watch.h"

namespace fake {
namespace {

void launched(void *handle, const char *kernel, const launch_range *ranges, size_t n) {
    const StreamNumber stream = stream_of(handle, current_device());
    if (stream == 0)
        return report(std::string(kernel) + " is launched on what is no stream");
    std::vector<Range> all;
    for (size_t i = 0; i < n; i++)
        all.push_back({ranges[i].address, ranges[i].bytes, ranges[i].write});
    launch(stream, kernel, all);
}

uint64_t graph_of(void *handle) {
    const StreamNumber stream = stream_of(handle, current_device());
    return stream == 0 ? 0 : capture_of(stream);
}

int device_now() { return current_device(); }

// For fake_optfuse_watch().
std::vector<int64_t> watcher() {
    fake_launched *const told = launched;
    fake_graph_of *const asked = graph_of;
    fake_device_now *const now = device_now;
    fake_keep *const kept = keep_work;
    return {reinterpret_cast<int64_t>(told), reinterpret_cast<int64_t>(asked),
            reinterpret_cast<int64_t>(now), reinterpret_cast<int64_t>(kept)};
}

void set_capture_of(c10::Stream stream, int64_t id) {
    set_capture(number_of(stream), static_cast<uint64_t>(id));
}

} // namespace
} // namespace fake

TORCH_LIBRARY(fakecuda, m) {
    m.def("races", fake::races);
    m.def("clear", fake::clear);
    m.def("set_watching", fake::set_watching);
    m.def("set_logging", fake::set_logging);
    m.def("bytes_moved", fake::bytes_moved);
    m.def("launches", fake::launches);
    m.def("set_capture", fake::set_capture_of);
    m.def("watcher", fake::watcher);
    m.def("visits", fake::visits);
    m.def("bytes_of", [](int64_t device, bool reserved) {
        return static_cast<int64_t>(fake::bytes_of(static_cast<int>(device), reserved));
    });
}
