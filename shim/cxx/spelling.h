// SPDX-License-Identifier: BSD-3-Clause
// spelling.h: what an error tells to do, in the language of the program.
#pragma once

#include <string>

namespace optfuse {

// The library's texts name calls as Python writes them; this is the same text for C++.
std::string in_cxx(std::string text);

} // namespace optfuse
