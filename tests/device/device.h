// SPDX-License-Identifier: BSD-3-Clause
// device.h: the machine as torch sees it: a PrivateUse1 device.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "machine.h"

namespace fake {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

// The current device of the calling thread, as in CUDA.
FAKE_SHARED c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
FAKE_SHARED StreamNumber current_stream(c10::DeviceIndex device);
void set_current_stream(StreamNumber stream);

c10::Stream torch_stream(StreamNumber stream);
StreamNumber number_of(const c10::Stream &stream);

c10::Allocator *allocator();
c10::Allocator *pinned_allocator();

// How often an event was used with another device than its own being current.
int64_t visits();

} // namespace fake
