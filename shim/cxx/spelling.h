// SPDX-License-Identifier: BSD-3-Clause
// spelling.h: names of functions and options in errors, as Python or C++ writes them.
#pragma once

#include <string>

namespace optfuse {

// The library's texts name calls as Python writes them; this is the same text for C++.
std::string in_cxx(std::string text);

} // namespace optfuse
