// SPDX-License-Identifier: BSD-3-Clause
// tests.h: the tests of optfuse.hpp.
#pragma once

// The distance of float32 weights after 200 steps, as docs/cxx.md says.
constexpr double DISTANCE = 5e-7;

void test_training(); // training.cpp
void test_distance();
void test_threads();
void test_clipping(); // clipping.cpp
void test_refusals(); // refusals.cpp
void test_lifetime();

namespace on_gpu {
// ../device/cxx.cpp: on the played GPU, and on the machine's own. Neither returns.
void play(const char *device, const char *kernels);
void play_real();
}
