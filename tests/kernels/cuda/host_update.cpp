// SPDX-License-Identifier: BSD-3-Clause
// host_update.cpp: the kernels of update.cu for the CPU, one rule and dtype a
// compilation, as on the GPU.
#include "host_device.h"

#define OF_AS_ON_GPU

#include HOST_SOURCE
