// SPDX-License-Identifier: BSD-3-Clause
// main.cpp: runs the tests of optfuse.hpp, in a process that has no Python, or those of a GPU.
#include "optfuse.hpp"

#include "common.h"
#include "tests.h"

#include <fstream>

static bool has_python() {
    std::ifstream maps("/proc/self/maps");
    const std::string text(std::istreambuf_iterator<char>(maps), {});
    return text.find("libpython") != std::string::npos ||
           text.find("libtorch_python") != std::string::npos;
}

int main(int argc, char **argv) {
    if (argc > 3 && std::string(argv[1]) == "device")
        on_gpu::play(argv[2], argv[3]);
    if (argc > 1 && std::string(argv[1]) == "cuda")
        on_gpu::play_real();
    test_training();
    test_distance();
    test_threads();
    test_clipping();
    test_refusals();
    test_lifetime();
    expect(!has_python(), "the process has no Python");
    std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << std::endl;
    return failures == 0 ? 0 : 1;
}
